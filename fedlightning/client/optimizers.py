"""The optimizers that a module configures."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fedlightning.compat.lightning_runs import quiet
from fedlightning.errors import ConfigurationError
from fedlightning.tensors.modules import optimizers_in


def optimizers_of(module: LightningModule) -> list[Optimizer]:
    """The optimizers a module configures; empty where it needs a running trainer to tell."""
    try:
        made = configured(module)
    except (RuntimeError, AttributeError):  # it needs a trainer, or what `setup` and other hooks of a fit make
        return []
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers fails: {' '.join(str(error).split()).rstrip('.')} "
            f"({type(error).__name__})."
        ) from error
    if made is None and module.automatic_optimization:  # a module that optimizes manually may move its entries itself
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers returns nothing, so nothing would train. Return an optimizer."
        )
    found = optimizers_in(made)
    for optimizer in found:
        for group in optimizer.param_groups:
            for name, value in group.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} of {type(module).__name__} has {name}={value}; it must be finite."
                    )
    return found


def have_memory(module: LightningModule) -> bool | None:
    """Return whether the optimizers carry anything from step to step: momentum, moments, or a schedule of learning rates.

    Only then does it matter whether they are kept from visit to visit. `None`: it cannot be told without a trainer.
    """
    try:
        made = configured(module)
    except Exception:  # it may ask for a trainer in any way; the run itself has worked
        return None
    optimizers = optimizers_in(made)
    if schedulers_in(made):
        return True
    return any(
        type(optimizer) is not SGD or any(group.get("momentum") for group in optimizer.param_groups)
        for optimizer in optimizers
    )


def configured(module: LightningModule) -> Any:
    """Return what `configure_optimizers` gives for a copy of a module, as it is."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(module).configure_optimizers()


def schedulers_in(value: Any) -> list[LRScheduler]:
    """The schedulers of learning rates in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(value, LRScheduler):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [scheduler for item in items for scheduler in schedulers_in(item)]
