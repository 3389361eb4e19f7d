"""Folders of runs without a fixed version."""

from __future__ import annotations

import pytest

from fedlightning.federation.federation import Federation
from fedlightning.run.folder import RunFolder
from tests.helpers import Toy, make_trainer, toy_data


def test_runs_that_start_at_one_instant_get_different_folders(tmp_path):
    first, second = (RunFolder(tmp_path, "a") for _ in range(2))  # neither has written anything yet
    assert [run.path.name for run in (first, second)] == ["version_0", "version_1"]


def test_a_run_that_is_refused_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(self):
        assert (tmp_path / "runs" / "a" / "version_0").is_dir()
        raise ValueError("no")

    monkeypatch.setattr(Federation, "check", refuse)
    with pytest.raises(ValueError, match="no"):
        make_trainer(tmp_path / "runs", [], name="a").fit(Toy(), datamodule=toy_data())
    assert list(tmp_path.iterdir()) == []
