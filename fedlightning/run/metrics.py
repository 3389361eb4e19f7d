"""`metrics.csv` of a run: rows are only ever appended, and a saved state knows what stood in it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedlightning.compat import sheets
from fedlightning.scores.row_files import DamagedMetricsError, read_rows
from fedlightning.scores.rows import CELLS, COLUMNS, Row
from fedlightning.storage.append_only import Growing, Mark, is_the_one
from fedlightning.storage.files import sync, writing

METRICS_MARK = "metrics_csv"
"""Entry of `summary.json`: length and checksum of the `metrics.csv` beside which it was written."""


class MetricsFile:
    """The scores of a run on disk.

    Args:
        path: `metrics.csv`; made with the first rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._so_far = Growing(path)

    def append(self, rows: Iterable[Row]) -> tuple[int, int]:
        """Append rows, under a header where the file is new. Return their first byte, and the one after their last."""
        with self.path.open("ab") as file:
            if file.tell() == 0:
                file.write(_as_csv([COLUMNS]))
            start = file.tell()
            file.write(_as_csv(map(CELLS, rows)))
            return start, file.tell()

    def mark(self) -> Mark:
        """Bring the file to the disk; return its length and checksum, for a saved state."""
        if self.path.exists():
            with writing(self.path), self.path.open("rb") as file:
                sync(file.fileno())
        return self._so_far.mark()

    def check(self, mark: dict[str, Any]) -> None:
        """Compare what a saved state knows with what is there."""
        what = self.fault(mark)
        if what is not None:
            raise DamagedMetricsError(
                f"{self.path} {what}: the saved state knows {mark['bytes']} bytes of scores that are not there any more. "
                "Put the file back from a copy, or start a new run."
            )

    def fault(self, mark: dict[str, Any]) -> str | None:
        """Return what has become of the file since `mark`; `None` if it begins with what it was."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size >= mark["bytes"] and (not mark["bytes"] or is_the_one(self.path, mark)):
            return None
        return "is missing" if not self.path.exists() else "was cut off" if size < mark["bytes"] else "was changed"

    def cut(self, mark: dict[str, Any]) -> None:
        """Cut off what was appended after `mark`; a resumed run writes it again."""
        if self.path.exists():
            with writing(self.path):
                os.truncate(self.path, mark["bytes"])
        self._so_far = Growing(self.path)

    def rows(self) -> list[Row]:
        """Read all rows; a last line that a killed process has cut off is left out."""
        return read_rows(self.path)

    def place(self) -> tuple[int, int] | None:
        """Return the bytes of all rows: the first, and the one after the last; `None` if they have other columns."""
        header = _as_csv([COLUMNS])
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            return (len(header), self.path.stat().st_size) if file.read(len(header)) == header else None


def _as_csv(lines: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    sheets.Writer(text).writerows(lines)
    return text.getvalue().encode()
