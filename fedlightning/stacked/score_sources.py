"""Batches to score: those of many clients' loaders at once, each in its own loader's order.

Values that many clients log in stacked evaluation steps, reduced in Lightning's order and precision.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler

from fedlightning.datamodules.in_memory import is_plain, rows_of, tensors_of
from fedlightning.datamodules.indexed import on_device, resident_batches
from fedlightning.datamodules.sampling import AddressedSampler, going_on
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.fast.log_sheet import LogRule, wide_dtype
from fedlightning.seeding import isolated
from fedlightning.stacked.logs import Column
from fedlightning.stacked.score_step import Logged, NotStacked, Step
from fedlightning.stacked.stack import join_tree, split_tree


class Sums:
    """Running reductions over the epoch, each in the order of the client's own steps.

    Args:
        clients: Number of clients.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._rules: dict[str, LogRule] = {}
        self._metrics: dict[str, str] = {}
        self._columns: dict[str, Column] = {}
        self._losses = Column(clients, "mean")

    def add(self, rows: Sequence[int], step: Step) -> None:
        """Add a step of the clients at `rows`."""
        chosen = np.asarray(rows)
        if step.loss is not None:
            self._losses.add(chosen, step.outputs[step.loss].double().cpu().numpy(), step.size or 1)
        for event in step.events:
            if isinstance(event, Logged):
                self._check(event)
                self._add(chosen, event, step)

    def _check(self, event: Logged) -> None:
        name = event.rule.name
        known = self._rules.setdefault(name, event.rule) == event.rule
        if event.metric is not None:
            known = known and self._metrics.setdefault(name, event.metric) == event.metric
        if not known or (name in self._metrics) != (event.metric is not None):
            raise NotStacked(f"self.log({name!r}) is called in different ways")

    def _add(self, rows: np.ndarray, event: Logged, step: Step) -> None:
        name = event.rule.name
        if event.place is None:  # a metric, whose value each client's own one computes: note only who logged it
            self._columns.setdefault(name, Column(self._clients, "last")).seen[rows] = True
            return
        values = step.outputs[event.place].cpu().numpy()
        if name not in self._columns:
            widest = np.result_type(values.dtype, np.float64 if wide_dtype() == torch.float64 else np.float32)
            self._columns[name] = Column(self._clients, event.rule.reduction, widest)
        self._columns[name].add(rows, values, step.size if event.batch_size is None else event.batch_size)

    @property
    def metrics(self) -> set[str]:
        """Paths of the metrics that were logged themselves."""
        return set(self._metrics.values())

    def values(self) -> list[dict[str, float | str]]:
        """Return for each client what it logged, by the names that a logger sees.

        A value is a number, or the path of the metric that computes it.
        """
        columns: list[tuple[str, list[bool], list[float] | str]] = []
        for name, rule in self._rules.items():
            if rule.logger:
                own = self._columns[name]
                columns.append((rule.epoch_name, own.seen.tolist(), self._metrics.get(name) or own.values()))
        return [
            {name: values if isinstance(values, str) else values[row] for name, seen, values in columns if seen[row]}
            for row in range(self._clients)
        ]

    def losses(self) -> list[dict[str, float]]:
        """Return the mean of the losses that steps returned, for clients whose module logs nothing."""
        pairs = zip(self._losses.values(), self._losses.seen.tolist(), strict=True)
        return [{"loss": loss} if seen else {} for loss, seen in pairs]


States = tuple[Any, Any, Tensor, Tensor | None]
CPU = torch.device("cpu")
NEAR, AT_LEAST = 2**22, 16
"""Bytes of a stacked batch that stay in the processor's cache, and clients that may take a step together at least."""


def generator_states(device: torch.device = CPU) -> States:
    """Return the states of Python's, numpy's and torch's global generators, also of that of a CUDA device."""
    on_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_cuda


def set_generators(states: States, device: torch.device = CPU) -> None:
    """Set these generators to given states."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state(states[3], device)


def same_states(a: States, b: States) -> bool:
    """Return True if nothing was drawn between two states."""
    same = a[0] == b[0] and all(np.array_equal(one, other) for one, other in zip(a[1], b[1], strict=True))
    return same and torch.equal(a[2], b[2]) and (a[3] is None or b[3] is None or torch.equal(a[3], b[3]))


class Rows:
    """Batches of a loader that picks rows of tensors in memory, in their order.

    Args:
        source: Dataset in memory.
        indices: Its rows.
        batch_size: Samples in a batch.
        count: Batches.
    """

    def __init__(self, source: Any, indices: Tensor, batch_size: int, count: int) -> None:
        self.source, self.parts, self.count = source, tensors_of(source), count
        self._chosen = indices.split(batch_size)
        self._tail = tuple((part.shape[1:], part.dtype) for part in self.parts)

    def shape(self, index: int) -> tuple[Any, ...]:
        """Return a key: batches with equal keys can be stacked."""
        return (len(self._chosen[index]), self._tail)

    def num_bytes(self, index: int) -> int:
        """Return the size of a batch."""
        return len(self._chosen[index]) * sum(part[:1].numel() * part.element_size() for part in self.parts)

    def rows(self, index: int) -> Tensor:
        """Return the rows of a batch."""
        return self._chosen[index]


class Iterated:
    """Batches of any other loader, iterated with global generators of its own.

    Args:
        loader: The loader.
        count: Batches.
        seed: Address of the generators.
    """

    def __init__(self, loader: Any, count: int, seed: Sequence[object]) -> None:
        self.count = count
        with isolated(*seed):
            self._batches: Iterator[Any] = islice(iter(loader), count)
            self._states = generator_states()
        self._batch: tuple[list[Tensor], Any] | None = None

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        before = generator_states()
        set_generators(self._states)
        try:
            yield
        finally:
            self._states = generator_states()
            set_generators(before)

    def shape(self, index: int) -> tuple[Any, ...]:
        """Return a key: batches with equal keys can be stacked. Called once per batch, in order."""
        with self._own_generators():
            tensors, skeleton = split_tree(next(self._batches))
        if not _plain(skeleton):
            raise NotStacked(f"a batch holds a {type(skeleton).__name__}")
        self._batch = tensors, skeleton
        return tuple((tensor.shape, tensor.dtype) for tensor in tensors), repr(skeleton)

    def num_bytes(self, index: int) -> int:
        """Return the size of the batch whose shape was asked for last."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.take()[0])

    def take(self) -> tuple[list[Tensor], Any]:
        """Return the tensors of that batch and its other content."""
        assert self._batch is not None
        return self._batch


def _plain(skeleton: Any) -> bool:
    """Return True if a batch consists of lists, tuples and dicts of tensors and plain values, so its text tells all."""
    if type(skeleton) in (list, tuple):
        return all(_plain(part) for part in skeleton)
    if type(skeleton) is dict:
        return all(type(key) is str and _plain(part) for key, part in skeleton.items())
    return type(skeleton) in (str, int, float, bool, type(None), type(split_tree(torch.empty(0))[1]))


def can_iterate_together(loader: Any) -> bool:
    """Return True if a loader has a fixed order, no workers, of which many clients would have too many, and no generator
    of its own, which others may draw from in between.
    """
    fixed = type(loader.sampler) in (SequentialSampler, AddressedSampler) and type(loader.batch_sampler) is BatchSampler
    return fixed and not loader.num_workers and not going_on(loader)


def rewinding(loaders: Iterable[Any]) -> Callable[[], None]:
    """Return a function that sets the generators of loaders back to their present states."""
    generators = {id(loader.generator): loader.generator for loader in loaders if loader.generator is not None}
    states = [(generator, generator.get_state()) for generator in generators.values()]

    def rewind() -> None:
        for generator, state in states:
            generator.set_state(state)

    return rewind


def source_of(loader: Any, count: int, seed: Sequence[object]) -> Rows | Iterated:
    """Return the batches of a loader in the cheapest form."""
    in_order = (
        resident_batches(loader, CPU) is not None
        and type(loader.sampler) is SequentialSampler
        and loader.batch_size is not None  # else a batch sampler gives the order
        and len(loader.sampler) == len(loader.dataset)
    )
    if in_order and (found := rows_of(loader.dataset)) is not None:
        source, held = found
        transformed = isinstance(source, ArrayDataset) and source.transform is not None
        if not transformed and all(map(is_plain, tensors_of(source))) and not loader.drop_last:
            indices = torch.arange(len(source)) if held is None else held
            return Rows(source, indices, loader.batch_size, count)
    return Iterated(loader, count, seed)


def stacked_batch(sources: Sequence[Rows | Iterated], index: int, device: torch.device) -> Any:
    """Return the batches `index` of all sources as one, `(len(sources), batch, ...)`. They have the same shape."""
    first = sources[0]
    if isinstance(first, Rows):
        held = [source for source in sources if isinstance(source, Rows)]
        rows = [source.rows(index) for source in held]
        if any(source.source is not first.source for source in held):
            return [
                torch.stack(
                    [source.parts[place].index_select(0, own) for source, own in zip(held, rows, strict=True)]
                ).to(device)
                for place in range(len(first.parts))
            ]
        chosen = torch.cat(rows).to(device)
        parts = first.parts
        if device.type != "cpu":
            parts = tuple(on_device(first.source, place, part, device) for place, part in enumerate(parts))
        return [part.index_select(0, chosen).view(len(rows), -1, *part.shape[1:]) for part in parts]
    taken = [source.take() for source in sources if isinstance(source, Iterated)]
    together = zip(*(tensors for tensors, _ in taken), strict=True)
    return join_tree(taken[0][1], [torch.stack(group).to(device) for group in together])


def pieces(
    turns: Iterable[Sequence[int]], sources: Sequence[Rows | Iterated], index: int, at_most: int
) -> Iterator[Sequence[int]]:
    """Split the clients of each turn into parts whose stacked batches stay in the processor's cache."""
    for rows in turns:
        near = max(AT_LEAST, NEAR // max(sources[rows[0]].num_bytes(index), 1))
        at_once = min(near, at_most)
        for start in range(0, len(rows), at_once):
            yield rows[start : start + at_once]
