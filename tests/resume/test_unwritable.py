"""Disks that are full and folders that cannot be written: the saved state stays as it was, and a sentence says what to do."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch

from fedlightning import FederatedTrainer

# isort: split
from fedlightning.cli import main
from fedlightning.codec.tree import file_of
from fedlightning.config.input_errors import explain
from fedlightning.resume.lock import LOCK
from fedlightning.run.folder import RunFolder
from fedlightning.storage import files
from fedlightning.storage.files import UnwritableError
from tests.helpers import same, toy_data
from tests.processes import forked
from tests.resume.planted import make_run, resume, toy, trainer_of


class FullDisk:
    """Lets some calls of the functions that change the disk pass, then fails every one until it is emptied."""

    def __init__(self, monkeypatch, passes, code=errno.ENOSPC):
        self.left, self.code, self.calls, self.full = passes, code, 0, True
        monkeypatch.setattr(torch, "save", self.guarded(torch.save))
        monkeypatch.setattr(files, "sync", self.guarded(files.sync))
        for name in ("replace", "open", "truncate", "ftruncate", "write", "link"):
            monkeypatch.setattr(os, name, self.guarded(getattr(os, name)))
        monkeypatch.setattr(
            Path, "open", self.guarded(Path.open, lambda path, mode="r", *_, **__: set(mode) & set("wax+"))
        )
        monkeypatch.setattr(Path, "mkdir", self.guarded(Path.mkdir))

    def guarded(self, function, counts=lambda *_, **__: True):
        def call(*given, **named):
            if counts(*given, **named) and self.full:
                self.calls += 1
                if self.calls > self.left:
                    raise OSError(self.code, os.strerror(self.code))
            return function(*given, **named)

        return call


def state_of(run):
    return {path.name: path.read_bytes() for path in (run / "checkpoints" / "last").iterdir() if path.suffix != ".tmp"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing has disturbed: two rounds, and one more."""
    root = tmp_path_factory.mktemp("whole")
    make_run(root)
    return resume(root)


def calls_of_a_resumed_run(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        make_run(tmp_path / "count")
        disk = FullDisk(patch, passes=10**9)
        resume(tmp_path / "count")
    return disk.calls


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_write_leaves_a_state_to_go_on_from(tmp_path, monkeypatch, whole):
    writes = calls_of_a_resumed_run(tmp_path, monkeypatch)
    assert writes > 30
    for passes in range(writes):
        root = tmp_path / str(passes)
        make_run(root)
        with monkeypatch.context() as patch:
            FullDisk(patch, passes)
            with pytest.raises(
                UnwritableError, match=r"cannot be written: No space left on device\. Make room, then go on"
            ):
                resume(root)
        trainer = resume(root)
        same(trainer.server.model, whole.server.model)
        assert trainer.rows == whole.rows


@pytest.mark.parametrize("passes", [0, 5, 9, 14])
def test_a_full_disk_is_a_sentence_and_the_state_is_untouched(tmp_path, monkeypatch, whole, passes):
    run = make_run(tmp_path).run.path
    with monkeypatch.context() as patch:
        FullDisk(patch, passes)
        with pytest.raises(
            UnwritableError, match=r"cannot be written: No space left on device\. Make room, then"
        ) as found:
            resume(tmp_path)
    assert "Make room" in explain(found.value)
    assert not list(run.rglob("*.tmp"))
    assert not (run / LOCK).exists()
    trainer = resume(tmp_path)
    same(trainer.server.model, whole.server.model)
    assert trainer.rows == whole.rows


def test_a_device_that_is_really_full(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    run = make_run(tmp_path).run.path
    before = state_of(run)
    (run / "checkpoints" / "last" / "manifest-before.json.tmp").symlink_to(
        "/dev/full"
    )  # a state's own is not written through
    with pytest.raises(UnwritableError, match=r"manifest-before\.json cannot be written: No space left on device"):
        resume(tmp_path)
    assert before.items() <= state_of(run).items()
    assert resume(tmp_path).rounds_done == 3


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("this machine does not let the test mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_small_disk_fills_up_and_the_run_goes_on_when_there_is_room(small_disk, whole):
    make_run(small_disk)
    used = sum(path.stat().st_blocks * 512 for path in small_disk.rglob("*"))
    assert used < 350_000
    with (small_disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(UnwritableError, match=r"cannot be written: No space left on device"):
        resume(small_disk)
    (small_disk / "ballast").unlink()
    trainer = resume(small_disk)
    same(trainer.server.model, whole.server.model)
    assert trainer.rows == whole.rows


def test_a_read_only_disk(small_disk):
    run = make_run(small_disk).run.path
    before = state_of(run)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UnwritableError, match=r"Read-only file system\. Use a folder that you may write into"):
        resume(small_disk)
    with pytest.raises(UnwritableError, match="Read-only file system"):
        trainer_of(small_disk).fit(toy(), datamodule=toy_data())
    assert state_of(run) == before


@pytest.mark.parametrize("target", ["nowhere", "runs"], ids=["dangling", "loop"])
def test_a_link_that_leads_nowhere(tmp_path, target):
    (tmp_path / "runs").symlink_to(tmp_path / target)
    with pytest.raises(UnwritableError, match=r"runs/run/version_0 cannot be written: "):
        RunFolder(tmp_path / "runs", "run")


def test_a_file_where_the_folder_should_be(tmp_path, capsys):
    place = tmp_path / "runs"
    place.write_text("a file")
    with pytest.raises(
        UnwritableError, match=r"runs/run/version_0 cannot be written: Not a directory\. Something else lies"
    ):
        trainer_of(place).fit(toy(), datamodule=toy_data())
    words = ["--config", "configs/quickstart.yaml", f"--trainer.default_root_dir={place}", "--trainer.max_rounds=1"]
    assert main(["fit", *words]) == 2
    error = capsys.readouterr().err
    assert "cannot be written: Not a directory. Something else lies in its place" in error
    assert "Traceback" not in error
    assert place.read_text() == "a file"


@pytest.mark.parametrize("name", ["../../out", "/out", "a/../../out", "..", "", "a//b", "a\\b", ".", "a\0b"])
def test_a_name_cannot_leave_the_root(tmp_path, name):
    with pytest.raises(ValueError, match=r"^name=.* must be the name of a folder below default_root_dir"):
        FederatedTrainer(name=name, default_root_dir=tmp_path)


@pytest.mark.parametrize("version", ["../out", "/out", "a/b", "..", "", "a\\b"])
def test_a_version_is_one_folder(tmp_path, version):
    with pytest.raises(ValueError, match=r"^version=.* must be the name of one folder"):
        FederatedTrainer(version=version, default_root_dir=tmp_path)
    FederatedTrainer(name="study/fedprox", version="seed_1", default_root_dir=tmp_path)


def test_a_disk_that_takes_half_a_file_is_named(tmp_path):
    """By the system's own limit: `torch.save` makes an error about positions in an archive of the one of a full disk.

    A state is written piece by piece.
    """

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        path, values = tmp_path / "state.pt", {"a": torch.zeros(3), "w": torch.zeros(20_000)}
        for write in (file_of(values, "it").save, lambda path: files.save_tensors(values, path)):
            try:
                with files.writing(path):
                    write(path)
            except UnwritableError as error:
                print(error)

    done = forked(work, tmp_path)
    assert done.returncode == 0 and done.stdout.count("state.pt cannot be written: File too large. Make room") == 2
    assert not (tmp_path / "state.pt.tmp").exists()
