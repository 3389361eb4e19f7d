"""What SampleDP asks of a fit: how many steps it will take, what it is addressed by, and settings that it cannot cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule

from fedlightning.algorithm import Client
from fedlightning.callbacks.shared.ledger import Steps
from fedlightning.callbacks.shared.poisson_batches import PoissonBatches


def add_to(digest: Any, value: Any) -> None:
    """Add what came from the server to a hash: another message has other batches."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(f"|{name}=".encode())
            add_to(digest, value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            add_to(digest, one)
    elif isinstance(value, torch.Tensor):
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(f"|{value!r}".encode())


def added(history: Steps, steps: Sequence[float]) -> list[list[float]]:
    """Return a history with more steps; those of one noise and rate are counted together."""
    counted = {(float(noise), float(rate)): int(count) for noise, rate, count in history}
    noise, rate, count = steps
    counted[noise, rate] = counted.get((noise, rate), 0) + int(count)
    return [[noise, rate, count] for (noise, rate), count in counted.items()]


def visit_of(client: Client, steps: Sequence[float]) -> list[list[float]]:
    """Return the steps of this visit so far, this fit's too."""
    client.scratch["private steps"] = added(client.scratch.get("private steps", []), steps)
    found: list[list[float]] = client.scratch["private steps"]
    return found


def planned_steps(trainer: Any, sampler: PoissonBatches) -> int:
    """Return the optimizer steps of a fit.

    Raises:
        ValueError: If nobody knows.
    """
    batches = min(int(trainer.num_training_batches), len(sampler))
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        return int(trainer.max_steps)
    if trainer.max_epochs is None or trainer.max_epochs < 0:
        raise ValueError("SampleDP has to know how long training goes on. Give the Trainer max_epochs or max_steps.")
    return int(trainer.max_epochs) * batches


def refuse_trainer(module: LightningModule, argument: Any, optimizers: int) -> None:
    """Refuse settings with which a step is not one gradient of one batch.

    Raises:
        ValueError: With the setting.
    """
    if argument("accumulate_grad_batches", 1) not in (None, 1):
        raise ValueError(
            "SampleDP clips and covers every batch by itself: use accumulate_grad_batches=1 and larger batches."
        )
    if "16" in str(argument("precision", "32")) and "bf16" not in str(argument("precision", "32")):
        raise ValueError(
            "SampleDP cannot clip gradients that a scaler has scaled: use precision='bf16-mixed' or '32-true'."
        )
    if not module.automatic_optimization or optimizers > 1:
        raise ValueError(
            f"SampleDP makes the step of one optimizer, and {type(module).__name__} optimizes in another way."
        )
