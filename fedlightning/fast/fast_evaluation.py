"""The evaluator `fast`: `Trainer.validate` and `Trainer.test` of one module on one device, and nothing else.

The hooks are called in the Trainer's order with the same arguments, so the module logs the same.

Many rows in little memory, the oldest of them in a file.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, overload
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils.data import DataLoader

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.evaluator import names_of
from fedlightning.client.kept import Kept
from fedlightning.client.logged_metrics import nan_where_undefined, numbers
from fedlightning.client.probes import TRANSFERS
from fedlightning.compat.lightning_runs import class_takes_index, detached_copy, to_device, trainer_of, without_warnings
from fedlightning.datamodules.resident_batches import resident_batches
from fedlightning.datamodules.sampling import read_for_scores
from fedlightning.fast import eligibility
from fedlightning.fast.eligibility import Hooks, of_module, per_class
from fedlightning.fast.log_sheet import FastLoopRefused, LogSheet, Value
from fedlightning.fast.trainer_view import FastTrainer
from fedlightning.scores.rows import KIND, Row, Rows

MAX_ROWS = 50_000
"""Rows above which older ones are left to their file: a megabyte and a half."""
KEPT = 2
"""Newest parts of them that stay in memory in any case: the last round, and what was scored after it."""


@dataclass(frozen=True)
class Spilled:
    """Rows that lie in a file only.

    Attributes:
        start: First of them, counted from the first row of the table.
        end: The one after the last.
        last_round: Newest round among them.
        kinds: Places of their kinds.
        where: Bytes of the file: first, and the one after the last.
    """

    start: int
    end: int
    last_round: int
    kinds: frozenset[int]
    where: tuple[int, int]


class RowTable(Rows):
    """Rows in a twentieth of the memory: a thousand clients write thousands a round.

    Rows that are in a file anyway are left there where there are many, so that memory does not grow with the rounds; they are
    read when somebody asks for them.

    Args:
        rows: The first rows.

    Example:
        >>> table = RowTable([Row(1, "G", "global", "latest", "local", "val", "a", "loss", 0.5, 10)])
        >>> table.extend(table[:])
        >>> len(table), table[-1].value
        (2, 0.5)
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rounds, self._kinds, self._clients = array("i"), array("i"), array("i")
        self._values, self._sizes = array("d"), array("q")
        self._names: list[str] = []  # of clients
        self._places: dict[str, int] = {}
        self._labels: list[tuple[str, ...]] = []  # kinds
        self._kind_places: dict[tuple[str, ...], int] = {}
        self._spilled: list[Spilled] = []
        self._read: Callable[[int, int], list[Row]] = lambda start, end: []
        self._last_read: tuple[Spilled | None, list[Row]] = (None, [])
        self._written: list[tuple[int, tuple[int, int]]] = []  # rows in memory, and their bytes in the file
        self.extend(rows)

    def extend(self, rows: Iterable[Row]) -> None:
        """Append rows."""
        rows = list(rows)
        if not rows:
            return
        kinds, clients = list(map(KIND, rows)), [row.client for row in rows]
        for kind in dict.fromkeys(kinds):
            if kind not in self._kind_places:
                self._kind_places[kind] = len(self._labels)
                self._labels.append(kind)
        for client in dict.fromkeys(clients):
            if client not in self._places:
                self._places[client] = len(self._names)
                self._names.append(client)
        self._kinds.extend(map(self._kind_places.__getitem__, kinds))
        self._clients.extend(map(self._places.__getitem__, clients))
        self._rounds.extend([row.round for row in rows])
        self._values.extend([row.value for row in rows])
        self._sizes.extend([row.num_samples for row in rows])

    @property
    def held(self) -> int:
        """Rows in memory."""
        return len(self._rounds)

    def written(self, count: int, place: tuple[int, int], read: Callable[[int, int], list[Row]]) -> None:
        """Note that the next `count` rows are in a file too, in the bytes `place`; leave old ones there if they are many."""
        self._written.append((count, place))
        old = self._written[:-KEPT]
        if self.held > MAX_ROWS and old and sum(count for count, _ in self._written) == self.held:
            self.spill(old, read)
            self._written = self._written[-KEPT:]

    def spill(self, where: Sequence[tuple[int, tuple[int, int]]], read: Callable[[int, int], list[Row]]) -> None:
        """Leave the oldest rows that are in memory to a file."""
        self._read = read
        first = self._spilled[-1].end if self._spilled else 0
        total = 0
        for count, place in where:
            part = slice(total, total + count)
            newest, kinds = max(self._rounds[part], default=0), frozenset(self._kinds[part])
            self._spilled.append(Spilled(first + total, first + total + count, newest, kinds, place))
            total += count
        for column in (self._rounds, self._kinds, self._clients, self._values, self._sizes):
            del column[:total]

    def where(self, kind: Callable[..., bool], since: int = 0) -> list[Row]:
        """Return the rows of some kinds and rounds. Of what lies in a file, only parts that may hold such are read."""
        wanted = {place for place, labels in enumerate(self._labels) if kind(*labels)}
        rows: list[Row] = []
        for part in self._spilled:
            if part.last_round >= since and not wanted.isdisjoint(part.kinds):
                rows += [row for row in self._part(part) if row.round >= since and kind(*KIND(row))]
        pairs = zip(self._rounds, self._kinds, strict=True)
        return rows + [self._row(at) for at, (round, place) in enumerate(pairs) if round >= since and place in wanted]

    def _part(self, part: Spilled) -> list[Row]:
        rows = self._read(*part.where)
        if len(rows) != part.end - part.start:
            raise RuntimeError(
                f"The scores of the rounds up to {part.last_round} are not where they were written any more. Leave "
                "metrics.csv as it is while the run goes on."
            )
        return rows

    def _row(self, at: int) -> Row:
        model, stage, checkpoint, data, split, metric = self._labels[self._kinds[at]]
        client = self._names[self._clients[at]]
        return Row(
            self._rounds[at], stage, model, checkpoint, data, split, client, metric, self._values[at], self._sizes[at]
        )

    def __len__(self) -> int:
        return self._first_held + len(self._rounds)

    @property
    def _first_held(self) -> int:
        return self._spilled[-1].end if self._spilled else 0

    def __iter__(self) -> Iterator[Row]:
        for part in self._spilled:
            yield from self._part(part)
        for at in range(len(self._rounds)):
            yield self._row(at)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            try:
                return [self[position] for position in range(*index.indices(len(self)))]
            finally:
                self._last_read = (None, [])
        index = range(len(self))[index]
        if index >= self._first_held:
            return self._row(index - self._first_held)
        part = self._spilled[bisect_right(self._spilled, index, key=lambda part: part.start) - 1]
        if self._last_read[0] is not part:
            self._last_read = (part, self._part(part))
        return self._last_read[1][index - part.start]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


MODE_HOOKS = frozenset(
    f"on_{name}_{what}" for name in ("validation", "test") for what in ("model_eval", "model_train")
) | {"configure_callbacks", "configure_sharded_model", "log"}
"""Methods of a LightningModule that are left to Lightning when a module overrides them."""


ONCE_FOR_EACH = frozenset(
    [
        "setup",
        "teardown",
        "configure_model",
        "train",
        "eval",
        "to",
        "zero_grad",
        "modules",
        "children",
        "named_modules",
        "named_children",
        "parameters",
        "named_parameters",
    ]
)
"""Methods of a module that see every evaluation begin or end when the module overrides them."""


class Listener(Protocol):
    """Function that gets the output of every evaluation step."""

    def __call__(self, outputs: Any, batch: Any) -> None: ...


def refusal(module: LightningModule, loader: Any, base: Trainer, testing: bool) -> str | None:
    """Return the reason why the Trainer must score `module`, or `None` if there is none."""
    return module_refusal(module, base) or eligibility.find_loader_refusal(loader, names_of(testing).limit(base))


def module_refusal(module: LightningModule, base: Trainer) -> str | None:
    """Return the part of :func:`refusal` that does not depend on the loader."""
    special = sorted(of_module(type(module)) & MODE_HOOKS)
    if special:
        return f"{type(module).__name__} overrides {special[0]}"
    if set(vars(module)) & {"log", "log_dict", "validation_step", "test_step"}:
        return f"a method of {type(module).__name__} is set on the instance"
    if not takes_plain_batches(type(module)):
        return f"a step of {type(module).__name__} takes dataloader_iter or dataloader_idx"
    return eligibility.find_run_refusal({"devices": 1}, [], base) or eligibility.of_hyperparameters(module)


@per_class
def takes_plain_batches(kind: type[LightningModule]) -> bool:
    """Return True if the evaluation steps of a class take a batch and at most its index besides."""
    steps = [step for step in (kind.validation_step, kind.test_step) if callable(step)]
    special = ("dataloader_iter", "dataloader_idx")
    return not any(is_param_in_hook_signature(step, name, explicit=True) for step in steps for name in special)


@per_class
def _leaves_modes(kind: type[nn.Module]) -> bool:
    return kind.train is nn.Module.train and kind.eval is nn.Module.eval


def may_stay_open(module: LightningModule) -> bool:
    """Return True if a module cannot tell one :class:`Evaluation` of several loaders from one for each loader."""
    hooked = (of_module(type(module)) | vars(module).keys()) & ONCE_FOR_EACH
    return not hooked and all(_leaves_modes(type(child)) for child in module.modules() if child is not module)


class Evaluation(AbstractContextManager["Evaluation"]):
    """Evaluation of one module on one loader, or on several where :func:`may_stay_open` holds.

    What all loaders have in common is done once: the way to the device, modes, the stand-in of the Trainer, the search for
    hooks. Each loader sees a stand-in and a log sheet that know nothing of the loaders before.

    Args:
        module: The module.
        base: A Trainer made with the run's arguments.
        testing: Whether it is tested, or else validated.
        listen: Gets the output of every step.
        inference_mode: Run in torch's inference mode, or else without gradients.
    """

    def __init__(
        self, module: LightningModule, base: Trainer, testing: bool, listen: Listener, inference_mode: bool = True
    ) -> None:
        self._module, self._base, self._listen = module, base, listen
        self._precision, self._device = base.precision_plugin, base.strategy.root_device
        self._names = names_of(testing)
        self._without_gradients: Any = torch.inference_mode if inference_mode else torch.no_grad
        self._log_sheet = LogSheet(module, training=False)
        self._trainer = self._new_trainer()
        self._hooks = Hooks(self._trainer, self._log_sheet)
        self._quiet, self._open_contexts = without_warnings(), ExitStack()
        self._modes: list[tuple[nn.Module, bool]] = []  # of the module's parts, before
        self._parameters: list[nn.Parameter] = []
        self._is_open = False

    def _new_trainer(self) -> FastTrainer:
        base = self._base
        limits: dict[str, Any] = {"max_epochs": base.max_epochs, "max_steps": base.max_steps}
        stage = self._names.stage
        return FastTrainer(base, self._module, [], self._precision, self._log_sheet, stage, **limits)

    def __enter__(self) -> Evaluation:
        self._quiet.__enter__()
        self._log_sheet.attach()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self._close()
        self._open_contexts.close()
        self._log_sheet.detach()
        self._quiet.__exit__(None, None, None)

    def run(self, loader: Any, count: int | None = None) -> dict[str, Value]:
        """Return what the module logs on a loader."""
        if count is None:
            count = eligibility.num_batches(loader, self._names.limit(self._base))
        if self._is_open:
            self._log_sheet.restart()
            self._trainer.become(self._new_trainer())
        self._trainer.show_loader(self._names.short, loader, count)
        if trainer_of(self._module) is not self._trainer:
            self._module.trainer = self._trainer  # type: ignore[assignment]
        if self._is_open:
            for parameter in self._parameters:
                parameter.grad = None
        else:
            self._open()
        try:
            with self._without_gradients():
                logged = self._epoch(loader, count)
            # a metric may compute the very tensor that it keeps
            return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in logged.items()}
        finally:
            self._kept.put_back()
            self._log_sheet.clear()

    def _open(self) -> None:
        module, hooks, names, precision = self._module, self._hooks, self._names, self._precision
        hooks.run("setup", stage=names.run)
        if hooks.overridden("configure_model"):
            with self._base.strategy.tensor_init_context(), precision.module_init_context():
                module.configure_model()
        self._open_contexts.enter_context(nan_where_undefined(module))
        precision.convert_module(module)
        to_device(module, self._device)
        module.zero_grad()
        self._modes = [(child, child.training) for child in module.modules()]
        self._parameters = list(module.parameters())
        self._step, self._context = getattr(module, names.step), names.context(precision)
        self._takes_index = class_takes_index(type(module), names.step)
        self._moves = any(map(hooks.overridden, TRANSFERS))
        self._start, self._epoch_start = (hooks.find(f"on_{names.hook}_{when}") for when in ("start", "epoch_start"))
        self._batch_start, self._batch_end = (hooks.find(f"on_{names.hook}_batch_{when}") for when in ("start", "end"))
        self._epoch_end, self._end = (hooks.find(f"on_{names.hook}_{when}") for when in ("epoch_end", "end"))
        module.eval()
        self._kept = Kept(module)
        self._is_open = True

    def _close(self) -> None:
        for child, mode in self._modes:
            child.training = mode
        self._hooks.run("teardown", stage=self._names.run)

    def _epoch(self, loader: Any, count: int) -> dict[str, Value]:
        module, precision, device, log_sheet = self._module, self._precision, self._device, self._log_sheet
        resident = resident_batches(loader, device)
        batches, moves = iter(resident or loader), self._moves or resident is None
        if any(child.training for child, _ in self._modes):  # a hook has changed them
            module.eval()
        for hook in (self._start, self._epoch_start):
            if hook is not None:
                hook()
        for index in range(count):
            batch = precision.convert_input(next(batches))
            if moves:
                batch = module.on_before_batch_transfer(batch, 0)
                batch = module.transfer_batch_to_device(batch, device, 0)
                batch = module.on_after_batch_transfer(batch, 0)
            log_sheet.begin_batch(batch)
            if self._batch_start is not None:
                self._batch_start(batch, index)
            log_sheet.enter(self._names.step)
            with self._context():
                outputs = self._step(batch, index) if self._takes_index else self._step(batch)
            log_sheet.enter(None)
            self._listen(outputs, batch)
            if self._batch_end is not None:
                self._batch_end(outputs, batch, index)
            log_sheet.end_batch()
        log_sheet.end_batches()
        logged = log_sheet.epoch_values()
        if self._epoch_end is not None:
            self._epoch_end()
        logged.update(log_sheet.end_epoch())
        if self._end is not None:
            self._end()
        return logged


class FastEvaluator:
    """Bypasses the Trainer where the scores are provably the same, unless `local_loop="trainer"`.

    Args:
        blueprint: Holds the evaluating Trainer.

    Attributes:
        refused: Classes of modules that have needed the Trainer.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self.refused: WeakSet[Any] = WeakSet()
        self._tried_kinds: set[tuple[Any, bool]] = set()

    def evaluate(self, module: LightningModule, loader: Any, testing: bool) -> dict[str, Any] | None:
        """Return what a module logs, or `None` if only Lightning's Trainer can compute it."""
        kind, trainer = type(module), self._blueprint.trainer
        limit = names_of(testing).limit(trainer)
        if self._refusal(module) is not None or eligibility.find_loader_refusal(loader, limit) is not None:
            return None
        # The first module of a class is scored on a copy: if it turns out to need the Trainer, its own metrics are unused.
        try:
            scored = module if (kind, testing) in self._tried_kinds else detached_copy(module)
        except Exception:  # something in it cannot be copied
            self.refused.add(kind)
            return None
        losses = self._blueprint.losses
        losses.reset()
        try:
            with Evaluation(scored, trainer, testing, losses.add, self._inference_mode) as evaluation:
                logged = evaluation.run(loader)
        except FastLoopRefused:
            self.refused.add(kind)
            return None
        self._tried_kinds.add((kind, testing))
        return logged

    def evaluate_each(
        self,
        module: LightningModule,
        loaders: Iterable[DataLoader[Any]],
        testing: bool,
        start: Callable[[int], None],
        scores: list[dict[str, float]],
    ) -> None:
        """Append the scores on each loader, up to the first one that must be scored alone."""
        is_tried = (type(module), testing) in self._tried_kinds and may_stay_open(module)
        if not is_tried or self._refusal(module) is not None:
            return
        home, before, trainer = module.device, trainer_of(module), self._blueprint.trainer
        losses, limit = self._blueprint.losses, names_of(testing).limit(trainer)
        try:
            with Evaluation(module, trainer, testing, losses.add, self._inference_mode) as evaluation:
                for place, loader in enumerate(loaders):
                    if eligibility.find_loader_refusal(loader, limit) is not None:
                        break
                    start(place)
                    losses.reset()
                    with read_for_scores(loader):
                        logged = evaluation.run(loader)
                    scores.append(numbers(logged, module) or losses.result())
        except FastLoopRefused:
            self.refused.add(type(module))
        finally:
            to_device(module, home)
            module.trainer = before

    @property
    def _inference_mode(self) -> bool:
        return bool(self._blueprint.settings.trainer_arguments.get("inference_mode", True))

    def _refusal(self, module: LightningModule) -> str | None:
        if self._blueprint.settings.local_loop == "trainer" or type(module) in self.refused:
            return "the Trainer was asked for, or has been needed before"
        return module_refusal(module, self._blueprint.trainer)
