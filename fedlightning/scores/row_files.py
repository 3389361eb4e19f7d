"""Rows as a CSV file: written, read as a whole, and in parts."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path

from fedlightning.compat import sheets
from fedlightning.scores.rows import CELLS, COLUMNS, Row

LARGEST = 2**62
"""Above every round and every number of samples."""


class DamagedMetricsError(ValueError):
    """A `metrics.csv` that is not the one that was written."""


def write_rows(path: Path, rows: Iterable[Row], append: bool = True) -> None:
    """Append ``rows`` to the CSV at ``path`` (with a header when it is new), or replace it at once by a new one."""
    new = not append or not path.exists()
    written = path if append else path.with_name(path.name + ".tmp")
    with written.open("w" if new else "a", newline="") as file:
        writer = sheets.Writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(map(CELLS, rows))
    if written != path:
        os.replace(written, path)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV that :func:`write_rows` wrote; empty if there is none.

    A last line that was cut off when the process was killed is left out.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    try:
        lines = sheets.read_lines(io.StringIO(content[: content.rfind(b"\n") + 1].decode(), newline=""))
        header = next(lines, COLUMNS)
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise DamagedMetricsError(f"{path} has no column '{missing[0]}': it is no metrics.csv of a run.")
        places = [header.index(name) for name in COLUMNS]
        return [_row(path, number, line, places) for number, line in enumerate(lines, start=2) if line]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DamagedMetricsError(f"{path} is no text with comma-separated values ({error}).") from None


def _row(path: Path, number: int, line: list[str], places: list[int]) -> Row:
    try:
        number_of_round, *words, value, size = (line[place] for place in places)
        row = Row(int(number_of_round), *words, float(value), int(size))  # type: ignore[arg-type, call-arg]
    except (ValueError, IndexError):
        raise DamagedMetricsError(
            f"{path} is damaged: its row {number} is no score ({','.join(line)[:80]!r})."
        ) from None
    if not (0 <= row.round < LARGEST and 0 <= row.num_samples < LARGEST):
        raise DamagedMetricsError(f"{path} is damaged: its row {number} has an impossible round or number of samples.")
    return row


def read_part(path: Path, start: int, end: int) -> list[Row]:
    """Read some of the rows that were appended to a file in the order of :data:`COLUMNS`."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        text = io.StringIO(file.read(end - start).decode(), newline="")
    return [Row(int(line[0]), *line[1:-2], float(line[-2]), int(line[-1])) for line in sheets.read_lines(text)]  # type: ignore[call-arg, arg-type]
