"""Why a step fails that was tried before round 1, as a sentence; entered only where one does."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from fedlightning.contract import CallbackList
from fedlightning.datamodules.sampling import preserve_generators
from fedlightning.errors import users_line


def step_failure(
    error: BaseException,
    module: LightningModule,
    split: str,
    client: str,
    loader: DataLoader[Any],
    callbacks: CallbackList,
) -> str:
    """Return what failed, where in the user's code, on what batch, and who has wrapped the module."""
    step = {"train": "training_step", "val": "validation_step", "test": "test_step"}[split]
    if split == "test" and not is_overridden("test_step", module):
        step = "validation_step"
    wrapping = [callback.key for callback in callbacks if callback.claims("wrap_module")]
    ran = step in {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    names_wrappers = len(wrapping) > 1 or (wrapping and not ran)  # of one, the class's name tells
    wrapped = f" The module is wrapped by {' and then '.join(wrapping)}." if names_wrappers else ""
    what = f"{type(module).__name__}.{step}" if ran else f"The {'fit' if split == 'train' else 'evaluation'}"
    text = " ".join(str(error).split()).rstrip(".")
    place = users_line(error)
    shape = f" Its batch: {shapes(loader)}." if ran else ""
    return (
        f"{what} fails for client '{client}' on a batch of {split} data, tried before round 1: {type(error).__name__}: "
        f"{text}{f' ({place})' if place else ''}.{shape}{wrapped}"
    )


def shapes(loader: DataLoader[Any]) -> str:
    """Return the shapes of a loader's first batch in words."""

    def of(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key}: {of(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return (
                "(" + ", ".join(map(of, value)) + ")" if len(value) < 6 else f"{type(value).__name__} of {len(value)}"
            )
        return type(value).__name__

    with preserve_generators(loader.dataset):
        return of(next(iter(loader)))
