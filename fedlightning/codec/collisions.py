"""Keys that are made to be slow: a dict or set of many values with one hash takes quadratic time."""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

MOST = 64
"""Keys of one container that may have one hash. Texts have secret hashes; numbers, and tuples of them, can be chosen to share
one. Honest ones hardly ever do (-1 and -2)."""
MOST_LARGE = 10_000
"""Integers beyond 32 bits in an exported checkpoint."""
MOST_IN_TUPLE = 10_000_000
"""Values in a tuple of such a file, counted as often as they occur in it."""


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
        """Count a key, before it is put into the container."""
        mark = hash(key)
        self._same[mark] = self._same.get(mark, 0) + 1
        if self._same[mark] > MOST:
            raise ValueError("keys are made to be slow: too many of them have one hash")


def checked_keys(keys: Iterable[Hashable]) -> None:
    """Refuse keys of which too many have one hash."""
    collisions = Collisions()
    for key in keys:
        if type(key) is not str:
            collisions.add(key)


def slow_keys(path: Path) -> str | None:
    """Return why torch could take for ever to read an archive of `torch.save`; `None` if it could not.

    The keys of a dict do that where many large integers share a hash, and where a tuple holds another twice, which does so
    too, and so on: its hash is computed anew each time. A pickle that breaks off is refused: torch would read what is before.
    """
    found = 0
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.compress_type == zipfile.ZIP_STORED]
            contents = [archive.read(entry) for entry in entries if entry.filename.lower().endswith("data.pkl")]
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile):
        return None
    try:
        for content in contents:
            found += sum(code.name in ("LONG", "LONG1", "LONG4") for code, _, _ in pickletools.genops(content))
            if found > MOST_LARGE:
                return "it holds more large integers than any module: they could be keys that take for ever"
            if _largest_tuple(content) > MOST_IN_TUPLE:
                return "it holds tuples within tuples that could be keys that take for ever"
    except (ValueError, LookupError, TypeError, struct.error) as error:
        return f"its pickle is damaged ({error!s:.100})"
    return None


def _largest_tuple(content: bytes) -> int:
    """Return the number of values in the largest tuple of a pickle, those in its tuples included, as often as they occur."""
    stack: list[int | None] = []  # how much each value holds; None is a mark
    memo: dict[Any, int] = {}
    largest = 0
    for code, argument, _ in pickletools.genops(content):
        place: Any = argument
        if code.name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if code.name == "MEMOIZE" else place] = stack[-1] or 1
            continue
        taken = 0
        for kind in reversed(code.stack_before):
            while kind is pickletools.stackslice and stack[-1] is not None:
                taken += stack.pop() or 1
            if kind is not pickletools.stackslice:
                taken += stack.pop() or 1
        if code.name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[place])
        elif "TUPLE" in code.name:
            stack.append(taken + 1)
            largest = max(largest, taken)
        else:
            stack.extend(None if kind is pickletools.markobject else 1 for kind in code.stack_after)
    return largest
