"""Addressed randomness: every random draw has an address instead of a position in a stream.

A generator is seeded by hashing an address such as (seed, round, client, phase, purpose). A result therefore does not
depend on the engine that ran a client, the number of workers, or the order in which clients were visited.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch


def address(*parts: object) -> int:
    """Return a 63-bit seed that depends on `parts` alone, the same in every process and on every platform.

    Args:
        *parts: Strings, numbers or `None`. They are told apart by type and value: `1` and `"1"` differ.

    Example:
        >>> from fedlightning.algorithm import address
        >>> address(42, "client 3", 0) == address(42, "client 3", 0)
        True
        >>> address(42, "client 3", 0) == address(42, "client 3", 1)
        False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """Return a CPU `torch.Generator` seeded with `address(*parts)`.

    Args:
        *parts: The address.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import generator
        >>> first, second = (torch.rand(3, generator=generator(42, "noise")) for _ in range(2))
        >>> bool((first == second).all())
        True
    """
    return torch.Generator().manual_seed(address(*parts))


def first_of_permutation(size: int, count: int, draws: torch.Generator) -> list[int]:
    """Return the first entries of `torch.randperm(size)`: the same numbers, without shuffling the others.

    `randperm` of torch on a CPU swaps entry `i` with entry `i + random() % (size - i)`, one after another, so the first few
    are known after as many draws. Afterwards the generator stands elsewhere than after a whole permutation.

    Args:
        size: Number of entries of the permutation, below 2^31.
        count: How many to return, at most `size`.
        draws: A CPU generator.

    Example:
        >>> import torch
        >>> from fedlightning.seeding import first_of_permutation, generator
        >>> first_of_permutation(100_000, 3, generator(0, "example"))
        [4789, 85573, 96539]
        >>> torch.randperm(100_000, generator=generator(0, "example"))[:3].tolist()
        [4789, 85573, 96539]
    """
    if 20 * count >= size:  # a number drawn here takes as long as some twenty of randperm
        return torch.randperm(size, generator=draws)[:count].tolist()
    # each number of 64 bits is two draws of 32 bits, the first in the upper half
    pairs = torch.empty((count + 1) // 2, dtype=torch.int64).random_(-(2**63), None, generator=draws).tolist()
    numbers = (half for pair in pairs for half in (pair >> 32 & 0xFFFFFFFF, pair & 0xFFFFFFFF))
    moved: dict[int, int] = {}  # entries that are not at their own place any more
    first = []
    for place, number in zip(range(count), numbers, strict=False):
        other = place + number % (size - place)
        first.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return first


def seed_all(*parts: object) -> None:
    """Seed the global generators of Python, numpy and torch (on every device) with `address(*parts)`.

    Args:
        *parts: The address.

    Example:
        >>> import random
        >>> from fedlightning.seeding import isolated, seed_all
        >>> with isolated():  # puts the global generators back
        ...     seed_all(42, "client 3")
        ...     first = random.random()
        ...     seed_all(42, "client 3")
        ...     print(random.random() == first)
        True
    """
    seed = address(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # torch.manual_seed stores a stack trace for each device type not yet initialised: a millisecond
        torch.default_generator.manual_seed(seed)


@cache
def _has_accelerator() -> bool:
    """Ask torch once: the question takes longer than a seeding."""
    return bool(torch.accelerator.is_available())


@contextmanager
def preserved() -> Iterator[None]:
    """Restore every global generator after a block.

    Example:
        >>> import torch
        >>> from fedlightning.seeding import preserved
        >>> with preserved():
        ...     inside = torch.rand(3)
        >>> bool((torch.rand(3) == inside).all())
        True
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(enabled=True):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def isolated(*parts: object) -> Iterator[None]:
    """Run a block under `seed_all(*parts)` and restore every global generator afterwards.

    Args:
        *parts: The address.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import isolated
        >>> before = torch.get_rng_state()
        >>> with isolated(42, "noise"):
        ...     noise = torch.rand(3)
        >>> bool((torch.get_rng_state() == before).all())
        True
    """
    with preserved():
        seed_all(*parts)
        yield
