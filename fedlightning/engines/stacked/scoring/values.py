"""Limits of a stacked evaluation: what a module may log and read while many clients are scored at once."""

from __future__ import annotations

from typing import Any

from fedlightning.errors import ControlFlow
from fedlightning.visit.log_rules import LogCall, log_call


class NotStacked(ControlFlow):
    """A module does something that one stack cannot do for many clients; the message says what."""


class NoTrainer:
    """Stand-in for `self.trainer` in a stacked evaluation: reading it ends the attempt."""

    def __getattr__(self, name: str) -> Any:
        raise NotStacked(f"self.trainer.{name} is used")


def plain_log(hook: str, name: str, *args: Any, **kwargs: Any) -> LogCall:
    """Return the reading of `self.log(name, value, ...)` in `hook`."""
    call = log_call(hook, name, *args, **kwargs)
    if not call.rule.reduction or call.enable_graph or not call.rule.on_epoch or "/dataloader_idx_" in name:
        raise NotStacked(f"self.log({name!r}) is not a plain value of the epoch")
    if call.batch_size is not None and type(call.batch_size) is not int:
        raise NotStacked(f"self.log({name!r}) gets batch_size={call.batch_size!r}")
    return call
