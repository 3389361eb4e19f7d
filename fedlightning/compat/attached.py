"""A module and the trainer it is attached to: the one place that looks at Lightning's private attribute for it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule


def trainer_of(module: LightningModule) -> Any:
    """The trainer that ``module`` is attached to, or ``None``; the public property raises where there is none."""
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


def to_device(module: LightningModule, device: torch.device) -> None:
    """Move a module, unless all that it holds is on the CPU and stays there: ``to`` walks over every metric's state."""
    cpu = torch.device("cpu")
    if device == cpu == module.device and all(
        value.device == cpu for value in itertools.chain(module.parameters(), module.buffers())
    ):
        return
    module.to(device)
