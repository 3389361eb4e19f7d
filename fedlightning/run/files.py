"""Writing files so that a killed process or a lost disk cache leaves the old one or the new one, never half of it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml


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


def read_mapping(path: Path) -> dict[str, Any]:
    """Return what a JSON or YAML file of a run holds.

    Raises:
        ValueError: If it is damaged; the sentence says where.
    """
    try:
        text = path.read_text()
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged ({reason}). Put it back from a copy, or make the run again.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (it holds no entries). Put it back from a copy, or make the run again.")
    return found


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
