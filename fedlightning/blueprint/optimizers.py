"""The optimizers that a module configures."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from fedlightning.compat.quiet import quiet
from fedlightning.errors import ConfigurationError


def optimizers_of(module: LightningModule) -> list[Optimizer]:
    """The optimizers a module configures; empty where it needs a running trainer to tell.

    Raises:
        ConfigurationError: if there is none.
    """
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            configured = copy.deepcopy(module).configure_optimizers()
    except RuntimeError:
        return []
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers fails: {' '.join(str(error).split()).rstrip('.')} "
            f"({type(error).__name__})."
        ) from error
    if configured is None:
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers returns nothing, so nothing would train. Return an optimizer."
        )
    found = optimizers_in(configured)
    for optimizer in found:
        for group in optimizer.param_groups:
            for name, value in group.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} of {type(module).__name__} has {name}={value}; it must be finite."
                    )
    return found


def optimizers_in(value: Any) -> list[Optimizer]:
    """The optimizers in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(value, Optimizer):
        return [value]
    if isinstance(value, Mapping):
        return optimizers_in(value.get("optimizer"))
    if isinstance(value, list | tuple):
        return [optimizer for item in value for optimizer in optimizers_in(item)]
    return []
