"""Random generators that samplers and datasets keep for themselves, and that would go on from visit to visit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedlightning.seeding import address

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
NOT_LOOKED_INTO = (Tensor, np.ndarray, nn.Module, ModuleType, type, str, bytes)
MOST_ENTRIES = 64
"""Longer lists are data, which are not looked through."""
DEEPEST = 5


def own_generators(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the random generators that an object keeps in its attributes, each with its place.

    Example:
        >>> from torch.utils.data import RandomSampler
        >>> [place for place, _ in own_generators(RandomSampler(range(3), generator=torch.Generator()))]
        ['RandomSampler.generator']
    """
    yield from _found(value, type(value).__name__, set(), 0)


def _found(value: Any, place: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or depth > DEEPEST or isinstance(value, NOT_LOOKED_INTO):
        return
    seen.add(id(value))
    if isinstance(value, KINDS):
        yield place, value
    elif isinstance(value, list | tuple | Mapping):
        if len(value) <= MOST_ENTRIES:
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, entry in pairs:
                yield from _found(entry, f"{place}[{key!r}]", seen, depth + 1)
    elif isinstance(getattr(value, "__dict__", None), dict):
        for name, entry in vars(value).items():
            yield from _found(entry, f"{place}.{name}", seen, depth + 1)


@contextmanager
def kept(*values: Any) -> Iterator[None]:
    """Within the block, generators of these objects may be drawn from; afterwards they stand where they stood.

    Example:
        >>> import random
        >>> class Noisy:
        ...     rng = None
        >>> data = Noisy()
        >>> data.rng = random.Random(0)
        >>> with kept(data):
        ...     first = data.rng.random()
        >>> data.rng.random() == first
        True
    """
    found = [generator for value in values for _, generator in own_generators(value)]
    states = [state_of(generator) for generator in found]
    try:
        yield
    finally:
        for generator, state in zip(found, states, strict=True):
            set_state(generator, state)


def state_of(generator: Any) -> Any:
    """Return where a generator stands."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Let a generator stand where it stood."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class _Seeding:
    """Seeds, in a worker process, the generators that its copies of a dataset and a collate function keep, each by torch's
    seed of the worker, then does what the loader's own function does.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.owners, self.then = (loader.dataset, loader.collate_fn), loader.worker_init_fn

    def __call__(self, worker: int) -> None:
        for owner in self.owners:
            for place, generator in own_generators(owner):
                seed = address(torch.initial_seed(), place)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(seed)
                elif isinstance(generator, np.random.Generator):
                    generator.bit_generator.state = type(generator.bit_generator)(seed).state
                else:
                    generator.seed(seed % 2**32)
        if self.then is not None:
            self.then(worker)


def seed_in_workers(loader: Any) -> None:
    """Let each worker process of a loader draw from its dataset's own generators what no other one draws.

    Workers get copies, so all of them, in every epoch and visit, would draw the same. Torch's seed of a worker has the
    address of visit and epoch.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(3))
        >>> data.noise = random.Random(0)
        >>> loader = DataLoader(data, num_workers=2)
        >>> seed_in_workers(loader)
        >>> loader.worker_init_fn is None
        False
    """
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, _Seeding):
        if any(True for owner in (loader.dataset, loader.collate_fn) for _ in own_generators(owner)):
            loader.worker_init_fn = _Seeding(loader)


@contextmanager
def read_for_scores(loader: Any) -> Iterator[None]:
    """Within the block, a loader is read for scores: it draws what it would have drawn whoever was scored before.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(3))
        >>> data.noise = random.Random(0)
        >>> with read_for_scores(DataLoader(data)):
        ...     first = data.noise.random()
        >>> data.noise.random() == first
        True
    """
    seed_in_workers(loader)
    with kept(*(getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler", "collate_fn"))):
        yield


def readdress(loader: Any, *parts: object) -> None:
    """Seed the torch generators of a loader and of its samplers by an address, so that a visit does not go on with another's.

    Example:
        >>> from torch.utils.data import DataLoader, WeightedRandomSampler
        >>> sampler = WeightedRandomSampler([1.0, 2.0, 3.0], 9, generator=torch.Generator())
        >>> loader, orders = DataLoader(range(3), sampler=sampler), []
        >>> for _ in range(2):
        ...     readdress(loader, 0, "client", 1)
        ...     orders.append(list(sampler))
        >>> orders[0] == orders[1]
        True
    """
    if not isinstance(loader, DataLoader):
        return
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            generator.manual_seed(address(*parts, len(found)))
            found.append(generator)


def going_on(loader: DataLoader[Any]) -> str | None:
    """Return the place of a generator that goes on from visit to visit, whatever address a visit has; else `None`.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.zeros(3))
        >>> going_on(DataLoader(data, shuffle=True)) is None
        True
        >>> data.noise = random.Random(0)
        >>> going_on(DataLoader(data, shuffle=True))
        'TensorDataset.noise'
    """
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    addressed = [getattr(sampler, "generator", None) for sampler in (loader, *samplers)]
    for owner in (loader.dataset, loader.batch_sampler, loader.sampler, loader.collate_fn):
        for place, generator in own_generators(owner):
            if all(generator is not other for other in addressed):
                return place
    return None
