"""What is accepted and refused before round 1 is what the table says: some of it always, all of it in the slow tests.

After a change that is meant, `python -m tools.pairs write tests/pairs.txt` writes the table anew; every line that
differs is a change of what users may do.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from tools.pairs import NEUTRAL, WITH, ask_all, ask_alone, ask_pair, differences, marks, partners, read, rows, text
from tools.refusals import Answer

TABLE = Path(__file__).parents[1] / "pairs.txt"
SLICES = 16
ONE_ORDER_ONLY: set[tuple[str, str]] = set()
"""Pairs that are refused in this order, and accepted in the other."""


def wrong(found: Iterable[tuple[str, str, Answer]]) -> list[str]:
    """Return in what some answers are not those of the table."""
    found, table = list(found), read(TABLE)
    said: dict[str, dict[str, str]] = {line: {} for line, _, _ in found}
    for line, name, _ in found:
        if name in table[line]:
            said[line][name] = table[line][name]
    now = marks(found)
    return differences(said, {line: now[line] for line in said})


def test_the_table_has_every_callback_and_situation() -> None:
    table = read(TABLE)
    assert list(table) == [*WITH, *rows()]
    assert all(refused.keys() <= rows().keys() for refused in table.values())


@pytest.mark.slow
def test_some_pairs() -> None:
    draw = random.Random(0)
    pairs = [(first, second) for first in rows() for second in partners(first)]
    assert not wrong((first, second, ask_pair(first, second)) for first, second in draw.sample(pairs, 150))


def test_every_method_in_some_situation() -> None:
    draw, here = random.Random(1), [situation for situation in WITH if situation != "sites"]
    drawn = [(draw.choice(here), name) for name in rows() if NEUTRAL not in name]
    assert not wrong((situation, name, ask_alone(name, situation)) for situation, name in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("slice", range(SLICES))
def test_all_pairs_and_situations(slice: int) -> None:
    assert not wrong(answer for name in list(rows())[slice::SLICES] for answer in ask_all(name))


def test_the_order_of_the_list_does_not_matter() -> None:
    table = read(TABLE)
    refused = {(first, second) for first in rows() for second in table[first]}
    assert {pair for pair in refused if pair[::-1] not in refused} == ONE_ORDER_ONLY


def test_a_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    table: dict[str, dict[str, str]] = {line: {} for line in (*WITH, *rows())}
    table["Adam"] = {"APFL": "", "APFL logits": "", "FedCovid semi-hard": "", "FedCovid": "-", "FedAvg": "<(KeyError)"}
    table["FedAvg"] = {"APFL": ">", "APFL logits": ">", "FedCovid semi-hard": ">"}
    path = tmp_path / "pairs.txt"
    path.write_text(text(table))
    assert "FedAvg: APFL*>, FedCovid semi-hard>\n" in path.read_text()
    assert read(path) == table


def test_a_difference_is_found() -> None:
    before = {"FedAvg": {"Central": "", "CFL": "<"}, "CFL": {}}
    now = {"FedAvg": {"Central": "", "APFL": ""}, "APFL": {}}
    assert differences(before, before) == []
    assert differences(before, now) == [
        "APFL: only in one of the tables",
        "CFL: only in one of the tables",
        "FedAvg, APFL: accepted before, refused now",
        "FedAvg, CFL: refused< before, accepted now",
    ]
