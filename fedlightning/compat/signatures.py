"""What a step of a LightningModule wants to be called with, by Lightning's own rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


def takes_index(step: Callable[..., Any]) -> bool:
    """Return True if a `training_step`, `validation_step` or `test_step` wants the batch's index beside the batch."""
    return bool(is_param_in_hook_signature(step, "batch_idx", min_args=2))


def class_takes_index(kind: Any, name: str) -> bool:
    """Return :func:`takes_index` of the method `name` of a class; looked up once per class."""
    return _looked_up(kind, name)


@cache
def _looked_up(kind: Any, name: str) -> bool:
    step = getattr(kind, name)
    return callable(step) and takes_index(step)
