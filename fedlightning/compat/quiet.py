"""Silence for the many short Lightning runs inside a federation: one place that knows what to mute."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero", "lightning")
_HARMLESS = (
    ".*sync_dist=True.*",
    ".*have no `val_dataloader`.*",
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*GPU available but not used.*",
    ".*Trying to infer the `batch_size`.*",
    ".*You are trying to `self.log\\(\\)` but the `self.trainer` reference is not registered.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*no optimizer.*",
    ".*The number of training batches.*",
    ".*Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*",
    ".*The `srun` command is available.*",
    ".*Experiment logs directory .* exists.*",
    ".*in eval mode at the start of training.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",
)

_FILTER = ("ignore", re.compile("|".join(_HARMLESS), re.IGNORECASE), Warning, None, 0)


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block Lightning reports errors only, and warnings that every visit would repeat are dropped."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    # A change of level makes every logger of the program look up its own anew, so those that are quiet stay untouched.
    levels = {logger: logger.level for logger in loggers if logger.level != logging.ERROR}
    _set(dict.fromkeys(levels, logging.ERROR))
    try:
        with without_warnings():
            yield
    finally:
        _set(levels)


def _set(levels: dict[logging.Logger, int]) -> None:
    for logger, level in levels.items():
        logger.level = level
    for logger, level in list(levels.items())[-1:]:
        logger.setLevel(level)  # makes all loggers look up their levels anew: once is enough for several


@contextmanager
def without_warnings() -> Iterator[None]:
    """Within the block warnings that every visit would repeat are dropped. To change a logger's level costs far more."""
    with warnings.catch_warnings():
        warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]  # filterwarnings() would make it anew each time
        yield
