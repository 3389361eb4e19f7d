"""CSV files that a spreadsheet opens: a name that begins with `=` is a formula there, which may run or send something.

Names of clients and metrics come from data and from sites. So cells are written with an apostrophe in front where a
spreadsheet would compute them, and read without it: what a program reads is what was written. All tables are written here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Beginnings of a formula."""


@lru_cache(maxsize=2**14)
def is_formula(text: str) -> bool:
    """Return whether a spreadsheet would compute a cell. A number is none.

    Example:
        >>> is_formula("=1+1"), is_formula("-0.5"), is_formula("-x"), is_formula("a=1")
        (True, False, True, False)
    """
    if not text.lstrip().startswith(SIGNS) and not text.startswith(SIGNS):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def guarded(cell: Any) -> Any:
    """Return a cell as it is written.

    Example:
        >>> guarded("=1+1"), guarded("a"), guarded(-1), guarded("'=1")
        ("'=1+1", 'a', -1, "''=1")
    """
    return f"'{cell}" if isinstance(cell, str) and is_formula(cell.lstrip("'")) else cell


def plain(cell: Any) -> Any:
    """Return a cell as it was before it was written.

    Example:
        >>> [plain(guarded(cell)) for cell in ("=1+1", "a", "'=1", "'")]
        ['=1+1', 'a', "'=1", "'"]
    """
    return cell[1:] if isinstance(cell, str) and cell.startswith("'") and is_formula(cell.lstrip("'")) else cell


class Writer:
    """Writes rows as `csv.writer` does, with guarded cells.

    Args:
        file: The file.
        options: Those of `csv.writer`.
    """

    def __init__(self, file: Any, **options: Any) -> None:
        self._writer = csv.writer(file, **options)

    def writerow(self, row: Iterable[Any]) -> None:
        """Write a row."""
        self._writer.writerow(map(guarded, row))

    def writerows(self, rows: Iterable[Iterable[Any]]) -> None:
        """Write rows."""
        self._writer.writerows(map(guarded, row) for row in rows)


def write_table(file: Any, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], **options: Any) -> None:
    """Write a header and rows by column; what a row lacks is an empty cell."""
    writer = Writer(file, **options)
    writer.writerow(columns)
    writer.writerows([row.get(name, "") for name in columns] for row in rows)


def read_lines(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows of a table, the header first."""
    for row in csv.reader(lines):
        yield [plain(cell) if cell[:1] == "'" else cell for cell in row]


def read_table(lines: Iterable[str], **options: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table by column, as `csv.DictReader` does."""
    for row in csv.DictReader(lines, **options):
        yield {plain(name): plain(cell) for name, cell in row.items()}
