"""The meaning of `self.log`: Lightning's rules, once for every loop that stands in for its Trainer.

Three places log: :mod:`~fedlightning.fast.log_sheet` (one client), :mod:`~fedlightning.stacked.logs` (training
of a stack) and :mod:`~fedlightning.stacked.scoring` (evaluation of a stack). All of them read a call by
:func:`log_call` or :func:`rule_of` and keep its value as :func:`scalar`. What they refuse, and when they reduce,
differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Number
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.client.logged_numbers import one_number

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


def log_call(
    hook: str,
    name: str,
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
) -> LogCall:
    """Return the reading of `self.log(name, value, ...)` in `hook`, with the arguments of `LightningModule.log`.

    `prog_bar` changes no value, and on one device neither do the `sync_dist` arguments and `rank_zero_only`.
    """
    return LogCall(rule_of(hook, name, logger, on_step, on_epoch, reduce_fx), batch_size, enable_graph, reduce_fx)


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
