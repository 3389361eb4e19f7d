"""Preparation of a stack: the optimizer of a module, its schedules, and the number of clients that fit into memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule

from fedlightning.client.learning_rates import check_schedulers, decaying, scale_learning_rates
from fedlightning.client.requests import LocalSettings
from fedlightning.compat.lightning_runs import attached
from fedlightning.contract import Phase
from fedlightning.stacked.trainees import Recipe
from fedlightning.tensors.entries import optimizers_in

SHARE_OF_MEMORY = 8
"""A stack may use one part in so many of the free memory."""
MOST_CLIENTS = 256
"""Limit of the clients in a stack. More do not make a step cheaper for each client."""


class Clock:
    """Stand-in for `self.trainer` in `configure_optimizers`: the work that a client is going to do.

    Any other attribute of a Lightning Trainer raises `AttributeError`.

    Args:
        epochs: Epochs of the visit. `None` if it is counted in steps.
        steps: Optimizer steps of the visit. `None` if it is counted in epochs.
        batches: Batches in an epoch.

    Attributes:
        looked: Whether an attribute was read. If not, the optimizer is the same for all clients.
    """

    def __init__(self, epochs: int | None, steps: int | None, batches: int) -> None:
        self.looked = False
        self._answers = {
            "max_epochs": -1 if epochs is None else epochs,
            "max_steps": -1 if steps is None else steps,
            "num_training_batches": batches,
            "estimated_stepping_batches": batches * (epochs or 0) if steps is None else steps,
            **dict.fromkeys(("accumulate_grad_batches", "world_size", "num_devices", "num_nodes"), 1),
            **dict.fromkeys(("current_epoch", "global_step", "global_rank", "local_rank", "node_rank"), 0),
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self._answers:
            raise AttributeError(f"self.trainer.{name} is not there when many clients train in one stack")
        self.looked = True
        return self._answers[name]


@contextmanager
def quietly_attached(module: LightningModule, clock: Clock) -> Iterator[None]:
    """Within the block, `clock` is the module's trainer, and warnings are ignored."""
    with attached(module, clock), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def configure(module: LightningModule, settings: LocalSettings, phase: Phase, round: int, clock: Clock) -> Recipe:
    """Return the optimizer and schedulers that a module makes for a client, with the round's decay of learning rates."""
    with quietly_attached(module, clock):
        configured = module.configure_optimizers()
    recipe = Recipe(optimizers_in(configured)[0], schedules_in(configured))
    factor, schedulers = settings.lr_decay**round * phase.lr_factor, [scheduler for scheduler, _, _ in recipe.schedules]
    if (settings.lr_decay, phase.lr_factor) != (1.0, 1.0):
        check_schedulers([recipe.optimizer], schedulers, decaying(settings.lr_decay))
    scale_learning_rates([recipe.optimizer], schedulers, factor)
    return recipe


def schedules_in(configured: Any) -> list[tuple[Any, str, int]]:
    """Return the schedulers in any result of `configure_optimizers`, as (scheduler, interval, frequency)."""
    if isinstance(configured, Mapping):
        return _schedule(configured["lr_scheduler"]) if "lr_scheduler" in configured else []
    if isinstance(configured, list | tuple):
        if len(configured) == 2 and all(isinstance(part, list | tuple) for part in configured):
            return [schedule for item in configured[1] for schedule in _schedule(item)]
        return [schedule for item in configured for schedule in schedules_in(item)]
    return []


def _schedule(item: Any) -> list[tuple[Any, str, int]]:
    if isinstance(item, Mapping):
        return [(item["scheduler"], item.get("interval", "epoch"), int(item.get("frequency", 1)))]
    return [(item, "epoch", 1)]


def chunk_size(bytes_of_client: int, bytes_of_step: int, device: torch.device) -> int:
    """Return the default number of clients that train together: as many as a share of the free memory holds.

    A step costs some 0.5 ms of calls whatever the size of the stack, so larger stacks are cheaper for each client until
    the arithmetic is all that is left.
    """
    room = free_memory(device) // SHARE_OF_MEMORY
    return max(1, min(MOST_CLIENTS, room // max(bytes_of_client + bytes_of_step, 1)))


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device; 4 GiB where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2**32
