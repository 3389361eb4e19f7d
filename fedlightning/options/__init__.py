"""Values of the trainer's arguments that say several things at once: where clients work, what failures mean, what is scored.

    FederatedTrainer(engine=Processes(workers=4), failures=FailurePolicy(on_error="retry"), evaluation=Evaluation(every=5))

Each has a short form: `engine="processes"`, `failures="retry"`, `evaluation=5`.
"""

from collections.abc import Callable
from typing import Any

from fedlightning.options.value_objects import (
    Auto,
    EngineOptions,
    Evaluation,
    FailurePolicy,
    Flower,
    Processes,
    Ray,
    Sequential,
    Vectorized,
)

SHORT_FORMS: dict[str, Callable[[Any], Any]] = {
    "engine": EngineOptions.from_short,
    "failures": FailurePolicy.from_short,
    "evaluation": Evaluation.from_short,
}
"""Argument of the trainer -> what makes its value of a short form."""

__all__ = [
    "SHORT_FORMS",
    "Auto",
    "EngineOptions",
    "Evaluation",
    "FailurePolicy",
    "Flower",
    "Processes",
    "Ray",
    "Sequential",
    "Vectorized",
]
