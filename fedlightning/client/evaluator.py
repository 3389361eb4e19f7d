"""The Trainer that evaluates models, what it collects from modules that log nothing, and Lightning's names of evaluation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from fedlightning.client.trainer_context import ClientLogger
from fedlightning.compat.lightning_runs import quiet

DROPPED = ("strategy", "devices", "num_nodes", "sync_batchnorm", "profiler", "max_epochs", "max_steps")
"""Trainer arguments of the run that evaluation on one device has no use for."""


def make_evaluator(arguments: Mapping[str, Any], losses: StepLosses) -> Trainer:
    """Make a quiet Trainer that evaluates on one device."""
    kept = {key: copy.deepcopy(value) for key, value in arguments.items() if key not in DROPPED}
    with quiet():
        return Trainer(
            **kept | {"use_distributed_sampler": False},
            devices=1,
            logger=ClientLogger(arguments.get("default_root_dir")),  # `self.logger` works in evaluation steps, too
            callbacks=[losses],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def loss_of(outputs: Any) -> Tensor | None:
    """Return the loss in what an evaluation step returned: a single number, or an entry `loss`; `None` if there is none."""
    loss = outputs
    if isinstance(outputs, dict):
        loss = outputs.get("loss", next(iter(outputs.values())) if len(outputs) == 1 else None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


class StepLosses(Callback):
    """Sample-weighted mean of the losses that evaluation steps return, for modules that log nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all losses."""
        self.total, self.count = 0.0, 0

    def result(self) -> dict[str, float]:
        """Return the mean as `loss`; empty if no step returned one."""
        return {"loss": self.total / self.count} if self.count else {}

    def add(self, outputs: Any, batch: Any) -> None:
        """Add the output of one step."""
        loss = loss_of(outputs)
        if loss is not None:
            size = extract_batch_size(batch) or 1
            self.total += float(loss) * size
            self.count += size

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.add(outputs, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.add(outputs, batch)


@dataclass(frozen=True)
class EvaluationNames:
    """Names of validation, or of testing; everything else about the two is the same.

    Attributes:
        step: The module's step.
        hook: The part in the names of hooks, as in `on_validation_start`.
        short: The part in the names of loaders, limits and contexts, as in `limit_val_batches`.
        run: The Trainer's method, and the stage that `setup` and `teardown` are given.
        stage: Lightning's stage while it runs.
    """

    step: str
    hook: str
    short: str
    run: str
    stage: RunningStage

    def limit(self, base: Trainer) -> Any:
        """Return the limit of batches that a Trainer was made with."""
        return getattr(base, f"limit_{self.short}_batches")

    def context(self, precision: Precision) -> Any:
        """Return the function that makes the context (autocast) of a step."""
        return getattr(precision, f"{self.short}_step_context")


VALIDATION = EvaluationNames("validation_step", "validation", "val", "validate", RunningStage.VALIDATING)
TESTING = EvaluationNames("test_step", "test", "test", "test", RunningStage.TESTING)


def names_of(testing: bool) -> EvaluationNames:
    """Return the names of testing, or of validation."""
    return TESTING if testing else VALIDATION
