"""Metrics that callbacks and schedulers monitor, and the visits that must validate to have them.

A visit does not validate inside training unless something needs it. Whether something does only shows when a module has
logged: a monitored metric that training did not log asks for validation. The visit is then carried out again with
validation on the client's own data, as all that follow are (:func:`~fedlightning.client.visit.carry_out`); a visit has
changed nothing before it ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedlightning.contract import FederatedCallback
from fedlightning.errors import Restart


class Monitor(NamedTuple):
    """A metric that somebody waits for.

    Attributes:
        owner: Class of the callback or scheduler.
        metric: Name of the metric.
    """

    owner: str
    metric: str

    def __str__(self) -> str:
        return f"{self.owner} monitors '{self.metric}'"


class NeedsValidationError(Restart):
    """Asks for a visit with validation.

    Args:
        monitor: The metric that training alone does not give.
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(str(monitor))
        self.monitor = monitor

    def apply(self, runner: Any) -> None:
        """Validate inside visits from now on."""
        runner.validate_visits(self.monitor)


def monitors(trainer: Any) -> Iterator[Monitor]:
    """Yield what the ordinary callbacks and the plateau schedulers of a Trainer (or its stand-in) monitor."""
    for callback in trainer.callbacks:
        name = getattr(callback, "monitor", None)
        if isinstance(name, str) and not isinstance(callback, FederatedCallback):
            yield Monitor(type(callback).__name__, name)
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and isinstance(config.monitor, str):
            yield Monitor(type(config.scheduler).__name__, config.monitor)


def missing(trainer: Any) -> list[Monitor]:
    """Return what is monitored but has not been logged."""
    there = trainer.callback_metrics
    return [monitor for monitor in monitors(trainer) if monitor.metric not in there]


def require(trainer: Any, module: str, validates: bool, error: BaseException | None = None) -> None:
    """Ask for validation, or report a metric that is not there even with it."""
    unmet = [] if trainer is None else missing(trainer)
    unmet = [monitor for monitor in unmet if error is None or monitor.metric in str(error)]
    if not unmet:
        return
    if not validates:
        raise NeedsValidationError(unmet[0]) from error
    names = sorted(trainer.callback_metrics)
    every = trainer.check_val_every_n_epoch or 1
    sentence = f"{unmet[0]}, but {module} logs " + (", ".join(names) if names else "nothing") + " in a visit"
    if 0 < trainer.max_epochs < every:
        sentence += f", which has {trainer.max_epochs} local epoch(s): check_val_every_n_epoch={every} never validates"
    sentence += (
        f". Set monitor to a metric that it logs, or log '{unmet[0].metric}' in training_step or validation_step."
    )
    if error is None:
        warnings.warn(sentence, UserWarning, stacklevel=2)
    else:
        raise ValueError(sentence) from error
