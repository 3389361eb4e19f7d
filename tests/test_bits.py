"""The record of bits: what is recorded compares equal with itself, and a change is told by its part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bits import compare, digest, read_record, record


def case(weight: float = 1.0, state: int = 0, error: str = "") -> Any:
    def run(folder: Path, parts: dict[str, Any]) -> None:
        parts |= {"models": {"w": torch.tensor([weight, 0.0])}, "state": {"count": state}}
        if error:
            raise ValueError(error)

    return run


CASES = {"one": case(), "two": case(error="No.")}


def test_a_recorded_case_compares_equal_and_a_changed_one_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bits.jsonl"
    assert record(path, CASES, only=["one"]) == 1
    assert record(path, CASES) == 1  # goes on where it ended
    assert compare(path, CASES) == {}
    assert compare(path, {"one": case(1.0000001), "two": case(state=1, error="Never.")}, jobs=2) == {
        "one": ["models"],
        "two": ["state", "sentence"],
    }
    assert "now:    ValueError: Never." in capfd.readouterr().out
    assert compare(path, {"one": case(error="No.")}) == {"one": ["sentence"], "two": ["there is no such case any more"]}
    assert compare(path, {"two": case()}, only=["two"]) == {"two": ["sentence"]}


def test_a_line_that_was_cut_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "bits.jsonl"
    record(path, CASES)
    path.write_text(path.read_text()[:-20])
    assert len(read_record(path)) == 1
    assert record(path, CASES) == 1
    assert compare(path, CASES) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ([1, [2]], [[1], 2]),
        (1, 1.0),
        (None, False),
    ],
    ids=["type", "shape", "sign", "names", "nesting", "number", "nothing"],
)
def test_digests_tell_apart(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


def test_the_order_of_names_is_no_difference() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_other_children_of_this_process_are_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    assert record(tmp_path / "bits.jsonl", CASES) == 2
    assert other.wait() == 3
