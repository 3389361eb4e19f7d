"""The ledger of what runs have spent: two at once lose nothing, and no entry takes away from what others have spent."""

from __future__ import annotations

import json
from multiprocessing import get_context
from pathlib import Path

import pytest

from fedlightning.callbacks.shared.ledger import Ledger

ROUNDS = 40


def spend(folder: Path, secret: str) -> None:
    for count in range(1, ROUNDS + 1):
        Ledger(str(folder), "clients", secret).note([(1.0, 0.1, count)])


def spend_within(folder: Path, secret: str, limit: int) -> None:
    """Spend a step at a time while all runs together have spent less than the limit."""
    for count in range(1, ROUNDS + 1):
        try:
            with Ledger(str(folder), "clients", secret).hold([(1.0, 0.1, count)]) as others:
                if count + sum(steps[2] for steps in others) > limit:
                    raise ValueError("too much")
        except ValueError:
            return


def test_runs_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    found = [get_context("fork").Process(target=spend, args=(tmp_path, secret)) for secret in "abc"]
    for process in found:
        process.start()
    for process in found:
        process.join()
    with Ledger(str(tmp_path), "clients", "d").hold(None) as others:
        assert sorted(others) == [[1.0, 0.1, ROUNDS]] * 3


def test_runs_at_the_same_time_do_not_exceed_a_limit_together(tmp_path: Path) -> None:
    limit = ROUNDS + 7
    found = [get_context("fork").Process(target=spend_within, args=(tmp_path, secret, limit)) for secret in "abc"]
    for process in found:
        process.start()
    for process in found:
        process.join()
    with Ledger(str(tmp_path), "clients", "d").hold(None) as others:
        assert sum(steps[2] for steps in others) == limit


@pytest.mark.parametrize(
    "entry",
    [
        "[1, 0.1, -5]",
        "[NaN, 0.1, 5]",
        "[1, 2, 5]",
        "[1, 0.1, NaN]",
        "[1, 0.1]",
        "[Infinity, 0.1, 5]",
        "[1, 0.1, 0.5]",
        '"1"',
        "null",
    ],
)
def test_an_entry_that_is_none_is_refused(entry: str, tmp_path: Path) -> None:
    text = json.dumps({"runs": {"other": ["ENTRY"]}}).replace('"ENTRY"', entry)
    (tmp_path / "clients.json").write_text(text)
    with pytest.raises(ValueError, match=r"clients.json is not a ledger .* restore it"):
        Ledger(str(tmp_path), "clients", "mine").note([(1.0, 0.1, 1)])
    assert (tmp_path / "clients.json").read_text() == text
