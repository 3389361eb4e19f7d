"""Folders of runs without a fixed version."""

from __future__ import annotations

import pytest

from fedlightning.resume.lock import RunLock
from fedlightning.run.folder import RunFolder
from fedlightning.server.federation import Federation
from tests.helpers import Toy, make_trainer, toy_data


def test_runs_that_start_at_one_instant_get_different_folders(tmp_path):
    first, second = (RunFolder(tmp_path, "a") for _ in range(2))  # neither has written anything yet
    assert [run.path.name for run in (first, second)] == ["version_0", "version_1"]


def test_auto_starts_again_where_a_run_was_killed_before_its_first_state(tmp_path):
    def fit():
        trainer = make_trainer(tmp_path, [], max_rounds=1, name="a", save_state=0)
        trainer.fit(Toy(), datamodule=toy_data(), resume="auto")
        return trainer.run.path

    def kill(path):  # as it leaves a folder: scores, a lock that nobody holds, no state, no summary
        (path / "summary.json").unlink()
        (path / ".lock").write_text("{}")

    first = fit()
    assert fit().name == "version_1"  # the first one came to its end
    kill(first)
    with RunLock(first):
        assert fit().name == "version_2"  # it is still at work
    (first / ".lock").write_text("{}")
    (first / "metrics.csv").write_text("round")  # cut off
    assert fit() == first and (first / "metrics.csv").read_text().count("\n") > 2
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["version_0", "version_1", "version_2"]


def test_a_run_that_is_refused_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(self):
        assert (tmp_path / "runs" / "a" / "version_0").is_dir()
        raise ValueError("no")

    monkeypatch.setattr(Federation, "check", refuse)
    with pytest.raises(ValueError, match="no"):
        make_trainer(tmp_path / "runs", [], name="a").fit(Toy(), datamodule=toy_data())
    assert list(tmp_path.iterdir()) == []
