"""Files of a run's state: which are written again, and which are removed."""

from __future__ import annotations

import json

import pytest
import torch

from fedlightning.codec.tree import load as load_values
from fedlightning.resume import manifest as long_lists
from fedlightning.resume.manifest import sum_of
from fedlightning.resume.state_files import BEFORE, MANIFEST, load, save
from fedlightning.storage.files import sha256


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
    assert load_values(tmp_path / found[4]["d"])["d"] == {"id": "d"}
    known = {
        name for file in (MANIFEST, BEFORE) for name in json.loads((tmp_path / file).read_text())["clients"].values()
    }
    assert {path.name for path in tmp_path.glob("records-*")} == known


def extra_of(count):
    history = [{"round": n, "bytes_up": 1, "bytes_down": 1, "steps": n, "seconds": 0.5} for n in range(count)]
    usual = {"update": [1.0] * count}
    return {"history": history, "failures": [{"round": n} for n in range(count)], "norms": usual} | {
        "explosions": {"usual": {"update": [float(n) for n in range(count)]}, "warnings": []}
    }


def saved(folder, round, extra):
    template = {"w": torch.zeros(1)}
    save(folder, round, {"w": torch.ones(1)}, ["a"], lambda client: {"id": client}, lambda: template, extra)
    return (folder / MANIFEST).stat().st_size


def test_a_manifest_does_not_grow_with_the_rounds(tmp_path, monkeypatch):
    sizes = [saved(tmp_path, count, extra_of(count)) for count in (150, 360, 960, 961, 1960)]
    assert max(sizes[1:]) < 1.1 * min(sizes[1:])
    assert load(tmp_path).extra == extra_of(1960)
    written = []
    real = long_lists.write_text_atomically
    monkeypatch.setattr(
        long_lists, "write_text_atomically", lambda path, text: (written.append(path), real(path, text))
    )
    for count in range(1961, 1974):  # nothing but the end is written
        saved(tmp_path, count, extra_of(count))
    assert not written and load(tmp_path).extra == extra_of(1973)
    (tmp_path / MANIFEST).unlink()
    assert load(tmp_path).extra == extra_of(1972)  # the state before it is whole, too
    assert len(list(tmp_path.glob("list-*.json"))) <= 8


def test_a_list_that_went_back_and_grew_otherwise_is_written_again(tmp_path):
    saved(tmp_path, 300, extra_of(300))
    other = extra_of(300)
    other["failures"][274] = {"round": -1}
    saved(tmp_path, 301, other)
    assert load(tmp_path).extra == other
    saved(tmp_path, 10, extra_of(10))
    assert load(tmp_path).extra == extra_of(10)


@pytest.mark.parametrize("damage", ["missing", "changed", "no list", "another place"])
def test_a_damaged_beginning_of_a_list_is_noticed(tmp_path, damage):
    saved(tmp_path, 1, extra_of(1))
    saved(tmp_path, 300, extra_of(300))
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    name = manifest["extra"]["history"][long_lists.HEAD]
    if damage == "missing":
        (tmp_path / name).unlink()
    elif damage == "changed":
        (tmp_path / name).write_text("[]")
    else:
        if damage == "no list":
            (tmp_path / name).write_text('[{"round": "x"}]')
            manifest["sha256"][name] = sha256(tmp_path / name)
        else:
            manifest["extra"]["history"][long_lists.HEAD] = "../x.json"
        manifest["check"] = sum_of(manifest)
        (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match="is damaged"):
        assert load(tmp_path).extra == extra_of(1)
