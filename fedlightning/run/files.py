"""Writing files so that a killed process leaves the old one or the new one, never half of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def is_writer() -> bool:
    """True in the one process of a run that writes files (rank 0 under DDP)."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")  # torchrun sets RANK and GROUP_RANK, Lightning the others
    return all(int(os.environ.get(rank, 0)) == 0 for rank in ranks)


def write_atomically(path: Path, value: Any) -> None:
    """``torch.save`` so that the file is either complete or not there."""
    temporary = path.with_name(path.name + ".tmp")
    torch.save(value, temporary)
    os.replace(temporary, path)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file so that it is either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
