"""Names that Lightning uses for validation and for testing; everything else about the two is the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage


@dataclass(frozen=True)
class EvaluationNames:
    """Names of one kind of evaluation.

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
