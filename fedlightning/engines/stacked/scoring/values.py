"""What it means that a module logs a value while many clients are scored at once, and what cannot be meant."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from fedlightning.visit.fast.log import REDUCTIONS, REDUCTIONS_OF, logging_levels, wide_dtype


class NotStacked(BaseException):
    """A module does what one stack cannot do for many clients; the message says what.

    No ``Exception``: ``hasattr`` and a user's ``except`` must not swallow it and go on with something else.
    """


class NoTrainer:
    """What is attached as ``self.trainer`` while many clients are scored at once: looking at it ends that."""

    def __getattr__(self, name: str) -> Any:
        raise NotStacked(f"self.trainer.{name} is used")


@dataclass(frozen=True)
class How:
    """How a value is logged: its reduction over the epoch, and whether it is logged by step as well, and to loggers."""

    reduction: str
    on_step: bool
    logger: bool


@lru_cache(maxsize=1024)
def how(
    hook: str,
    name: str,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Any = "mean",
    enable_graph: bool = False,
    sync_dist: bool = False,
    sync_dist_group: Any = None,
    add_dataloader_idx: bool = True,
    batch_size: int | None = None,
    metric_attribute: str | None = None,
    rank_zero_only: bool = False,
) -> tuple[How, int | None]:
    """The meaning of the arguments of ``self.log(name, value, ...)`` in ``hook``, and the batch size that is given.

    Raises:
        NotStacked: for what is left to the way that scores one client after another.
    """
    on_step, on_epoch = logging_levels(hook, on_step, on_epoch)
    reduction = REDUCTIONS.get(reduce_fx.lower()) if isinstance(reduce_fx, str) else REDUCTIONS_OF.get(reduce_fx)
    if reduction is None or enable_graph or not on_epoch or "/dataloader_idx_" in name:
        raise NotStacked(f"self.log({name!r}) is not a plain value of the epoch")
    if batch_size is not None and type(batch_size) is not int:
        raise NotStacked(f"self.log({name!r}) gets batch_size={batch_size!r}")
    return How(reduction, on_step, logger is not False), batch_size


def scalar(name: str, value: Any) -> Tensor:
    """A logged value in the precision in which it is reduced.

    Raises:
        NotStacked: if it is none.
    """
    if not isinstance(value, Tensor | Number) or (isinstance(value, Tensor) and value.numel() != 1):
        raise NotStacked(f"self.log({name!r}) gets a {type(value).__name__}")
    value = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else wide_dtype()).reshape(())
    return value if value.dtype in (torch.float32, torch.float64) else value.to(wide_dtype())
