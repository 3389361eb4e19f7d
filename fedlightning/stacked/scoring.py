"""Batches to score: those of many clients' loaders at once, each in its own loader's order.

Values that many clients log in stacked evaluation steps, reduced in Lightning's order and precision.

One evaluation step of many clients, and the calls of `self.log` and of metrics in it.

`validation_step` runs under :func:`torch.func.vmap`. Its calls of `self.log` and of torchmetrics objects are noted with
their stacked arguments. Afterwards each client's own metrics are updated with that client's rows.

Limits of a stacked evaluation: what a module may log and read while many clients are scored at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.data import BatchSampler, SequentialSampler
from torchmetrics import Metric, MetricCollection

from fedlightning.client.evaluator import EvaluationNames, loss_of
from fedlightning.compat.lightning_runs import attached, class_takes_index
from fedlightning.datamodules.resident_batches import on_device, resident_batches
from fedlightning.datamodules.sampling import AddressedSampler, going_on
from fedlightning.datamodules.views import ArrayDataset, is_plain, rows_of, tensors_of
from fedlightning.errors import ControlFlow
from fedlightning.fast.log_sheet import LogCall, LogRule, log_call, scalar, wide_dtype
from fedlightning.seeding import isolated
from fedlightning.stacked.logs import Column
from fedlightning.stacked.stack import join_tree, split_tree
from fedlightning.stacked.step import Slots


class NotStacked(ControlFlow):
    """A module does something that one stack cannot do for many clients; the message says what."""


class NoTrainer:
    """Stand-in for `self.trainer` in a stacked evaluation: reading it ends the attempt."""

    def __getattr__(self, name: str) -> Any:
        raise NotStacked(f"self.trainer.{name} is used")


@contextmanager
def evaluating(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Within the block, the module is in eval mode, has no trainer, and what it logs goes to a function."""
    modes = [(vars(child), child.training) for child in module.modules()]
    module.eval()
    vars(module)["log"] = log
    try:
        with attached(module, NoTrainer()):
            yield
    finally:
        vars(module).pop("log", None)
        for attributes, mode in modes:  # not by __setattr__, which is slow in a torchmetrics object
            attributes["training"] = mode


def plain_log(hook: str, name: str, *args: Any, **kwargs: Any) -> LogCall:
    """Return the reading of `self.log(name, value, ...)` in `hook`."""
    call = log_call(hook, name, *args, **kwargs)
    if not call.rule.reduction or call.enable_graph or not call.rule.on_epoch or "/dataloader_idx_" in name:
        raise NotStacked(f"self.log({name!r}) is not a plain value of the epoch")
    if call.batch_size is not None and type(call.batch_size) is not int:
        raise NotStacked(f"self.log({name!r}) gets batch_size={call.batch_size!r}")
    return call


@dataclass(frozen=True)
class Logged:
    """A call of `self.log`.

    Attributes:
        rule: Lightning's reading of it.
        batch_size: Weight in a mean over the epoch. `None`: the size of the batch.
        place: Index of the value among the step's outputs; `None` for a metric.
        metric: Path of the metric that was logged.
    """

    rule: LogRule
    batch_size: int | None
    place: int | None = None
    metric: str | None = None


@dataclass(frozen=True)
class MetricUpdate:
    """A call of a metric's `update`, or of the metric itself (`forward`).

    Attributes:
        metric: Path of the metric.
        forward: Whether the metric itself was called.
        skeleton: The arguments, with a placeholder in place of each tensor.
        positional: Whether the arguments are positional tensors and nothing else.
        first: Index of the first tensor among the step's outputs.
        end: Index after the last one.
    """

    metric: str
    forward: bool
    skeleton: Any
    positional: bool
    first: int
    end: int


@dataclass
class Step:
    """Result of a stacked step.

    Attributes:
        outputs: Tensors `(n, ...)`.
        events: Calls that used them, in order.
        loss: Index of the loss among the outputs, if the step returned one.
        size: Samples in a client's batch.
    """

    outputs: Sequence[Tensor] = ()
    events: list[Logged | MetricUpdate] = field(default_factory=list)
    loss: int | None = None
    size: int = 1


class _MetricStandIn(nn.Module):
    """Replaces a metric and notes its updates. `note` is `None` for a metric that cannot be updated later."""

    def __init__(self, path: str, note: Callable[[str, bool, Any], None] | None) -> None:
        super().__init__()
        vars(self).update(path=path, note=note)

    def update(self, *args: Any, **kwargs: Any) -> None:
        if self.note is None:
            raise NotStacked(f"the collection of metrics {self.path!r} is used")
        self.note(self.path, False, (args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> object:
        if self.note is None:
            raise NotStacked(f"the collection of metrics {self.path!r} is used")
        self.note(self.path, True, (args, kwargs))
        return object()  # stands for the batch's own value, known only after the real update

    def __getattr__(self, name: str) -> Any:
        raise NotStacked(f"the attribute {name!r} of the metric {self.path!r} is used")


def metrics_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Yield the metrics inside a module, outermost ones only, as (path, parent, attribute, metric)."""
    for name, child in module.named_children():
        if isinstance(child, Metric | MetricCollection):
            yield f"{prefix}{name}", module, name, child
        else:
            yield from metrics_of(child, f"{prefix}{name}.")


class ScoringStep:
    """`validation_step` or `test_step` for many clients at once.

    Args:
        module: Its code runs, within :meth:`attached`. Its own tensors are not touched.
        evaluation: Names of validation, or of testing.
        precision: Lightning's precision plugin, for autocast.
        names: Names of the tensors that a call takes.
        shared: Whether these are the same for all clients.
    """

    def __init__(
        self,
        module: LightningModule,
        evaluation: EvaluationNames,
        precision: Precision,
        names: Sequence[str],
        shared: bool,
    ) -> None:
        self._module, self._context, self._shared = module, evaluation.context(precision), shared
        self._hook = evaluation.step
        self._indexed = class_takes_index(type(module), evaluation.step)
        self._slots = Slots(module, names)
        self._index, self._skeleton = 0, None
        self._outputs: list[Tensor] = []
        self._step = Step()
        self._map = vmap(self._one, in_dims=(None if shared else 0, 0), randomness="error")

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within the block, the module is in eval mode, and its calls of `self.log` and of metrics are noted."""
        metrics = list(metrics_of(self._module))
        with evaluating(self._module, self._log):
            for path, parent, name, metric in metrics:
                setattr(parent, name, _MetricStandIn(path, self._feed if isinstance(metric, Metric) else None))
            try:
                yield
            finally:
                for _, parent, name, metric in metrics:
                    setattr(parent, name, metric)

    def __call__(self, tensors: Sequence[Tensor], batch: Any, clients: int, index: int) -> Step:
        """Run the step."""
        batch_tensors, self._skeleton = split_tree(batch)
        self._index, entries = index, tuple(tensors)
        with self._context():
            outputs = self._map(entries, batch_tensors) if clients > 1 else self._alone(entries, batch_tensors)
        self._step.outputs = [output.detach() for output in outputs]
        return self._step

    def _alone(self, tensors: tuple[Tensor, ...], batch_tensors: list[Tensor]) -> list[Tensor]:
        """Run the step of one client, which needs no map."""
        entries = tensors if self._shared else tuple(tensor.squeeze(0) for tensor in tensors)
        return [value.unsqueeze(0) for value in self._one(entries, [leaf.squeeze(0) for leaf in batch_tensors])]

    def _one(self, tensors: tuple[Tensor, ...], batch_tensors: list[Tensor]) -> tuple[Tensor, ...]:
        self._step, self._outputs = Step(), []
        batch = join_tree(self._skeleton, batch_tensors)
        self._step.size = extract_batch_size(batch)
        with self._slots.filled(tensors):
            output = getattr(self._module, self._hook)(batch, *((self._index,) if self._indexed else ()))
            if any(self._slots.now(place) is not entry for place, entry in enumerate(tensors)):
                raise NotStacked("a buffer is replaced")
        loss = loss_of(output)
        if loss is not None:
            self._step.loss = self._add(loss.reshape(()))
        if not self._outputs:
            raise NotStacked("nothing is logged or returned")
        return tuple(self._outputs)

    def _add(self, value: Tensor) -> int:
        self._outputs.append(value)
        return len(self._outputs) - 1

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        call = plain_log(self._hook, name, *args, **kwargs)
        if isinstance(value, _MetricStandIn):
            event = Logged(call.rule, call.batch_size, metric=value.path)
        else:
            event = Logged(call.rule, call.batch_size, self._add(scalar(name, value, NotStacked)))
        self._step.events.append(event)

    def _feed(self, path: str, forward: bool, arguments: Any) -> None:
        tensors, skeleton = split_tree(arguments)
        first = len(self._outputs)
        self._outputs += tensors
        args, kwargs = arguments
        positional = not kwargs and all(isinstance(argument, Tensor) for argument in args)
        self._step.events.append(MetricUpdate(path, forward, skeleton, positional, first, len(self._outputs)))


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
        same = self._rules.setdefault(name, event.rule) == event.rule
        if event.metric is not None:
            same = same and self._metrics.setdefault(name, event.metric) == event.metric
        if not same or (name in self._metrics) != (event.metric is not None):
            raise NotStacked(f"self.log({name!r}) is called in different ways")

    def _add(self, rows: np.ndarray, event: Logged, step: Step) -> None:
        name = event.rule.name
        if event.place is None:  # a metric, whose value each client's own one computes: note only who logged it
            self._columns.setdefault(name, Column(self._clients, "last")).is_logged[rows] = True
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
                column = self._columns[name]
                columns.append((rule.epoch_name, column.is_logged.tolist(), self._metrics.get(name) or column.values()))
        return [
            {name: values if isinstance(values, str) else values[row] for name, seen, values in columns if seen[row]}
            for row in range(self._clients)
        ]

    def losses(self) -> list[dict[str, float]]:
        """Return the mean of the losses that steps returned, for clients whose module logs nothing."""
        pairs = zip(self._losses.values(), self._losses.is_logged.tolist(), strict=True)
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
    same = a[0] == b[0] and all(np.array_equal(first, other) for first, other in zip(a[1], b[1], strict=True))
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
    if in_order and (rows := rows_of(loader.dataset)) is not None:
        source, positions = rows
        transformed = isinstance(source, ArrayDataset) and source.transform is not None
        if not transformed and all(map(is_plain, tensors_of(source))) and not loader.drop_last:
            indices = torch.arange(len(source)) if positions is None else positions
            return Rows(source, indices, loader.batch_size, count)
    return Iterated(loader, count, seed)


def stacked_batch(sources: Sequence[Rows | Iterated], index: int, device: torch.device) -> Any:
    """Return the batches `index` of all sources as one, `(len(sources), batch, ...)`. They have the same shape."""
    first = sources[0]
    if isinstance(first, Rows):
        row_sources = [source for source in sources if isinstance(source, Rows)]
        rows = [source.rows(index) for source in row_sources]
        if any(source.source is not first.source for source in row_sources):
            return [
                torch.stack(
                    [
                        source.parts[place].index_select(0, indices)
                        for source, indices in zip(row_sources, rows, strict=True)
                    ]
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
