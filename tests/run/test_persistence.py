"""Files of a run's state: which are written again, and which are removed."""

from __future__ import annotations

import json

import torch

from fedlightning.run.persistence import BEFORE, MANIFEST, save
from fedlightning.storage.files import read_tensors


def test_records_whose_neighbours_have_moved_on_are_written_again(tmp_path):
    """Else a file of a thousand clients would stay for one of them."""
    trained = {1: "abcd", 2: "abc", 3: "a", 4: "a"}
    found = {}
    for round, changed in trained.items():
        template = {"w": torch.zeros(1)}
        save(tmp_path, round, {"w": torch.ones(1)}, changed, lambda client: {"id": client}, lambda t=template: t, {})
        found[round] = json.loads((tmp_path / MANIFEST).read_text())["clients"]
    assert found[2]["d"].startswith("records-000001-")
    assert found[3] == {"a": found[3]["a"], "b": found[2]["b"], "c": found[2]["c"], "d": found[3]["a"]}
    assert read_tensors(tmp_path / found[4]["d"])["d"] == {"id": "d"}
    known = {
        name for file in (MANIFEST, BEFORE) for name in json.loads((tmp_path / file).read_text())["clients"].values()
    }
    assert {path.name for path in tmp_path.glob("records-*")} == known
