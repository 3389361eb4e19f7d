"""A module as the trainer sees it that it is attached to: which one, on which device, and what its steps are called with."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


def trainer_of(module: LightningModule) -> Any:
    """The trainer that ``module`` is attached to, or ``None``. Nobody else reads this private attribute.

    The public property raises where there is none.
    """
    return vars(module).get("_trainer")


@contextmanager
def attached(module: LightningModule, trainer: Any) -> Iterator[None]:
    """A block in which ``trainer`` (or what stands in its place, or ``None``) is the module's trainer."""
    before = trainer_of(module)
    module.trainer = trainer
    try:
        yield
    finally:
        module.trainer = before


@contextmanager
def on_device(module: LightningModule, device: torch.device) -> Iterator[None]:
    """A block in which the module is on a device: a step may read ``self.device``."""
    home = module.device
    if home != device:
        module.to(device)
    try:
        yield
    finally:
        if home != device:
            module.to(home)


def detached(module: LightningModule) -> LightningModule:
    """The module itself, without a trainer from now on (to set it takes 5 us, so not where there is none)."""
    if trainer_of(module) is not None:
        module.trainer = None
    return module


def detached_copy(module: LightningModule) -> LightningModule:
    """A deep copy of a module without the trainer it may be attached to, which would be copied along."""
    with attached(module, None):
        return copy.deepcopy(module)


def configure(module: LightningModule, trainer: Callable[[], Any]) -> None:
    """Let a module make its layers, where it does so late; `trainer` gives the one that it sees, if it has none."""
    if is_overridden("configure_model", module):
        with attached(module, trainer_of(module) or trainer()):
            module.configure_model()


def to_device(module: LightningModule, device: torch.device) -> None:
    """Move a module, unless all that it holds is on the CPU and stays there: ``to`` walks over every metric's state."""
    cpu = torch.device("cpu")
    if device == cpu == module.device and all(
        value.device == cpu for value in itertools.chain(module.parameters(), module.buffers())
    ):
        return
    module.to(device)


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
