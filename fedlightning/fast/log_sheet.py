"""`self.log` under the fast loop: Lightning's rules and arithmetic, without its cost per call.

Lightning builds a torchmetrics object per name and reduces after every call, some 0.4 ms each. Here a call keeps the
value; the reduction is done once an epoch, in the same order and precision, so that the numbers are the same bits. Where
that cannot be, :class:`FastLoopRefused` hands the visit over to Lightning's Trainer.

Three places log: this one (one client), :mod:`~fedlightning.stacked.logs` (training of a stack) and
:mod:`~fedlightning.stacked.scoring` (evaluation of a stack). All of them read a call by :func:`log_call` or
:func:`rule_of` and keep its value as :func:`scalar`. What they refuse, and when they reduce, differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from numbers import Number
from types import MethodType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from fedlightning.client.logged_metrics import one_number
from fedlightning.errors import Restart

REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}
"""Reduction over an epoch, by the name that `reduce_fx` may give it."""
REDUCTIONS_OF: dict[Any, str] = {
    torch.mean: "mean", torch.sum: "sum", sum: "sum", torch.min: "min", min: "min", torch.max: "max", max: "max",
}  # fmt: skip
"""Reduction over an epoch, by the function that `reduce_fx` may be."""
STARTS = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""Value of each reduction before the first step."""


@dataclass
class LogRule:
    """Lightning's reading of one `self.log(name, ...)`. Not to be edited: equal calls share one object.

    Attributes:
        name: Name that was logged.
        step_name: Name of the value of a step: with `_step` if the value is kept by epoch, too.
        epoch_name: Name of the value of an epoch: with `_epoch` if the value is kept by step, too.
        on_step: Whether the value of each step is kept.
        on_epoch: Whether the steps' values are reduced over the epoch.
        reduction: A value of :data:`REDUCTIONS`; empty if Lightning knows no such reduction.
        logger: Whether loggers (and the results of an evaluation) get the value.
    """

    name: str
    step_name: str
    epoch_name: str
    on_step: bool
    on_epoch: bool
    reduction: str
    logger: bool


@lru_cache(maxsize=1024)
def rule_of(
    hook: str,
    name: str,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: str | Callable[[Any], Any] = "mean",
) -> LogRule:
    """Return the rule for a value that is logged in `hook`.

    Example:
        >>> rule = rule_of("training_step", "loss", on_epoch=True)
        >>> rule.step_name, rule.epoch_name, rule.reduction
        ('loss_step', 'loss_epoch', 'mean')
    """
    # Lightning has this table in one place only, a private one; a copy of it would grow old.
    from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

    by_step, by_epoch = _FxValidator.check_logging_and_get_default_levels(hook, on_step=on_step, on_epoch=on_epoch)
    reduction = (
        REDUCTIONS.get(reduce_fx.lower(), "") if isinstance(reduce_fx, str) else REDUCTIONS_OF.get(reduce_fx, "")
    )
    both = by_step and by_epoch
    step_name, epoch_name = (f"{name}_step", f"{name}_epoch") if both else (name, name)
    return LogRule(name, step_name, epoch_name, by_step, by_epoch, reduction, logger is not False)


class LogCall(NamedTuple):
    """One call of `self.log`.

    Attributes:
        rule: Lightning's reading of it.
        batch_size: Weight of the value in a mean over the epoch. `None`: the size of the batch.
        enable_graph: Whether the value is to keep its autograd graph.
        reduce_fx: As it was given.
    """

    rule: LogRule
    batch_size: int | None
    enable_graph: bool
    reduce_fx: str | Callable[[Any], Any]


_LOG = signature(LightningModule.log)


def log_call(hook: str, name: str, *args: Any, **options: Any) -> LogCall:
    """Return the reading of `self.log(name, value, *args, **options)` in `hook`.

    `prog_bar` changes no value, and on one device neither do the `sync_dist` arguments and `rank_zero_only`.
    """
    arguments = _LOG.bind(None, name, None, *args, **options).arguments
    reduce_fx = arguments.get("reduce_fx", "mean")
    rule = rule_of(hook, name, arguments.get("logger"), arguments.get("on_step"), arguments.get("on_epoch"), reduce_fx)
    return LogCall(rule, arguments.get("batch_size"), arguments.get("enable_graph", False), reduce_fx)


def wide_dtype() -> torch.dtype:
    """Return the default dtype, but no lower than float32: the type in which Lightning adds up."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def scalar(
    name: str, value: Any, refusal: Callable[[str], BaseException], owner: LightningModule | None = None
) -> Tensor:
    """Return a logged value as it is kept: a copy without dimensions and without a graph, in float32 or float64."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
    elif isinstance(value, Number):
        value = torch.tensor(value, device=None if owner is None else owner.device, dtype=wide_dtype())
    else:
        raise refusal(f"self.log({name!r}) gets a {type(value).__name__}")
    one_number(name, value, owner)
    if value.dtype not in (torch.float32, torch.float64):
        value = value.to(wide_dtype())
    return value.squeeze() if value.ndim else value


Value: TypeAlias = Tensor | np.floating[Any]
"""What is kept of a call: a tensor without dimensions, or a number that was logged at the end of an evaluation."""


NUMBERS: dict[torch.dtype, Callable[[float], np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
"""Type of a number, by the type in which values are added up."""


def reduce(reduction: str, numbers: list[Value], sizes: list[Any], start: torch.dtype) -> Value:
    """Return Lightning's running reduction of scalars."""
    if len(numbers) == 1 and not isinstance(numbers[0], Tensor):
        return _number_alone(reduction, numbers[0], sizes[0])
    device = next((value.device for value in numbers if isinstance(value, Tensor)), None)
    values = [as_tensor(value, device) for value in numbers]
    kinds = {value.dtype for value in values}
    if kinds == {start} and (reduction != "mean" or all(type(size) is int for size in sizes)):
        if len(values) == 1:  # what is logged at the end of an epoch
            return _reduced_alone(reduction, values[0], sizes[0])
        rows = torch.stack(values).cpu().numpy()
        if reduction in ("min", "max"):
            result = (np.minimum if reduction == "min" else np.maximum).reduce(rows)
        else:
            weighted = rows * np.array(sizes, dtype=rows.dtype) if reduction == "mean" else rows
            result = np.add.accumulate(weighted, dtype=rows.dtype)[-1] + rows.dtype.type(0)  # never -0.0
            if reduction == "mean":
                result = result / rows.dtype.type(sum(sizes))
        return torch.tensor(result, device=values[0].device)
    total, count = torch.tensor(STARTS[reduction], dtype=start, device=values[0].device), torch.tensor(0)
    for value, size in zip(values, sizes, strict=True):
        if reduction == "mean":
            total, count = total + value * size, count + size
        elif reduction == "sum":
            total = total + value
        else:
            total = (torch.min if reduction == "min" else torch.max)(total, value)
    return total / count.to(total.device) if reduction == "mean" else total


def _reduced_alone(reduction: str, value: Tensor, size: Any) -> Tensor:
    """Return the reduction of one value: as many roundings as of many, on a number instead of arrays."""
    if reduction in ("min", "max"):
        return value.clone()
    if reduction == "sum" or size == 1:
        return value + 0  # never -0.0
    return torch.tensor(_number_alone(reduction, value.cpu().numpy()[()], size), device=value.device)


def _number_alone(reduction: str, number: Any, size: Any) -> Any:
    if reduction in ("min", "max"):
        return number
    weight = type(number)(1 if reduction == "sum" else size)
    return (number * weight + type(number)(0)) / weight


def as_tensor(value: Value, device: torch.device | None = None) -> Tensor:
    """Return a kept value as a tensor."""
    return value if isinstance(value, Tensor) else torch.tensor(value, device=device)


class FastLoopRefused(Restart):
    """The fast loop met something that it cannot repeat; the message says what."""

    def apply(self, runner: Any) -> None:
        """Leave the fast loop for the rest of the run."""
        runner.loop.give_up(str(self))


@dataclass
class Entry(LogRule):
    """One name logged in one hook: its rule, and its values in this epoch.

    Attributes:
        hook: Hook that logs it.
        arguments: Arguments of the call; another call of the same hook must have the same ones.
        dtype: Type in which the values are added up.
        values: Values of the steps.
        sizes: Their batch sizes.
        last: Value of the last step.
        metric: The metric that was logged, if it is one.
        empty: Whether nothing has been logged in this epoch.
        reduced: The value of the epoch, once it has been asked for; `None` after another step.
    """

    hook: str
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    values: list[Value] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    last: Any = None
    metric: Metric | None = None
    empty: bool = True
    reduced: Value | None = None

    def reset(self) -> None:
        """Start a new epoch."""
        if self.metric is not None:
            self.metric.reset()
        self.values.clear()
        self.sizes.clear()
        self.empty, self.reduced = True, None

    def of_epoch(self) -> Any:
        """Return the value of the epoch so far."""
        if self.metric is not None:
            return self.metric.compute()
        if self.reduced is None:
            self.reduced = reduce(self.reduction, self.values, self.sizes, self.dtype)
        return self.reduced


class LogSheet:
    """Collects all that one module logs during one fit or one evaluation.

    Args:
        module: Module that logs.
        training: Whether it trains. Lightning shows the values of steps to callbacks in training only.

    Attributes:
        callback_metrics: As a Lightning Trainer has them, brought up to date by the loop.
        logged_metrics: As a Lightning Trainer has them, brought up to date by the loop.
        batch: Batch of the running step, for batch sizes that the module does not name.
    """

    def __init__(self, module: LightningModule, training: bool) -> None:
        self._module = module
        self._names = vars(module)
        self._training = training
        self._entries: dict[tuple[str, str], Entry] = {}
        self._spare: dict[tuple[str, str], Entry] = {}  # of an evaluation before
        self._callback_metrics: dict[str, Value] = {}
        self._logged_metrics: dict[str, Value] = {}
        self.batch: Any = None
        self._batch_size: int | None = None
        self._last_hook: str | None = None
        self._first: bool | None = None  # None: between epochs; True: in the first batch; False: in a later one
        self._by_step = False

    # -- the module's side -----------------------------------------------------------------------------------------
    def attach(self) -> None:
        """Replace the module's `log` by :meth:`log`; `log_dict` calls it, too."""
        self._names["log"] = _Log(self)

    def detach(self) -> None:
        """Give the module its own `log` back."""
        self._names.pop("log", None)
        self._names["_current_fx_name"] = None

    def enter(self, hook: str | None) -> None:
        """Note the hook that runs. Lightning's own code reads (and sets) the same private attribute."""
        self._names["_current_fx_name"] = hook

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value, as `LightningModule.log`."""
        hook = self._names["_current_fx_name"]
        options = (on_step, on_epoch, reduce_fx, prog_bar, logger, add_dataloader_idx, metric_attribute)
        entry = self._entries.get((hook, name))
        if entry is None or entry.arguments != options:
            entry = self._entry(hook, name, options, value, enable_graph)
        if self._last_hook != hook:
            if self._first is not False:
                for other in self._entries.values():
                    if other.hook == hook and other.metric is None:
                        other.reset()
            self._last_hook = hook
        if entry.metric is not None:
            if value is not entry.metric:
                raise FastLoopRefused(f"self.log({name!r}) gets another metric than before")
            entry.last, entry.empty = value._forward_cache, False
            return
        if type(value) is float and self._first is None and not self._training and not entry.on_step:
            value = NUMBERS[entry.dtype](value)  # a tensor of it is made for who asks for one
        else:
            value = scalar(name, value, FastLoopRefused, self._module)
        entry.empty = False
        if entry.on_step:
            entry.last = value
        if entry.on_epoch:
            entry.reduced = None
            entry.values.append(value)
            entry.sizes.append(self._size() if batch_size is None and entry.reduction == "mean" else batch_size)

    def _entry(self, hook: str | None, name: str, options: tuple[Any, ...], value: Any, enable_graph: bool) -> Entry:
        spare = self._spare.pop((hook, name), None) if hook is not None else None
        if spare is not None and spare.arguments == options and not enable_graph and (hook, name) not in self._entries:
            if spare.metric is (value if isinstance(value, Metric) else None):
                self._entries[spare.hook, name] = spare
                self._by_step = self._by_step or spare.on_step
                return spare
        on_step, on_epoch, reduce_fx, _, logger, add_dataloader_idx, metric_attribute = options
        if hook is None or enable_graph or (add_dataloader_idx and "/dataloader_idx_" in name):
            raise FastLoopRefused(
                f"self.log({name!r}) is called with enable_graph, outside a hook, or for a dataloader"
            )
        if isinstance(value, Metric) and metric_attribute is None:
            if not any(child is value for child in self._module.modules()):
                raise FastLoopRefused(f"the metric logged as {name!r} is not an attribute of the module")
        rule = rule_of(hook, name, logger, on_step, on_epoch, reduce_fx)
        if not rule.reduction or not (rule.on_step or rule.on_epoch):
            raise FastLoopRefused(f"self.log({name!r}) asks for reduce_fx={reduce_fx!r}")
        if (hook, name) in self._entries:
            raise FastLoopRefused(f"self.log({name!r}) is called twice in {hook} with different arguments")
        entry = Entry(**vars(rule), hook=hook, arguments=options, dtype=wide_dtype())
        entry.metric = value if isinstance(value, Metric) else None
        self._entries[hook, name] = entry
        self._by_step = self._by_step or rule.on_step
        return entry

    def _size(self) -> int:
        if self._batch_size is None:
            self._batch_size = 1 if self.batch is None else extract_batch_size(self.batch)
        return self._batch_size

    # -- the loop's side -------------------------------------------------------------------------------------------
    def begin_batch(self, batch: Any) -> None:
        """Note that a batch is on the device. Its hooks come next."""
        self.batch, self._batch_size = batch, None
        self._first = self._first is None

    def end_batch(self) -> None:
        """Note that the batch's last hook has run."""
        if self._by_step:
            self._update()
        self.batch = self._batch_size = None

    def end_batches(self) -> None:
        """Note the end of the epoch's last batch. From now on values are those of the epoch."""
        self._first = None

    def end_epoch(self) -> dict[str, Value]:
        """Note that the epoch's last hook has run. Return the values of the epoch, by the names that a logger sees."""
        logged = self._update()
        self._last_hook = None
        return logged

    def clear(self) -> None:
        """Forget the values of the epoch. The metrics of the loop stay."""
        for entry in self._entries.values():
            entry.reset()
        self._first = self._last_hook = None

    def restart(self) -> None:
        """Be as new after :meth:`clear`, for another evaluation of the module; what is logged again is not read again."""
        for entry in self._entries.values():
            entry.last = None
        self._spare.update(self._entries)
        self._entries = {}
        self._callback_metrics, self._logged_metrics = {}, {}
        self.batch = self._batch_size = None
        self._by_step = False

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Metrics that callbacks and plateau schedulers may monitor: tensors."""
        self._update()
        return self._tensors(self._callback_metrics)

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Metrics that a logger gets: tensors."""
        self._update()
        return self._tensors(self._logged_metrics)

    def _tensors(self, metrics: dict[str, Value]) -> dict[str, Any]:
        for name, value in metrics.items():
            if not isinstance(value, Tensor):
                metrics[name] = as_tensor(value, self._module.device)
        return metrics

    def epoch_values(self) -> dict[str, Value]:
        """Return what was logged for the epoch, by the names that a logger sees: the result of an evaluation."""
        return self._collect()[1]

    def _update(self) -> dict[str, Value]:
        callback, logged = self._collect()
        self._callback_metrics.update(callback)
        self._logged_metrics.update(logged)
        return logged

    def _collect(self) -> tuple[dict[str, Value], dict[str, Value]]:
        callback: dict[str, Value] = {}
        logged: dict[str, Value] = {}
        on_step = self._first is not None
        for entry in self._entries.values():
            if entry.empty or not (entry.on_step if on_step else entry.on_epoch):
                continue
            value = entry.last if on_step else entry.of_epoch()
            if value is None:
                continue
            if isinstance(value, Tensor):
                value = value.detach()
            elif entry.metric is not None:
                raise FastLoopRefused(f"the metric logged as {entry.name!r} does not compute a tensor")
            name = entry.step_name if on_step else entry.epoch_name
            if entry.logger:
                logged[name] = value
            if self._training or not on_step:
                callback[entry.name] = callback[name] = value
        return callback, logged


class _Log:
    """The attribute `log` of a module that logs to a sheet. A deep copy of the module logs as its class does."""

    def __init__(self, log_sheet: LogSheet) -> None:
        self._log_sheet, self._call = log_sheet, log_sheet.log

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self._log_sheet._module))
        return self if copy is None else MethodType(type(copy).log, copy)
