"""Addressed randomness: every random draw has an address, not a place in a stream.

A generator is made for (seed, round, client, phase, purpose ...) by hashing that address, so a result does not depend
on which engine ran a client, on how many workers there were or on who was visited first.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def address(*parts: object) -> int:
    """A 63-bit seed that is a function of ``parts`` alone, the same in every process and on every platform.

    Args:
        parts: strings, numbers or ``None``; told apart by type and value (``1`` and ``"1"`` differ).
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU :class:`torch.Generator` seeded with :func:`address` of ``parts``."""
    return torch.Generator().manual_seed(address(*parts))


def seed_all(*parts: object) -> None:
    """Seed Python's, numpy's and torch's global generators (every device) with :func:`address` of ``parts``."""
    seed = address(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed would note a stack trace for each kind of device that may come yet: a millisecond
        torch.default_generator.manual_seed(seed)


@contextmanager
def isolated(*parts: object) -> Iterator[None]:
    """Run a block under :func:`seed_all` of ``parts`` and leave every global generator as it was before."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(enabled=True):
        seed_all(*parts)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
