"""Scores of one run that say what is wrong with them, and their mean over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedlightning.scoring.metrics import bare, higher_is_better
from fedlightning.study.fairness import Spread, spread
from fedlightning.study.runs import DEPLOYED, Run
from fedlightning.study.statistics import mean_interval

Address = tuple[str, str, str, str, str, str]
"""Model, stage, checkpoint, data, split, metric (without its split): what a row of ``summary.json`` is of."""
FIELDS = ("model", "stage", "checkpoint", "data", "split")


@dataclass(frozen=True)
class SeedScore:
    """One row of one run's ``summary.json``.

    Attributes:
        seed: of the run; row: as written.
        diverged: clients whose model has no finite loss here: none of its scores mean anything, and there is no mean.
        undefined: clients whose loss is finite and whose score does not exist (AUROC of one class): the mean is that
            of the others.
    """

    seed: int
    row: Mapping[str, Any]
    diverged: tuple[str, ...] = ()
    undefined: tuple[str, ...] = ()

    @cached_property
    def per_client(self) -> dict[str, float | None]:
        """One score a client; ``None`` where it diverged or is not defined."""
        return {client: None if client in self.diverged else value for client, value in self.row["per_client"].items()}

    @cached_property
    def defined(self) -> dict[str, float]:
        """The clients that have a score."""
        return {client: value for client, value in self.per_client.items() if value is not None}

    @property
    def sound(self) -> bool:
        """Whether statistics over the clients may be taken: no client diverged, at least one has a score."""
        return not self.diverged and bool(self.defined)

    @cached_property
    def spread(self) -> Spread | None:
        """Statistics over clients; ``None`` where a client diverged."""
        return spread(self.defined, higher_is_better(self.row["metric"])) if self.sound else None

    @property
    def mean(self) -> float | None:
        """Uniform mean over clients; ``None`` where a client diverged."""
        return None if self.spread is None else self.spread.mean

    @property
    def weighted_mean(self) -> float | None:
        """Mean weighted by the samples that were scored; ``None`` where a client diverged."""
        value: float | None = self.row["weighted_mean"] if self.sound else None
        return value


class RunScores:
    """The rows of one run's ``summary.json``, by their address."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._rows: dict[Address, Mapping[str, Any]] = {address(row): row for row in run.results}

    def __iter__(self) -> Iterator[SeedScore]:
        return (self._score(row) for row in self._rows.values())

    def metrics(self, split: str) -> list[str]:
        """Names of what was scored on ``split``."""
        return list(dict.fromkeys(key[5] for key in self._rows if key[4] == split))

    def get(self, key: Address) -> SeedScore | None:
        """The row at an address."""
        row = self._rows.get(key)
        return None if row is None else self._score(row)

    def find(
        self,
        metric: str,
        split: str = "test",
        model: str = "personal",
        checkpoint: str = DEPLOYED,
        stage: str | None = None,
        data: str = "local",
    ) -> SeedScore | None:
        """The row that :meth:`fedlightning.study.runs.Run.result` chooses, whose arguments it takes."""
        row = self.run.result(metric, split, model, checkpoint, stage, data)
        return None if row is None else self._score(row)

    def _score(self, row: Mapping[str, Any]) -> SeedScore:
        empty = [client for client, value in row["per_client"].items() if value is None]
        losses = self._rows.get((*address(row)[:5], "loss"), {}).get("per_client")
        if losses is None:  # nothing tells a score that does not exist from a model that is broken
            return SeedScore(self.run.seed, row, tuple(empty))
        diverged = tuple(client for client in row["per_client"] if losses.get(client) is None)
        return SeedScore(self.run.seed, row, diverged, tuple(client for client in empty if client not in diverged))


def address(row: Mapping[str, Any]) -> Address:
    """What a row of ``summary.json`` is of."""
    model, stage, checkpoint, data, split = (str(row[name]) for name in FIELDS)
    return model, stage, checkpoint, data, split, bare(row["metric"])


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: ``None`` if there is no value, or if a seed has none: nothing is averaged away.
        ci95: confidence interval ``[low, high]``; ``None`` for fewer than two seeds.
        n: seeds that have a value.
    """

    mean: float | None = None
    ci95: list[float] | None = None
    n: int = 0

    @property
    def radius(self) -> float | None:
        """Half the interval's width."""
        return None if self.ci95 is None else (self.ci95[1] - self.ci95[0]) / 2


def estimate(values: Sequence[float | None], confidence: float = 0.95, interval: str = "t") -> Estimate:
    """Mean over seeds with its confidence interval.

    Args:
        values: one a seed; ``None`` where that seed's run diverged.
        confidence, interval: see :func:`fedlightning.study.statistics.mean_interval`.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return Estimate(n=len(known))
    found = mean_interval(known, confidence, interval)
    return Estimate(found.centre, [found.low, found.high] if len(known) > 1 else None, len(known))


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean over seeds; ``None`` if there is none, or one of them is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
