"""Keys that are made to be slow: a dict or set of many values with one hash takes quadratic time."""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Hashable, Iterable
from pathlib import Path

MOST = 64
"""Keys of one container that may have one hash. Texts have secret hashes; numbers, and tuples of them, can be chosen to share
one. Honest ones hardly ever do (-1 and -2)."""
MOST_LARGE = 10_000
"""Integers beyond 32 bits in an exported checkpoint."""


class Collisions:
    """Counts the hashes of the keys of one container.

    Example:
        >>> collisions = Collisions()
        >>> for number in range(100):
        ...     collisions.add(number * (2**61 - 1))
        Traceback (most recent call last):
            ...
        ValueError: keys are made to be slow: too many of them have one hash
    """

    def __init__(self) -> None:
        self._same: dict[int, int] = {}

    def add(self, key: Hashable) -> None:
        """Count a key, before it is put into the container.

        Raises:
            ValueError: If too many have its hash.
        """
        mark = hash(key)
        self._same[mark] = self._same.get(mark, 0) + 1
        if self._same[mark] > MOST:
            raise ValueError("keys are made to be slow: too many of them have one hash")


def checked_keys(keys: Iterable[Hashable]) -> None:
    """Refuse keys of which too many have one hash.

    Raises:
        ValueError: If there are such.
    """
    collisions = Collisions()
    for key in keys:
        if type(key) is not str:
            collisions.add(key)


def many_large_integers(path: Path) -> bool:
    """Return whether an archive of `torch.save` holds many integers that could share a hash: torch would make the dict.

    Args:
        path: The file. Of one that is damaged or packed the answer is no: its reader refuses it.
    """
    found = 0
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith("data.pkl") and entry.compress_type == zipfile.ZIP_STORED:
                    codes = pickletools.genops(archive.read(entry))
                    found += sum(code.name in ("LONG", "LONG1", "LONG4") for code, _, _ in codes)
    except (OSError, ValueError, LookupError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile):
        return False
    return found > MOST_LARGE
