"""Batches of many clients at once, each from its own loader in its own addressed order.

Where a client's loader only picks rows of tensors in memory, the rows of all clients are gathered by one
`index_select`, without asking the loaders. Other loaders are iterated one by one and their batches stacked. Clients
whose next batches have the same shape for several turns are asked once for all of these turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, default_collate

from fedlightning.datamodules.resident_batches import WHOLE_ORDER, whole_order
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.datamodules.views import ArrayDataset, collate_rows, rows_of, tensors_of
from fedlightning.fast.fast_fit import set_epoch
from fedlightning.seeding import address, seed_all
from fedlightning.stacked.stack import NotATreeError, join_tree, skeleton_key, split_tree

Shape = tuple[Any, ...]
"""A key: clients with equal keys can step together. Its first entry is the number of samples."""


Seed = Callable[[int], tuple[object, ...]]
"""Function that returns the address of the randomness of an epoch, given its number."""


class Source(Protocol):
    """One client's batches in a phase, and the generator that its steps draw from."""

    generator: torch.Generator

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch."""

    def peek(self) -> Shape:
        """Return the shape of the next batch, which must exist."""

    def ahead(self) -> int:
        """Return the number of batches of that shape that come next in the epoch, as far as is known."""

    def advance(self, batches: int) -> None:
        """Note that so many batches have been used."""


class ResidentSource:
    """Batches that are rows of tensors in memory.

    Args:
        tensors: The data, `(n, ...)` each.
        indices: The client's rows of them. `None`: all.
        sampler: Gives the order of the rows: an addressed one, or one that draws from the global generator. `None`:
            their own order.
        batch_size: Samples in a batch.
        count: Batches in an epoch.
        seed: Seed of the generator.
        draws_seed: Whether iterating the loader would draw a number from the generator.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        indices: Tensor | None,
        sampler: Any,
        batch_size: int,
        count: int,
        seed: Seed,
        draws_seed: bool,
    ) -> None:
        self.tensors, self.held, self.sampler = tensors, indices, sampler
        self._seed, self._draws_seed = seed, draws_seed
        self.batch_size, self.count = batch_size, count
        self.samples = (len(tensors[0]) if indices is None else len(indices)) if sampler is None else len(sampler)
        self._whole = min(count, self.samples // batch_size)
        self._tail = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
        self._order = torch.empty(0, dtype=torch.int64)
        self._next = 0
        self._epoch = 0
        self._generator: torch.Generator | None = None

    def start_epoch(self, epoch: int) -> None:
        self._next, self._epoch, self._generator = 0, epoch, None
        if self.sampler is None:
            order = torch.arange(self.samples)
        elif isinstance(self.sampler, AddressedSampler):
            self.sampler.go_to(epoch)
            order = self.sampler.permutation()
        else:
            order = self._drawn()
        self._order = order if self.held is None else self.held[order]

    def _drawn(self) -> Tensor:
        """Return the order of a sampler that draws from the global generator, which is the client's meanwhile."""
        generator, before = self.generator, torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            return whole_order(self.sampler)
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)

    @property
    def generator(self) -> torch.Generator:
        """Generator of the steps of this epoch, made on first access: most steps draw nothing."""
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(address(*self._seed(self._epoch)))
            if self._draws_seed and self._epoch > 0:  # Lightning makes the first epoch's iterator before it is seeded
                torch.empty((), dtype=torch.int64).random_(generator=self._generator)  # the base seed of workers
        return self._generator

    def peek(self) -> Shape:
        whole = self._next < self._whole
        return (self.batch_size if whole else self.samples - self._next * self.batch_size, self._tail)

    def ahead(self) -> int:
        return max(self._whole - self._next, 1)

    def rows(self, batches: int) -> Tensor:
        """Return the rows of the next `batches`, one after another."""
        start = self._next * self.batch_size
        return self._order[start : start + batches * self.batch_size]

    def advance(self, batches: int) -> None:
        self._next += batches


class LoaderSource:
    """Batches of any loader, iterated with global generators of the client's own.

    Args:
        loader: The loader.
        convert: Brings a batch to the right precision and through the module's transfer hooks.
        seed: Seed of the global generators.
    """

    def __init__(self, loader: Any, convert: Callable[[Any], Any], seed: Seed) -> None:
        self.loader, self._convert, self._seed = loader, convert, seed
        self.generator = torch.Generator()
        self._others: tuple[Any, Any] = (random.getstate(), np.random.get_state())
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None

    def start_epoch(self, epoch: int) -> None:
        set_epoch(self.loader, epoch)
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
        """Within the block, the global generators are the client's."""
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
        try:
            other = skeleton_key(skeleton)
        except NotATreeError:
            other = id(self)  # what it is cannot be told: a step of its own
        return (size, tuple((tensor.shape, tensor.dtype) for tensor in tensors), other)

    def ahead(self) -> int:
        return 1

    def batch(self) -> Any:
        """Return the next batch."""
        return self._fetch()

    def advance(self, batches: int) -> None:
        self._batch = None


def resident(loader: Any, count: int, seed: Seed) -> ResidentSource | None:
    """Return a loader as rows in memory, or `None` if it is more than that.

    Exact types only: a subclass may do anything.
    """
    if type(loader) is not DataLoader or loader.num_workers or type(loader.batch_sampler) is not BatchSampler:
        return None
    if type(loader.sampler) not in (AddressedSampler, *WHOLE_ORDER):
        return None
    if type(loader.sampler) is not AddressedSampler and getattr(loader.sampler, "generator", None) is not None:
        return None  # it goes on from visit to visit
    if loader.collate_fn not in (collate_rows, default_collate) or loader.batch_size is None:
        return None
    in_order = type(loader.sampler) is SequentialSampler and len(loader.sampler) == len(loader.dataset)  # type: ignore[arg-type]
    sampler = None if in_order else loader.sampler
    if isinstance(sampler, AddressedSampler) and sampler.world_size != 1:
        return None
    rows = rows_of(loader.dataset)
    if rows is None or (type(rows[0]) is ArrayDataset and rows[0].transform is not None):
        return None
    source, indices = rows
    return ResidentSource(
        tensors_of(source), indices, sampler, loader.batch_size, count, seed, loader.generator is None
    )


BLOCK = 2**20
"""Bytes of gathered rows below which a call for each client in each turn costs more than the copy."""


class Gatherer:
    """Stacks the next batches of clients, and reuses its memory from step to step.

    Args:
        device: Device of the stack.
        convert: Brings a stacked batch to the right precision.
    """

    def __init__(self, device: torch.device, convert: Any) -> None:
        self.device, self._convert = device, convert
        self._room: dict[tuple[Any, ...], Tensor] = {}

    def batches(self, sources: Sequence[Any], turns: int) -> Generator[Any, None, None]:
        """Yield the next batches of all sources, stacked, one turn after another.

        A batch is overwritten by the next one. When the iterator is closed, the sources advance by the turns that were
        taken.
        """
        resident = all(type(source) is ResidentSource for source in sources)
        taken = 0
        try:
            for stacked in self._resident(sources, turns) if resident else self._loaded(sources):
                taken += 1
                yield stacked
        finally:
            for source in sources:
                source.advance(taken)

    @staticmethod
    def one(batch: Any, place: int) -> Any:
        """Return a stacked batch of the client at `place` alone."""
        tensors, skeleton = split_tree(batch)
        return join_tree(skeleton, [tensor[place : place + 1] for tensor in tensors])

    def _loaded(self, sources: Sequence[LoaderSource]) -> Iterator[Any]:
        """Stack the batches of one turn; loaders do not tell what comes after it."""
        parts = [split_tree(source.batch()) for source in sources]
        stacked = [torch.stack(group).to(self.device) for group in zip(*(part[0] for part in parts), strict=True)]
        yield join_tree(parts[0][1], stacked)

    def _resident(self, sources: Sequence[ResidentSource], turns: int) -> Iterator[Any]:
        count, size = len(sources), sources[0].peek()[0]
        rows = [source.rows(turns) for source in sources]
        likes = sources[0].tensors
        if all(a is b for source in sources for a, b in zip(source.tensors, likes, strict=True)):
            each_turn = torch.stack(rows).view(count, turns, size).transpose(0, 1).reshape(turns, count * size)
            for joined in each_turn:
                gathered = []
                for number, like in enumerate(likes):
                    room = self._space(number, like, count * size)
                    gathered.append(torch.index_select(like, 0, joined, out=room).view(count, size, *like.shape[1:]))
                yield self._ready(gathered)
            return
        of_turn = count * size * sum(like[0].numel() * like.element_size() for like in likes)
        block = max(1, min(turns, BLOCK // max(of_turn, 1)))
        for start in range(0, turns, block):
            length = min(block, turns - start) * size
            gathered = []
            for number, like in enumerate(likes):
                room = self._space(number, like, count * length).view(count, length, *like.shape[1:])
                for out, source, row_numbers in zip(room, sources, rows, strict=True):
                    torch.index_select(
                        source.tensors[number], 0, row_numbers[start * size : start * size + length], out=out
                    )
                gathered.append(room)
            for turn in range(0, length, size):
                yield self._ready([room[:, turn : turn + size] for room in gathered])

    def _ready(self, gathered: Sequence[Tensor]) -> Any:
        return self._convert([tensor.to(self.device) for tensor in gathered])

    def _space(self, number: int, like: Tensor, length: int) -> Tensor:
        key = (number, like.shape[1:], like.dtype)
        room = self._room.get(key)
        if room is None or len(room) < length:
            room = self._room[key] = like.new_empty((length, *like.shape[1:]))
        return room[:length]
