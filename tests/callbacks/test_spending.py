"""The files that tell what ClientDP spends."""

from __future__ import annotations

import json

import pytest

from fedlightning.callbacks.shared.spending import COLUMNS, releases_in, write_spending

TOLD = {"epsilon": 1.5, "delta": 1e-3, "noise_multiplier": 2.0, "clip": 1.0, "rate": 0.5, "rounds": 1, "private": True}


def test_a_release_has_one_row_and_the_sum_is_written_with_it(tmp_path):
    assert releases_in(tmp_path) == releases_in(None) == []
    write_spending(tmp_path, TOLD, [], "first")
    write_spending(tmp_path, TOLD | {"epsilon": 2.5, "rounds": 2}, releases_in(tmp_path), "second")
    write_spending(tmp_path, TOLD | {"epsilon": 2.5, "rounds": 2}, releases_in(tmp_path), None)  # the same again
    rows = releases_in(tmp_path)
    assert [(row[0], row[1], row[-1]) for row in rows] == [("1", "1.5", "first"), ("2", "2.5", "second")]
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert json.loads((tmp_path / "privacy.json").read_text())["epsilon"] == 2.5
    assert not list(tmp_path.glob("*.part"))


def test_a_disk_that_fails_leaves_what_was_written(tmp_path, monkeypatch):
    write_spending(tmp_path, TOLD, [], "first")
    monkeypatch.setattr("pathlib.Path.replace", lambda self, other: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_spending(tmp_path, TOLD, releases_in(tmp_path), "second")
    assert len(releases_in(tmp_path)) == 1
