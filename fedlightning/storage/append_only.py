"""Files that others append to: how far they were when a state was saved, and whether they are still what they were."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from fedlightning.errors import warn
from fedlightning.storage.files import sha256

Mark = dict[str, Any]
"""What is known of a store when a state is saved, in plain values."""


class Growing:
    """A file that grows, and what is known of it without reading it again from its beginning.

    Args:
        path: The file.
        has_header: It is a table, which is written anew when its first line changes.
    """

    def __init__(self, path: Path, has_header: bool = False) -> None:
        self.path, self.has_header = path, has_header
        self._begin(b"")

    def _begin(self, header: bytes) -> None:
        self._header, self._size, self._lines, self._sum = header, 0, 0, hashlib.sha256()

    def mark(self) -> Mark:
        """Return size and checksum of the file; of a table also its first line and the number of lines."""
        if not self.path.exists():
            self._begin(b"")
        else:
            with self.path.open("rb") as file:
                header = file.readline() if self.has_header else b""
                if header != self._header or self.path.stat().st_size < self._size:
                    self._begin(header)
                file.seek(self._size)
                while block := file.read(1 << 20):
                    self._lines += block.count(b"\n")
                    self._size += len(block)
                    self._sum.update(block)
        table = {"lines": self._lines, "header": self._header.decode(errors="replace")}
        return {"bytes": self._size, "sha256": self._sum.hexdigest()} | (table if self.has_header else {})


def is_the_one(path: Path, mark: Mark) -> bool:
    """Return whether a file begins with what it was at `mark`."""
    return sha256(path, mark["bytes"]) == mark["sha256"]


def set_aside(path: Path, name: str) -> None:
    """Put a damaged log aside, and say so: the logger gets the run's scores again."""
    os.replace(path, path.with_name(name))
    warn(f"{path} is not what was logged: it is now called {name}, and the run's scores are logged again.")
