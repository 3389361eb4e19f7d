"""States of the former format, whose values were pickled as they were: opened as they are where that runs no code, else once
with the user's word, and written anew."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from fedlightning.cli import main
from fedlightning.run.persistence import VERSION, DamagedStateError
from fedlightning.run.plain import decode
from tests.helpers import same, toy_data
from tests.run.planted import Evil, make_run, resume, rewrite, sign, toy, trainer_of


def make_old(run, more=None):
    """Turn the saved state into one of version 2."""
    last = run / "checkpoints" / "last"
    manifest = json.loads((last / "manifest.json").read_text())
    for name in {"template.pt", manifest["server"], *manifest["clients"].values()}:
        rewrite(last / name, decode)
    if more is not None:
        rewrite(last / manifest["server"], lambda server: server | {"state": server["state"] | {"More": {"it": more}}})
    sign(last, version=2)
    return last


def test_a_plain_one_goes_on_as_it_is_to_the_same_result(tmp_path):
    whole = make_run(tmp_path / "whole", rounds=3)
    cut = make_run(tmp_path / "cut")
    last = make_old(cut.run.path)
    trainer = resume(tmp_path / "cut")
    same(trainer.server.model, whole.server.model)
    assert trainer.rows[-1] == whole.rows[-1]
    manifest = json.loads((last / "manifest.json").read_text())
    assert manifest["version"] == VERSION
    assert set(manifest["clients"].values()) == {"records-000003-0.pt"}  # all are written anew


def test_one_with_other_values_needs_the_users_word_once(tmp_path):
    whole = make_run(tmp_path / "whole", rounds=4)
    cut = make_run(tmp_path / "cut")
    last = make_old(cut.run.path, more=pathlib.PurePosixPath("a"))
    before = {path.name: path.read_bytes() for path in last.iterdir()}
    with pytest.raises(
        DamagedStateError, match=r"earlier version .* it names pathlib\.PurePosixPath, .* trust_old_state"
    ):
        resume(tmp_path / "cut")
    assert {path.name: path.read_bytes() for path in last.iterdir()} == before
    resume(tmp_path / "cut", trust_old_state=True)
    trainer = resume(tmp_path / "cut", rounds=4)
    same(trainer.server.model, whole.server.model)
    assert trainer.server.state["More"] == {"it": pathlib.PurePosixPath("a")}


def test_the_word_does_not_hold_for_the_present_format(tmp_path):
    run = make_run(tmp_path).run.path
    torch.save({"a": Evil(tmp_path / "evil")}, run / "checkpoints" / "last" / "server-000002.pt")
    sign(run / "checkpoints" / "last")
    with pytest.raises(DamagedStateError, match="cannot be read"):
        resume(tmp_path, trust_old_state=True)
    assert not (tmp_path / "evil").exists()


def test_evaluation_takes_the_word_too(tmp_path):
    run = make_run(tmp_path).run.path
    make_old(run, more=pathlib.PurePosixPath("a"))
    trainer = trainer_of(tmp_path)
    with pytest.raises(DamagedStateError, match="trust_old_state"):
        trainer.restore(toy(), toy_data(), run)
    trainer.restore(toy(), toy_data(), run, trust_old_state=True)
    assert trainer.test()


def test_the_command_line_knows_it(capsys):
    for command in ("fit", "test", "validate", "predict"):
        assert main([command, "--help"]) == 0
        assert "--trust_old_state" in capsys.readouterr().out
