"""Files that hold a secret: nobody but this user reads them, whichever command or class has written them."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlightning import FederatedTrainer
from fedlightning.callbacks import ClientDP, FedAvg, SampleDP
from fedlightning.storage.files import write_secret
from fedlightning.testing.toys import ToyData, ToyModule


@pytest.fixture(autouse=True)
def open_to_all() -> Iterator[None]:
    """As most users have it: what nobody closes, everybody on the machine reads."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("protection", [ClientDP, SampleDP])
def test_the_secret_of_the_noise_is_read_by_nobody_else(tmp_path, protection, monkeypatch):
    """Who has it computes the noise, and subtracts it."""
    pytest.importorskip("opacus")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "5ec7e70" * 5)
    dp = protection(delta=1e-3, noise_multiplier=1.0, ledger=str(tmp_path / "ledger"))
    options = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    callbacks = [FedAvg(weighting="uniform"), dp]
    for resume, rounds in ((None, 1), ("auto", 2)):
        trainer = FederatedTrainer(
            max_rounds=rounds, local_steps=1, callbacks=callbacks, default_root_dir=tmp_path, name="r", **options
        )
        trainer.fit(ToyModule(), datamodule=ToyData(), resume=resume)
        told = [path for path in tmp_path.rglob("*") if path.is_file() and b"5ec7e70" in path.read_bytes()]
        told += list((tmp_path / "ledger").glob("*.json"))
        assert len(told) >= 2, told
        assert {path.name: oct(mode(path)) for path in told if mode(path) != 0o600} == {}
        for path in told:  # as an earlier version has left it: going on closes it
            path.chmod(0o644)


def test_a_file_that_lies_there_already_and_a_link_are_not_written_through(tmp_path):
    """A leftover that others may read, or a link that somebody has put there: neither gets the secret."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("as it was")
    for number, leave in enumerate((lambda path: path.symlink_to(elsewhere), lambda path: path.write_text("left"))):
        path = tmp_path / f"key{number}"
        leave(path)
        leave(path.with_name(path.name + ".tmp"))
        write_secret(path, b"secret")
        assert path.read_bytes() == b"secret" and not path.is_symlink() and mode(path) == 0o600
    assert elsewhere.read_text() == "as it was"


def test_a_secret_is_on_the_disk_with_its_name(tmp_path, monkeypatch):
    """A ledger whose folder is not synced has lost its newest file, and with it what was spent, when the power fails."""
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), real(file))[1])
    write_secret(tmp_path / "key", b"secret")
    assert synced == [(tmp_path / "key").stat().st_ino, tmp_path.stat().st_ino]
