"""What is scored, when and on what: the trainer's argument `evaluation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fedlightning.options.base import describe_changed
from fedlightning.ranges import Count, PositiveFloat, Range, at_most_one, check_on_creation

Share = Annotated[
    float, Range("(0, 1]", "A float is a share of the clients, an int a number of them. every=0 scores nobody.")
]


@check_on_creation
@at_most_one("seconds", "every", why="both say when models are scored. Leave one of them out.")
@dataclass(frozen=True)
class Evaluation:
    """When models are scored, which, of whom and on what.

    Args:
        every: Rounds between evaluations on validation data (the last round is always evaluated); 0: never.
        seconds: Virtual seconds between evaluations, instead, where the loop has a clock: scored is the first round
            that begins at a multiple of them or later, and the last one.
        clients: Clients that are scored, on validation and test data, at every stage: a share (float in (0, 1]) or
            a number (int), drawn once with the data module's seed, so they are the same in every round and for all methods
            of a comparison. They train as the others do. Pooled data and held-out clients are not thinned out. Default:
            all of them.
        stages: Stages to evaluate: "G" the server's model, "L1" the model each client holds after receiving, "L2" after
            local training.
        data: "local": each client's own data; "pooled": the union over clients.
        test_data: Data that `test` and `validate` score on (default local and pooled); "clients" adds every client's model
            on every other client's data, the cross-client matrix. Empty: no test, not even of stage L2.

    Example:
        >>> Evaluation.from_short(5) == Evaluation(every=5)
        True
    """

    every: Annotated[int, Range("[0, inf)", "0 switches it off.", strict=True)] = 1
    seconds: PositiveFloat | None = None
    clients: Count | Share | None = None
    stages: Sequence[Literal["G", "L1", "L2"]] = ("G", "L1", "L2")
    data: Sequence[Literal["local", "pooled"]] = ("local",)
    test_data: Sequence[Literal["local", "pooled", "clients"]] | None = None

    __repr__ = describe_changed

    def __post_init__(self) -> None:
        for name in ("stages", "data", "test_data"):  # equal values are equal, whatever kind of list they came in
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(map(str, value))))

    @classmethod
    def from_short(cls, evaluation: Evaluation | int) -> Evaluation:
        """Return the evaluation, given as such or by the rounds between two."""
        return evaluation if isinstance(evaluation, cls) else cls(every=evaluation)  # type: ignore[arg-type]

    @property
    def tested(self) -> tuple[str, ...]:
        """Data that `test` and `validate` score on."""
        return ("local", "pooled") if self.test_data is None else tuple(self.test_data)
