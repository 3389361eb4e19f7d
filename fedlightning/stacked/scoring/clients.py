"""A client's own part in a stacked evaluation: its module's hooks around the epoch, and its metrics."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from fedlightning.client.evaluator import names_of
from fedlightning.client.logged_metrics import nan_where_undefined
from fedlightning.compat.attached import on_device
from fedlightning.fast.eligibility import of_module
from fedlightning.fast.log_sheet import scalar
from fedlightning.stacked.scoring.log_limits import NotStacked, evaluating, plain_log
from fedlightning.stacked.scoring.step import MetricUpdate, Step
from fedlightning.stacked.stack import join_tree

Feed = list[tuple[Step, Sequence[Sequence[Tensor]], int]]
"""A client's steps: each with its outputs, `[output][row]`, and the client's row."""


@dataclass(frozen=True)
class EpochHooks:
    """Hooks around the epoch that a class of modules has.

    Attributes:
        before: Hooks before the first batch.
        after: Hooks after the last batch.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]


def hooks_of(kind: type[LightningModule], testing: bool) -> EpochHooks:
    """Return the hooks around the epoch of a class when it is validated, or tested."""
    name, own = names_of(testing).hook, of_module(kind)
    before, after = (f"on_{name}_start", f"on_{name}_epoch_start"), (f"on_{name}_epoch_end", f"on_{name}_end")
    return EpochHooks(tuple(filter(own.__contains__, before)), tuple(filter(own.__contains__, after)))


def scores_of(
    module: LightningModule,
    hooks: EpochHooks,
    feed: Feed,
    logged: dict[str, float | str],
    own: Collection[str],
    device: torch.device,
) -> dict[str, float]:
    """Return what a client's module has logged at the end of the epoch."""
    noted = _Noted()
    with on_device(module, device), evaluating(module, noted.log), nan_where_undefined(module):
        for hook in hooks.before:
            getattr(module, hook)()
        metrics = _feed(module, feed)
        values = {name: _value(module, value) for name, value in logged.items()}
        for hook in hooks.after:
            noted.hook = hook
            getattr(module, hook)()
        values |= {name: _value(module, value) for name, value in logged.items()}
        for path in own:
            metrics[path].reset()
    return values | noted.values


def _feed(module: LightningModule, feed: Feed) -> dict[str, Metric]:
    metrics: dict[str, Any] = {}
    for step, outputs, row in feed:
        for event in step.events:
            path = event.metric
            if path is None:
                continue
            if path not in metrics:
                metrics[path] = module.get_submodule(path)
            if isinstance(event, MetricUpdate):
                tensors = [output[row] for output in outputs[event.first : event.end]]
                call = metrics[path] if event.forward else metrics[path].update
                if event.positional:
                    call(*tensors)
                else:
                    args, kwargs = join_tree(event.skeleton, tensors)
                    call(*args, **kwargs)
    return metrics


def _value(module: LightningModule, value: float | str) -> float:
    if not isinstance(value, str):
        return value
    computed: Any = module.get_submodule(value).compute()  # type: ignore[operator]
    if not isinstance(computed, Tensor):
        raise NotStacked(f"the metric {value!r} does not compute a tensor")
    return float(computed)


class _Noted:
    """Collects what a module logs in its hooks."""

    def __init__(self) -> None:
        self.hook = ""
        self.values: dict[str, float] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self.hook.endswith("_epoch_end") or name in self.values:
            raise NotStacked(f"self.log({name!r}) is called before the epoch, or twice after it")
        if plain_log(self.hook, name, *args, **kwargs).rule.logger:
            self.values[name] = float(scalar(name, value, NotStacked))
