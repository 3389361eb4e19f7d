"""The loader that a plain Trainer is about to train on: the one place that looks at Lightning's private source of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer


def replaced_train_loader(trainer: Trainer, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Let a fit that starts train on `change(loader)`. A callback has no public way to do so.

    Args:
        trainer: The Trainer, in `on_fit_start`, before it asks for the loader.
        change: Function of the loader.

    Returns:
        What undoes it after the fit.
    """
    source = trainer.fit_loop._data_source
    if not source.is_module():
        before, source.instance = source.instance, change(source.instance)
        return lambda: setattr(source, "instance", before)
    owner, name = source.instance, source.name
    method = getattr(owner, name)
    own = vars(owner).get(name)
    setattr(owner, name, lambda: change(method()))
    return lambda: delattr(owner, name) if own is None else setattr(owner, name, own)
