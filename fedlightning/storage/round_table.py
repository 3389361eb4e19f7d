"""Tables of a run that grow by some rows a round, and of which a resumed run takes back what it writes again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedlightning.compat import sheets
from fedlightning.storage.files import replacing, writing

TAIL = 4096
"""Bytes at the end of a file in which its last line is looked for."""


def add_round(path: Path, columns: Sequence[str], number: int, rows: Iterable[Sequence[Any]]) -> None:
    """Add a round's rows to a CSV table. Rows of this round and later ones, left by a run that was resumed, go.

    Where there are none the rows are appended, so that a round costs what it adds. A last line that was cut off goes too.

    Args:
        path: The file; without one it begins.
        columns: Its header. The first column is the round.
        number: The round, from 1.
        rows: The round's rows, the round first.

    Raises:
        UnwritableError: If it cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rounds.csv"
        >>> for number in (1, 2, 3, 2):  # resumed after round 1
        ...     add_round(path, ["round", "client"], number, [(number, "a")])
        >>> path.read_text().split()
        ['round,client', '1,a', '2,a']
    """
    with writing(path):
        if _ends_before(path, number):
            with path.open("a", newline="") as file:
                sheets.Writer(file).writerows(rows)
            return
        kept = _rows_before(path, len(columns), number)
        with replacing(path) as beside, beside.open("w", newline="") as file:
            sheets.Writer(file).writerows([columns, *kept, *rows])


def _ends_before(path: Path, number: int) -> bool:
    """Return True if the file is there, its last line is whole, and of a round before this one."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        last = file.read().decode(errors="replace").splitlines(keepends=True)[-1:]
    start = last[0].partition(",")[0] if last and last[0].endswith("\n") else ""
    return start.isdecimal() and int(start) < number


def _rows_before(path: Path, width: int, number: int) -> list[list[str]]:
    """Return the rows of earlier rounds; not one that was cut off."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(sheets.read_lines(file))[1:]
    return [row for row in rows if len(row) == width and row[-1] and int(row[0]) < number]
