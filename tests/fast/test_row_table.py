"""Many rows, the oldest of them in a file: which are found, and which parts of the file are read for that."""

from __future__ import annotations

from fedlightning.fast.fast_evaluation import RowTable
from fedlightning.scores.rows import Row


def row(round, metric="loss"):
    return Row(round, "G", "global", "latest", "local", "val", "a", metric, round / 7, 10)


def test_only_parts_that_may_hold_what_is_asked_for_are_read():
    rows = [row(1), row(2), row(2, "acc"), row(3), row(4)]
    table, read = RowTable(rows), []

    def part(start, end):
        read.append((start, end))
        return rows[start:end]

    table.spill([(2, (0, 2)), (2, (2, 4))], part)
    assert table.held == 1
    assert table.where(lambda *kind: kind[-1] == "loss", since=3) == [row(3), row(4)] and read == [(2, 4)]
    assert table.where(lambda *kind: kind[-1] == "loss", since=2) == [row(2), row(3), row(4)]
    read.clear()
    assert table.where(lambda *kind: kind[-1] == "acc") == [row(2, "acc")] and read == [(2, 4)]
    assert list(table) == rows and table[1:4] == rows[1:4]
