"""Values of the trainer's arguments that say several things at once: where clients work, what failures mean, what is scored.

    FederatedTrainer(engine=Processes(workers=4), failures=FailurePolicy(on_error="retry"), evaluation=Evaluation(every=5),
                     seed=Seeds(1, participation=2))

Each has a short form: `engine="processes"`, `failures="retry"`, `evaluation=5`, `seed=1`.
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
    Seeds,
    Sequential,
    Vectorized,
)

SHORT_FORMS: dict[str, Callable[[Any], Any]] = {
    "engine": EngineOptions.from_short,
    "failures": FailurePolicy.from_short,
    "evaluation": Evaluation.from_short,
    "seed": Seeds.from_short,
}
"""Argument of the trainer -> what makes its value of a short form."""
FIELDS: dict[str, tuple[type, str]] = {
    "failures": (FailurePolicy, "on_error"),
    "evaluation": (Evaluation, "every"),
    "seed": (Seeds, "run"),
}
"""Argument -> the one class of its values, and the field that its short form is."""

__all__ = [
    "FIELDS",
    "SHORT_FORMS",
    "Auto",
    "EngineOptions",
    "Evaluation",
    "FailurePolicy",
    "Flower",
    "Processes",
    "Ray",
    "Seeds",
    "Sequential",
    "Vectorized",
]
