"""What it means that a module logs a value while many clients are scored at once, and what cannot be meant."""

from __future__ import annotations

from typing import Any

from fedlightning.visit.log_rules import LogCall, log_call


class NotStacked(BaseException):
    """A module does what one stack cannot do for many clients; the message says what.

    No `Exception`: `hasattr` and a user's `except` must not swallow it and go on with something else.
    """


class NoTrainer:
    """What is attached as `self.trainer` while many clients are scored at once: looking at it ends that."""

    def __getattr__(self, name: str) -> Any:
        raise NotStacked(f"self.trainer.{name} is used")


def plain_log(hook: str, name: str, *args: Any, **kwargs: Any) -> LogCall:
    """Return the reading of `self.log(name, value, ...)` in `hook`.

    Args:
        hook: Hook of an evaluation.
        name: Name that is logged.
        args: Arguments after the value.
        kwargs: Arguments by name.

    Raises:
        NotStacked: If it is no plain value of the epoch: models that log so are scored one by one.
    """
    call = log_call(hook, name, *args, **kwargs)
    if not call.rule.reduction or call.enable_graph or not call.rule.on_epoch or "/dataloader_idx_" in name:
        raise NotStacked(f"self.log({name!r}) is not a plain value of the epoch")
    if call.batch_size is not None and type(call.batch_size) is not int:
        raise NotStacked(f"self.log({name!r}) gets batch_size={call.batch_size!r}")
    return call
