"""The table of methods: what is run, and what is written of it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from fedlightning.catalogue import ALGORITHMS
from tools.methods_table import NOTES, page, read, settings


def write(out: Path, method: str, seed: int, accuracy: float) -> None:
    result = {"accuracy": accuracy, "worst": accuracy / 2, "megabytes": 1.0, "seconds": 2.0}
    path = out / "digits" / f"{method}-{seed}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result))


def test_the_page_has_the_runs_and_the_reasons_of_what_is_below_local(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.5, 0.7)):
        write(tmp_path, "Local", seed, accuracy)
        write(tmp_path, "FedAvg", seed, accuracy + 0.2)
    write(tmp_path, "FedBABU", 0, 0.1)
    write(tmp_path, "Ditto", 0, 0.2)
    (tmp_path / "digits" / "FedProx-0.json").write_text('{"error": "ValueError: no"}')
    notes = {"FedBABU": {"all": "a weak body"}, "FedAvg": {"digits": "not shown: it is above"}}
    text = page(settings("h", "m"), read(tmp_path), notes)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [line[0][2:] for line in lines[1:5]] == ["FedAvg", "Local", "Ditto", "FedBABU"]
    assert lines[1][2:4] == ["0.800 ± 0.141", "0.400"]
    assert lines[3][-1] == "**below Local, not explained** |"
    assert lines[4][-1] == "a weak body |"
    assert "not shown" not in text
    assert "FedProx (no run yet)" in text


def test_a_method_that_was_not_run_keeps_its_line(tmp_path: Path) -> None:
    for method, accuracy in {"Local": 0.5, "FedAvg": 0.7, "Ditto": 0.2, "FedProto": 0.49999}.items():
        write(tmp_path, method, 0, accuracy)
    every, notes = settings("h", "m"), {"Ditto": {"all": "a reason"}, "FedProto": {"all": "nearly"}}
    first = page(every, read(tmp_path), notes)
    (tmp_path / "digits" / "Local-0.json").unlink()
    (tmp_path / "digits" / "Ditto-0.json").unlink()
    assert page(every, read(tmp_path), notes, before=first) == first
    write(tmp_path, "FedAvg", 0, 0.1)
    again = page(every, read(tmp_path), notes, before=first)
    methods = [
        line.split(" | ")[0][2:] for line in again.splitlines() if line.startswith("| ") and "accuracy" not in line
    ]
    assert methods == ["Local", "FedProto", "Ditto", "FedAvg"]
    assert "| Ditto | a model for each client | 0.200 | 0.100 | 1.00 | 2.0 | 1 | a reason |" in again


def test_notes_are_of_methods_and_data_sets_that_exist() -> None:
    notes = yaml.safe_load(NOTES.read_text())
    assert set(notes) <= {row.name for row in ALGORITHMS}
    assert {name for reasons in notes.values() for name in reasons} <= {"all", *settings("h", "m")}
