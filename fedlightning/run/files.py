"""Writing files so that a killed process or a lost disk cache leaves the old one or the new one, never half of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch


def is_writer() -> bool:
    """Return True in the one process of a run that writes files (rank 0 under DDP)."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")  # torchrun sets RANK and GROUP_RANK, Lightning the others
    return all(int(os.environ.get(rank, 0)) == 0 for rank in ranks)


def write_atomically(path: Path, value: Any) -> None:
    """Write a value with `torch.save` so that the file is complete on the disk, or not there."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(value, file)
        sync(file.fileno())
    os.replace(temporary, path)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file so that it is the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def readable_json(value: Any, levels: int = 3, default: Callable[[Any], Any] | None = None) -> str:
    """Return JSON with the entries of the outer levels on lines of their own, and each of the inner ones on one line.

    A thousand clients are a thousand lines, and the inner ones are written by `json`'s C code, twenty times as fast.

    Args:
        value: Dictionaries, lists and plain values.
        levels: Levels that are spread over lines.
        default: As for `json.dumps`.

    Example:
        >>> from fedlightning.run.files import readable_json
        >>> print(readable_json({"seed": 1, "clients": {"a": {"val": 3, "test": 4}}}, levels=2))
        {
         "seed": 1,
         "clients": {
          "a": {"val": 3, "test": 4}
         }
        }
    """
    return _lines(value, levels, "\n", default)


def _lines(value: Any, levels: int, end: str, default: Callable[[Any], Any] | None) -> str:
    if levels == 0 or not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value, default=default)
    below = partial(_lines, levels=levels - 1, end=end + " ", default=default)
    if isinstance(value, dict):
        # a key is written as `json` writes it: None and numbers become text
        entries = [json.dumps({key: 0})[1:-2] + below(one) for key, one in value.items()]
    else:
        entries = [below(one) for one in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return first + end + " " + f",{end} ".join(entries) + end + last


def sync(file: int) -> None:
    """Wait until an open file is on the disk."""
    os.fsync(file)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sha256(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first `size` bytes, in hexadecimal."""
    found, left = hashlib.sha256(), path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            found.update(block)
            left -= len(block)
    return found.hexdigest()
