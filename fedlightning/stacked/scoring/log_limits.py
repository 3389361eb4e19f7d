"""Limits of a stacked evaluation: what a module may log and read while many clients are scored at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from fedlightning.compat.attached import attached
from fedlightning.errors import ControlFlow
from fedlightning.fast.log_sheet import LogCall, log_call


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
        for own, mode in modes:  # not by __setattr__, which is slow in a torchmetrics object
            own["training"] = mode


def plain_log(hook: str, name: str, *args: Any, **kwargs: Any) -> LogCall:
    """Return the reading of `self.log(name, value, ...)` in `hook`."""
    call = log_call(hook, name, *args, **kwargs)
    if not call.rule.reduction or call.enable_graph or not call.rule.on_epoch or "/dataloader_idx_" in name:
        raise NotStacked(f"self.log({name!r}) is not a plain value of the epoch")
    if call.batch_size is not None and type(call.batch_size) is not int:
        raise NotStacked(f"self.log({name!r}) gets batch_size={call.batch_size!r}")
    return call
