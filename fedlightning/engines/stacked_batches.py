"""Batches of many clients at once, each from its own loader in its own addressed order.

Where a client's loader does nothing but pick rows of tensors that lie in memory, the rows of all clients are gathered by
one ``index_select``, without asking the loaders. Other loaders are iterated one by one and their batches stacked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, default_collate

from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.datamodules.views import ArrayDataset, IndexView, collate_rows
from fedlightning.engines.stacking import join_tree, split_tree
from fedlightning.seeding import address, seed_all

Shape = tuple[Any, ...]
"""What batches must have in common to be stepped together. Its first entry is the number of samples."""


Seed = Callable[[int], tuple[object, ...]]
"""The address of the randomness of an epoch, given its number."""


class Source(Protocol):
    """One client's batches in a phase, and the generator that its steps draw from."""

    generator: torch.Generator

    def start_epoch(self, epoch: int) -> None:
        """Begin the epoch of that number."""

    def peek(self) -> Shape:
        """The shape of the next batch, which is there."""


class ResidentSource:
    """Rows of tensors in memory.

    Args:
        tensors: the data, ``(n, ...)`` each; held: the client's rows of them, or ``None`` for all.
        sampler: gives the order; batch_size, count: samples in a batch, batches in an epoch.
        seed: of the generator; draws_seed: whether iterating the loader would draw a number from it.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        held: Tensor | None,
        sampler: AddressedSampler | None,
        batch_size: int,
        count: int,
        seed: Seed,
        draws_seed: bool,
    ) -> None:
        self.tensors, self.held, self.sampler = tensors, held, sampler
        self._seed, self._draws_seed = seed, draws_seed
        self.generator = torch.Generator()
        self.batch_size, self.count = batch_size, count
        self.samples = len(tensors[0]) if held is None else len(held)
        self._order = torch.empty(0, dtype=torch.int64)
        self._next = 0
        self._sizes: list[Shape] = []
        tail = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
        for batch in range(count):
            self._sizes.append((min(batch_size, self.samples - batch * batch_size), tail))

    def start_epoch(self, epoch: int) -> None:
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)
            order = torch.tensor(self.sampler.order(), dtype=torch.int64)
        else:
            order = torch.arange(self.samples)
        self._order = order if self.held is None else self.held[order]
        self._next = 0
        self.generator.manual_seed(address(*self._seed(epoch)))
        if self._draws_seed and epoch > 0:  # Lightning makes the first epoch's iterator before it is seeded
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # the base seed of workers

    def peek(self) -> Shape:
        return self._sizes[self._next]

    def indices(self) -> Tensor:
        """The rows of the next batch; go on to the one after it."""
        start = self._next * self.batch_size
        self._next += 1
        return self._order[start : start + self.batch_size]


class LoaderSource:
    """A loader that is iterated, with global generators of the client's own.

    Args:
        loader: any loader; convert: brings a batch to the right precision and through the module's transfer hooks.
        seed: of the global generators.
    """

    def __init__(self, loader: Any, convert: Callable[[Any], Any], seed: Seed) -> None:
        self.loader, self._convert, self._seed = loader, convert, seed
        self.generator = torch.Generator()
        self._others: tuple[Any, Any] = (random.getstate(), np.random.get_state())
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None

    def start_epoch(self, epoch: int) -> None:
        for sampler in (self.loader.sampler, getattr(self.loader.batch_sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        with self._own_generators():
            if epoch == 0:  # Lightning makes the first epoch's iterator before it is seeded
                self._batches = iter(self.loader)
            seed_all(*self._seed(epoch))
            if epoch > 0:
                self._batches = iter(self.loader)

    def _fetch(self) -> Any:
        if self._batch is None:
            with self._own_generators():
                self._batch = self._convert(next(self._batches))
        return self._batch

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """A block in which the global generators are the client's."""
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.setstate(self._others[0])
        np.random.set_state(self._others[1])
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self._others = random.getstate(), np.random.get_state()
            self.generator.set_state(torch.get_rng_state())
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def peek(self) -> Shape:
        tensors, skeleton = split_tree(self._fetch())
        size = len(tensors[0]) if tensors and tensors[0].dim() else 1
        return (size, tuple((tensor.shape, tensor.dtype) for tensor in tensors), repr(skeleton))

    def take(self) -> Any:
        """The next batch."""
        batch, self._batch = self._fetch(), None
        return batch


def resident(loader: Any, count: int, seed: Seed) -> ResidentSource | None:
    """The loader as rows in memory, where that is all it is; else ``None``.

    Exact types only: a subclass may do anything.
    """
    if type(loader) is not DataLoader or loader.num_workers or type(loader.batch_sampler) is not BatchSampler:
        return None
    if type(loader.sampler) not in (AddressedSampler, SequentialSampler):
        return None
    if loader.collate_fn not in (collate_rows, default_collate) or loader.batch_size is None:
        return None
    sampler = loader.sampler if isinstance(loader.sampler, AddressedSampler) else None
    if sampler is not None and sampler.world_size != 1:
        return None
    dataset, held = loader.dataset, None
    if type(dataset) is IndexView:
        dataset, held = dataset.dataset, dataset.indices
    if type(dataset) is TensorDataset:
        tensors: Sequence[Tensor] = dataset.tensors
    elif type(dataset) is ArrayDataset and dataset.transform is None:
        tensors = (dataset.x, dataset.y)
    else:
        return None
    return ResidentSource(tensors, held, sampler, loader.batch_size, count, seed, loader.generator is None)


class Gatherer:
    """Stacks the next batches of clients, re-using its memory from step to step."""

    def __init__(self, device: torch.device, convert: Any) -> None:
        self.device, self._convert = device, convert
        self._room: dict[tuple[Any, ...], Tensor] = {}

    def gather(self, sources: Sequence[Any]) -> Any:
        """The next batch of each source, stacked ``(len(sources), batch, ...)``. Overwritten by the next call."""
        if all(type(source) is ResidentSource for source in sources):
            return self._convert([tensor.to(self.device) for tensor in self._rows(sources)])
        batches = [source.take() for source in sources]
        parts = [split_tree(batch) for batch in batches]
        stacked = [torch.stack(group).to(self.device) for group in zip(*(part[0] for part in parts), strict=True)]
        return join_tree(parts[0][1], stacked)

    @staticmethod
    def one(batch: Any, place: int) -> Any:
        """A stacked batch of the client at ``place`` alone."""
        tensors, skeleton = split_tree(batch)
        return join_tree(skeleton, [tensor[place : place + 1] for tensor in tensors])

    def _rows(self, sources: Sequence[ResidentSource]) -> list[Tensor]:
        indices = [source.indices() for source in sources]
        count, size = len(indices), len(indices[0])
        shared = all(a is b for source in sources for a, b in zip(source.tensors, sources[0].tensors, strict=True))
        joined = torch.cat(indices) if shared else None
        gathered = []
        for number, like in enumerate(sources[0].tensors):
            room = self._space(number, like, count * size)
            if joined is not None:
                torch.index_select(like, 0, joined, out=room)
            else:
                for place, (source, index) in enumerate(zip(sources, indices, strict=True)):
                    out = room[place * size : (place + 1) * size]
                    torch.index_select(source.tensors[number], 0, index, out=out)
            gathered.append(room.view(count, size, *like.shape[1:]))
        return gathered

    def _space(self, number: int, like: Tensor, length: int) -> Tensor:
        key = (number, like.shape[1:], like.dtype)
        room = self._room.get(key)
        if room is None or len(room) < length:
            room = self._room[key] = like.new_empty((length, *like.shape[1:]))
        return room[:length]
