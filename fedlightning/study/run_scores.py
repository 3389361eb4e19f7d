"""Scores of one run, with the clients that diverged or have none, and means over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedlightning.scores.metric_names import ACCURACY, ERRORS, SHARES, bare, choose_metric, higher_is_better
from fedlightning.study.columns import LOCAL, PERSONAL
from fedlightning.study.fairness_measures import Spread, spread
from fedlightning.study.finished_runs import DEPLOYED, Run
from fedlightning.study.significance import Interval, crossed_difference, mean_interval, widened

Address = tuple[str, str, str, str, str, str]
"""Model, stage, checkpoint, data, split and metric (without its split) of a row of `summary.json`."""
FIELDS = ("model", "stage", "checkpoint", "data", "split")
"""Keys of a row that make its address, beside its metric."""


@dataclass(frozen=True)
class SeedScore:
    """One row of one run's `summary.json`.

    Attributes:
        seed: Seed of the run.
        row: The row as written.
        diverged: Clients whose model has no finite loss, or no finite error of another kind where no `loss` was logged. None
            of its scores mean anything, so there is no mean.
        undefined: Other clients whose score does not exist (such as AUROC with one class). The mean is that of the others.

    Example:
        >>> row = {"metric": "test_auroc", "weighted_mean": 0.75, "per_client": {"a": 0.5, "b": 1.0, "c": None}}
        >>> SeedScore(0, row, undefined=("c",)).mean, SeedScore(0, row, diverged=("c",)).mean
        (0.75, None)
    """

    seed: int
    row: Mapping[str, Any]
    diverged: tuple[str, ...] = ()
    undefined: tuple[str, ...] = ()

    @cached_property
    def per_client(self) -> dict[str, float | None]:
        """Client -> score, `None` if it diverged or is not defined."""
        return {client: None if client in self.diverged else value for client, value in self.row["per_client"].items()}

    @cached_property
    def defined(self) -> dict[str, float]:
        """Client -> score of the clients that have one."""
        return {client: value for client, value in self.per_client.items() if value is not None}

    @property
    def sound(self) -> bool:
        """Whether statistics over clients may be taken: no client diverged, and at least one has a score."""
        return not self.diverged and bool(self.defined)

    @cached_property
    def spread(self) -> Spread | None:
        """Statistics over clients; `None` if a client diverged."""
        return spread(self.defined, higher_is_better(self.row["metric"])) if self.sound else None

    @property
    def mean(self) -> float | None:
        """Uniform mean over clients; `None` if a client diverged."""
        return None if self.spread is None else self.spread.mean

    @property
    def weighted_mean(self) -> float | None:
        """Mean weighted by the samples that were scored; `None` if a client diverged."""
        value: float | None = self.row["weighted_mean"] if self.sound else None
        return value


class RunScores:
    """The rows of one run's `summary.json`, by their address.

    Args:
        run: A finished run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._rows: dict[Address, Mapping[str, Any]] = {address(row): row for row in run.results}

    def __iter__(self) -> Iterator[SeedScore]:
        return (self._score(row) for row in self._rows.values())

    def metrics(self, split: str) -> list[str]:
        """Return the names of the metrics that were scored on `split`."""
        return list(dict.fromkeys(key[5] for key in self._rows if key[4] == split))

    def get(self, key: Address) -> SeedScore | None:
        """Return the score at an address, or `None`."""
        row = self._rows.get(key)
        return None if row is None else self._score(row)

    def find(
        self,
        metric: str,
        split: str = "test",
        model: str = PERSONAL,
        checkpoint: str = DEPLOYED,
        stage: str | None = None,
        data: str = LOCAL,
    ) -> SeedScore | None:
        """Return the score that :meth:`fedlightning.study.finished_runs.Run.result` chooses; it takes the same arguments."""
        row = self.run.result(metric, split, model, checkpoint, stage, data)
        return None if row is None else self._score(row)

    def _score(self, row: Mapping[str, Any]) -> SeedScore:
        empty = [client for client, value in row["per_client"].items() if value is None]
        where = address(row)[:5]
        losses = [
            row_of_loss for key, row_of_loss in self._rows.items() if key[:5] == where and not higher_is_better(key[5])
        ]
        if not losses and len(empty) == len(row["per_client"]):  # nobody has a score, and no loss tells why
            return SeedScore(self.run.seed, row, tuple(empty))
        loss_rows = [row_of_loss for row_of_loss in losses if bare(row_of_loss["metric"]) == "loss"] or losses
        diverged = tuple(
            client
            for client in row["per_client"]
            if any(row_of_loss["per_client"].get(client, 0.0) is None for row_of_loss in loss_rows)
        )
        return SeedScore(self.run.seed, row, diverged, tuple(client for client in empty if client not in diverged))


def address(row: Mapping[str, Any]) -> Address:
    """Return the address of a row of `summary.json`."""
    model, stage, checkpoint, data, split = (str(row[name]) for name in FIELDS)
    return model, stage, checkpoint, data, split, bare(row["metric"])


def common_metric(runs: Iterable[Run], split: str = "test") -> str:
    """Return the metric to compare runs by if nobody says: see :func:`fedlightning.scores.metric_names.choose_metric`.

    Where one class is much more common than the others, AUROC (of two classes) or balanced accuracy stand for accuracy.
    """
    done = [run for run in runs if run.error is None]
    metrics_by_run = [metrics for run in done if (metrics := RunScores(run).metrics(split))]
    chosen = choose_metric(metrics_by_run)
    if chosen in ACCURACY and (classes := _unbalanced(done)):
        wanted = (*(("auroc",) if classes == 2 else ()), "balanced_accuracy")
        return next((name for name in wanted if all(name in metrics for metrics in metrics_by_run)), chosen)
    return chosen


UNBALANCED = 0.3
"""The commonest class has at least this share of what is left above an equal one: of two classes 65 % of the samples."""


def _unbalanced(runs: Sequence[Run]) -> int:
    """Return the number of classes where one is much more common than others over all clients; 0 if none is."""
    clients = runs[0].summary.get("data", {}).get("clients", {}).values() if runs else ()
    counts = [entry["classes"] for entry in clients if len(entry.get("classes") or ()) > 1]
    if not counts or len({len(row) for row in counts}) > 1:
        return 0
    total = [sum(column) for column in zip(*counts, strict=True)]
    equal = 1 / len(total)
    return len(total) if max(total) >= (equal + UNBALANCED * (1 - equal)) * sum(total) > 0 else 0


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: The mean, or `None` if any seed has no value: missing values are not averaged away.
        ci95: Confidence interval `[low, high]`; `None` for fewer than two seeds.
        n: Number of seeds that have a value.
        cut: Whether the interval ends where the metric does.
    """

    mean: float | None = None
    ci95: list[float] | None = None
    n: int = 0
    cut: bool = False

    @property
    def radius(self) -> float | None:
        """Half the interval's width; `None` also where it was cut at the end of what the metric can be."""
        return None if self.ci95 is None or self.cut else (self.ci95[1] - self.ci95[0]) / 2

    def columns(self, name: str = "mean") -> dict[str, Any]:
        """Return columns of a table: `mean`, `ci95` and `ci95_radius`, or `NAME`, `NAME_ci95` and `NAME_radius`."""
        interval, radius = ("ci95", "ci95_radius") if name == "mean" else (f"{name}_ci95", f"{name}_radius")
        return {name: self.mean, interval: self.ci95, radius: self.radius}


def estimate(
    values: Sequence[float | None],
    confidence: float = 0.95,
    interval: str = "t",
    test_share: float = 0.0,
    metric: str | None = None,
    levels: int = 0,
) -> Estimate:
    """Return the mean over seeds with its confidence interval.

    Args:
        values: One a seed.
        confidence: Of the interval.
        interval: `"t"` or `"bootstrap"`.
        test_share: Samples tested for each trained on, where every seed has another of overlapping splits; else 0.
        metric: What the values are of; the interval ends where it ends (shares and errors).
        levels: Values of each source where the seeds are all numbers of a crossed grid; else 0.

    Example:
        >>> found = estimate([0.70, 0.74, 0.72])
        >>> round(found.mean, 2), round(found.radius, 3), found.n
        (0.72, 0.05, 3)
        >>> estimate([0.70, None]).mean is None
        True
        >>> estimate([1.0, 0.9], metric="accuracy").ci95[1]
        1.0
    """
    scores = [value for value in values if value is not None]
    if not scores or len(scores) < len(values):
        return Estimate(n=len(scores))
    if levels:
        spread, _ = crossed_difference(scores, levels, test_share, confidence)
    elif test_share:
        spread = widened(mean_interval(scores, confidence), test_share)
    else:
        spread = mean_interval(scores, confidence, interval)
    return bounded(spread, bounds(metric, scores), len(scores))


def bounded(interval: Interval, limits: tuple[float, float], n: int) -> Estimate:
    """Return an interval of `n` values that ends where what it is of does; one value has none."""
    ends = [max(interval.low, limits[0]), min(interval.high, limits[1])]
    return Estimate(interval.centre, ends if n > 1 else None, n, ends != [interval.low, interval.high])


def bounds(metric: str | None, values: Sequence[float]) -> tuple[float, float]:
    """Return what a metric can be; a share is one of 1, or of 100 where a value is above 1."""
    name = bare(metric or "")
    if name in SHARES:
        return 0.0, 1.0 if max(values) <= 1 else 100.0
    if name == "agreement":  # an adjusted Rand index
        return -0.5, 1.0
    return (0.0 if name in ERRORS else -math.inf), math.inf


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean over seeds, or `None` if there is no value or one of them is missing.

    Example:
        >>> mean_of([0.5, 1.0]), mean_of([0.5, None])
        (0.75, None)
    """
    scores = [value for value in values if value is not None]
    return sum(scores) / len(scores) if scores and len(scores) == len(values) else None
