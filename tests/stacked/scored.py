"""A federation that was trained once and is scored by several engines, for tests of stacked evaluation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fedlightning  # noqa: F401  before lightning

# isort: split

from fedlightning.callbacks import FedAvg
from fedlightning.client.requests import Evaluate
from fedlightning.engines.contract import Engine
from fedlightning.engines.sequential import SequentialEngine
from fedlightning.scores.rows import Row
from fedlightning.server import evaluation as stages
from fedlightning.stacked.vectorized_engine import VectorizedEngine
from tests.helpers import ToyData, federate, samples

SIZES = {"val": (10, 16, 3, 8, 1, 20, 16), "test": (8, 5, 24, 16, 9, 3, 5)}
"""In batches of 8: whole ones, ragged last ones (some of them alike), a single sample."""
TOLERANCE = 1e-6


def unequal_data(val: Sequence[int] = SIZES["val"], test: Sequence[int] = SIZES["test"]) -> ToyData:
    """Clients whose validation and test data differ in size."""
    sizes = enumerate(zip(val, test, strict=False))
    counts = {str(i): {"train": 12, "val": val, "test": test} for i, (val, test) in sizes}
    return ToyData({c: {split: samples(c, split, n) for split, n in count.items()} for c, count in counts.items()})


@dataclass
class Outcome:
    """What an engine made of an evaluation, and how many models it scored one by one."""

    rows: list[Row]
    alone: int


class Federation:
    """A federation that was trained by ``sequential``, to be scored by any engine."""

    def __init__(self, module: Any, callbacks: Sequence[Any] = (), data: Any = None, **options: Any) -> None:
        data = unequal_data() if data is None else data
        self.trainer = federate(module, data, list(callbacks) or [FedAvg()], max_rounds=1, local_epochs=1, **options)
        assert self.trainer.server is not None
        self.server, self.runner, self.store = (
            self.trainer.server,
            self.trainer.federation.engine.runner,
            self.trainer.store,
        )

    def engines(self, size: int = 64) -> tuple[Engine, VectorizedEngine]:
        """One after another, and stacked."""
        return (
            SequentialEngine(self.runner, copy.deepcopy(self.store)),
            VectorizedEngine(self.runner, copy.deepcopy(self.store), size),
        )

    def outcome(self, engine: Engine, evaluate: Evaluate) -> Outcome:
        """Rows of stage G, and of stage L1 without taking anything over from G."""
        scorer, alone = self.runner.scorer, 0
        score = scorer.score

        def counted(*args: Any) -> dict[str, float]:
            nonlocal alone
            alone += 1
            return score(*args)

        scorer.score = counted  # type: ignore[method-assign]
        try:
            rows = stages.score_global_model(self.server, engine, evaluate) + stages.score_received_models(
                self.server, engine, evaluate
            )
        finally:
            del scorer.score
        return Outcome(rows, alone)

    def compare(self, evaluate: Evaluate | None = None, size: int = 64, tolerance: float = TOLERANCE) -> int:
        """Assert that both engines give the same rows; how many models were scored alone when stacked."""
        evaluate = Evaluate(("val", "test")) if evaluate is None else evaluate
        one, stacked = (self.outcome(engine, evaluate) for engine in self.engines(size))
        assert_same(one.rows, stacked.rows, tolerance)
        return stacked.alone


def assert_same(one: list[Row], other: list[Row], tolerance: float = TOLERANCE) -> None:
    """Assert the same rows in the same order, and values that differ by rounding only."""
    assert one
    assert [place(row) for row in one] == [place(row) for row in other]
    expected, found = (torch.tensor([row.value for row in rows]) for rows in (one, other))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def place(row: Row) -> tuple[Any, ...]:
    """All of a row but its value."""
    return tuple(value for name, value in vars(row).items() if name != "value")


def all_of(clients: int) -> range:
    """How many models are scored one by one at stages G and L1 if all are: perhaps two more at each, to compare."""
    return range(2 * clients, 2 * clients + 5)


TRIALS = 8
"""Two modules are scored both ways, for a shared model and for clients' own, in validation and in test."""
