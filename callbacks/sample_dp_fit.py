"""What SampleDP asks of a fit: how many steps it will take, what it is addressed by, and whose records are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule

from fedlightning.algorithm import Client, isolated, probes
from fedlightning.callbacks.sample_dp_checks import NO_GROUPS
from fedlightning.callbacks.shared.poisson_batches import PoissonBatches
from fedlightning.callbacks.shared.record_gradients import refuse_mixed_records

FEW = 4
"""Records with which a module is tried."""


def add_to(digest: Any, value: Any) -> None:
    """Add a tree of tensors and plain values to a hash; of other objects their class, which is the same in each process."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(f"|{name}=".encode())
            add_to(digest, value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            add_to(digest, one)
    elif isinstance(value, torch.Tensor):
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        digest.update(f"|{value!r}".encode())
    else:
        digest.update(f"|{type(value).__qualname__}".encode())


def planned_steps(trainer: Any, sampler: PoissonBatches) -> int:
    """Return the optimizer steps of a fit.

    Raises:
        ValueError: If nobody knows.
    """
    batches, done = min(int(trainer.num_training_batches), len(sampler)), int(trainer.global_step)
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        return max(int(trainer.max_steps) - done, 0)
    if trainer.max_epochs is None or trainer.max_epochs < 0:
        raise ValueError("SampleDP has to know how long training goes on. Give the Trainer max_epochs or max_steps.")
    return max(int(trainer.max_epochs) * batches - done, 0)


def try_records(module: LightningModule, trainer: Any, owner: str) -> None:
    """Try a few records of a loader, together and each by itself.

    Raises:
        ValueError: If they are mixed on the way to their gradients.
    """
    loader, convert = trainer.train_dataloader, trainer.precision_plugin.convert_input
    with isolated(0, owner):
        few = [loader.dataset[place] for place in range(min(FEW, len(loader.dataset)))]
    batches = []
    for records in (few, *([one] for one in few[: FEW - 1])):
        with isolated(0, owner, "batch"):
            batches.append(probes.move_batch(module, convert(loader.collate_fn(records))))
    refuse_mixed_records(module, batches[0], owner, alone=batches[1:])


def patients_of(client: Client) -> np.ndarray:
    """Return the group of each of a client's training samples.

    Raises:
        ValueError: If nobody knows, of one sample or of all.
    """
    groups = client.sample_groups
    if groups is None:
        raise ValueError(NO_GROUPS)
    missing = sum(name is None or name != name for name in groups.tolist())
    if missing:
        raise ValueError(
            f"Of {missing} training samples of client '{client.id}' nobody knows whose they are, and "
            "SampleDP(unit='patient') covers patients. Name their groups, or leave them out."
        )
    return groups
