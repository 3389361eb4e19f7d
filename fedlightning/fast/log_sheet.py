"""`self.log` under the fast loop: Lightning's rules and arithmetic, without its cost per call.

Lightning builds a torchmetrics object per name and reduces after every call, some 0.4 ms each. Here a call keeps the
value; the reduction is done once an epoch, in the same order and precision, so that the numbers are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from fedlightning.fast.errors import NotInFastLoop
from fedlightning.fast.log_rules import LogRule, rule_of, scalar, wide_dtype
from fedlightning.fast.logged_values import NUMBERS, Value, as_tensor, reduce


@dataclass
class Entry(LogRule):
    """One name logged in one hook: its rule, and its values in this epoch.

    Attributes:
        hook: Hook that logs it.
        given: Arguments of the call; another call of the same hook must have the same ones.
        dtype: Type in which the values are added up.
        values: Values of the steps.
        sizes: Their batch sizes.
        last: Value of the last step.
        metric: The metric that was logged, if it is one.
        empty: Whether nothing has been logged in this epoch.
        reduced: The value of the epoch, once it has been asked for; `None` after another step.
    """

    hook: str
    given: tuple[Any, ...]
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


class LogCollector:
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
        given = (on_step, on_epoch, reduce_fx, prog_bar, logger, add_dataloader_idx, metric_attribute)
        entry = self._entries.get((hook, name))
        if entry is None or entry.given != given:
            entry = self._entry(hook, name, given, value, enable_graph)
        if self._last_hook != hook:
            if self._first is not False:
                for other in self._entries.values():
                    if other.hook == hook and other.metric is None:
                        other.reset()
            self._last_hook = hook
        if entry.metric is not None:
            if value is not entry.metric:
                raise NotInFastLoop(f"self.log({name!r}) gets another metric than before")
            entry.last, entry.empty = value._forward_cache, False
            return
        if type(value) is float and self._first is None and not self._training and not entry.on_step:
            value = NUMBERS[entry.dtype](value)  # a tensor of it is made for who asks for one
        else:
            value = scalar(name, value, NotInFastLoop, self._module)
        entry.empty = False
        if entry.on_step:
            entry.last = value
        if entry.on_epoch:
            entry.reduced = None
            entry.values.append(value)
            entry.sizes.append(self._size() if batch_size is None and entry.reduction == "mean" else batch_size)

    def _entry(self, hook: str | None, name: str, given: tuple[Any, ...], value: Any, enable_graph: bool) -> Entry:
        spare = self._spare.pop((hook, name), None) if hook is not None else None
        if spare is not None and spare.given == given and not enable_graph and (hook, name) not in self._entries:
            if spare.metric is (value if isinstance(value, Metric) else None):
                self._entries[spare.hook, name] = spare
                self._by_step = self._by_step or spare.on_step
                return spare
        on_step, on_epoch, reduce_fx, _, logger, add_dataloader_idx, metric_attribute = given
        if hook is None or enable_graph or (add_dataloader_idx and "/dataloader_idx_" in name):
            raise NotInFastLoop(f"self.log({name!r}) is called with enable_graph, outside a hook, or for a dataloader")
        if isinstance(value, Metric) and metric_attribute is None:
            if not any(child is value for child in self._module.modules()):
                raise NotInFastLoop(f"the metric logged as {name!r} is no attribute of the module")
        rule = rule_of(hook, name, logger, on_step, on_epoch, reduce_fx)
        if not rule.reduction or not (rule.on_step or rule.on_epoch):
            raise NotInFastLoop(f"self.log({name!r}) asks for reduce_fx={reduce_fx!r}")
        if (hook, name) in self._entries:
            raise NotInFastLoop(f"self.log({name!r}) is called twice in {hook} with different arguments")
        entry = Entry(**vars(rule), hook=hook, given=given, dtype=wide_dtype())
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
                raise NotInFastLoop(f"the metric logged as {entry.name!r} does not compute a tensor")
            name = entry.step_name if on_step else entry.epoch_name
            if entry.logger:
                logged[name] = value
            if self._training or not on_step:
                callback[entry.name] = callback[name] = value
        return callback, logged


class _Log:
    """The attribute `log` of a module that logs to a collector. A deep copy of the module logs as its class does."""

    def __init__(self, collector: LogCollector) -> None:
        self._collector, self._call = collector, collector.log

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self._collector._module))
        return self if copy is None else MethodType(type(copy).log, copy)
