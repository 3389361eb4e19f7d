"""What a module logs, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.wrappers import user_class


class NotOneNumberError(ValueError):
    """A module logs under a name what is no single number."""

    WAY_OUT = "Log its mean, or a number for each class (torchmetrics.ClasswiseWrapper)"


def one_number(name: str, value: Any, owner: LightningModule | None) -> Any:
    """Return a logged value if it is a single number.

    Raises:
        NotOneNumberError: With its name and its shape.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        module = "The module" if owner is None else user_class(owner).__name__
        raise NotOneNumberError(
            f"{module} logs '{name}' as a tensor of shape {tuple(value.shape)}, and what is logged is one number. "
            f"{NotOneNumberError.WAY_OUT}"
        )
    return value


def numbers(logged: Mapping[str, Any], owner: LightningModule) -> dict[str, float]:
    """Return logged values as plain numbers."""
    return {name: float(one_number(name, value, owner)) for name, value in logged.items()}
