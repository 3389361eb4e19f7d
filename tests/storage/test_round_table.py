"""Tables that grow by a round: what a resumed run takes back, and what an append does not read."""

from __future__ import annotations

import csv

import pytest

from fedlightning.storage.files import UnwritableError, add_round

COLUMNS = ("round", "client", "value")


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_rounds_are_appended_to_the_same_file(tmp_path):
    path = tmp_path / "table.csv"
    add_round(path, COLUMNS, 1, [(1, "a", 0.5), (1, "b", 1e-06)])
    first = path.stat().st_ino
    add_round(path, COLUMNS, 2, [(2, "a", 0.25)])
    assert path.stat().st_ino == first
    assert rows(path) == [list(COLUMNS), ["1", "a", "0.5"], ["1", "b", "1e-06"], ["2", "a", "0.25"]]


def test_a_resumed_run_takes_back_its_round_and_later_ones(tmp_path):
    path = tmp_path / "table.csv"
    for number in (1, 2, 10):
        add_round(path, COLUMNS, number, [(number, "a", number)])
    add_round(path, COLUMNS, 2, [(2, "b", 7)])
    assert rows(path) == [list(COLUMNS), ["1", "a", "1"], ["2", "b", "7"]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.csv"]


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 8])
def test_a_row_that_was_cut_off_goes(tmp_path, cut):
    path = tmp_path / "table.csv"
    for number in (1, 2):
        add_round(path, COLUMNS, number, [(number, "a", 1)])
    path.write_bytes(path.read_bytes()[:-cut])
    add_round(path, COLUMNS, 2, [(2, "b", 3)])
    assert rows(path) == [list(COLUMNS), ["1", "a", "1"], ["2", "b", "3"]]


def test_a_place_that_takes_no_file_is_named(tmp_path):
    with pytest.raises(UnwritableError, match=r"table\.csv cannot be written"):
        add_round(tmp_path / "missing" / "table.csv", COLUMNS, 1, [(1, "a", 1)])
