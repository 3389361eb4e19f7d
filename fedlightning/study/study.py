"""A study: several methods and seeds on the same data, and every number that comparing them needs.

`docs/reference/evaluation.md` says what each number means and where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

from fedlightning.study import (
    arrivals,
    cluster_members,
    equal_terms,
    evidence,
    external_validation,
    incentives,
    learning_curves,
    score_tables,
    token_tables,
)
from fedlightning.study import differences as _differences
from fedlightning.study import overview as _overview
from fedlightning.study.data import StudyData, Table
from fedlightning.study.finished_runs import DEPLOYED, Run
from fedlightning.study.problems import Problem, find_problems

__all__ = ["Problem", "Study", "Table"]


P = ParamSpec("P")
T = TypeVar("T")


def _table(table: Callable[Concatenate[StudyData, P], T]) -> Callable[Concatenate[Study, P], T]:
    """Return a function of a study's data as a method of the study."""

    def method(self: Study, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return table(self.data, *args, **kwargs)

    update_wrapper(method, table)
    return method


class Study:
    """Runs of several methods and seeds, with all tables of their comparison.

    Scores of a method are averaged over its seeds. If a run of one seed diverged, there is no mean. A seed that was
    tested on other data than the rest is left out where the method has others. Confidence intervals need two seeds.

    Each table is a function of a study, in the module of its kind.

    Args:
        runs: Runs as :func:`fedlightning.study.finished_runs.load_study` returns them.
        metric: Score to compare, with or without the prefix of its split. `None` takes accuracy if all runs have it (AUROC
            or balanced accuracy where classes are unbalanced), else `rmse`, else `loss`.
        checkpoint: Models to compare. `"deployed"` takes each client's `best_local` model if the run has one, else its
            latest model as received. `"latest"`, `"best_local"` or `"best_global"` take one checkpoint for all.
        confidence: Confidence of intervals; their columns are called `ci95` whatever it is.
        interval: `"t"` (Student) or `"bootstrap"` (percentiles of 1000 seeded resamples).
        split: Split that is compared.

    Attributes:
        data: The runs, and the look-ups that tables are made of: methods, seeds, finished runs.

    Raises:
        ValueError: If there is no run, or no run has the metric or the checkpoint.

    Example:
        >>> from fedlightning.scores.metric_names import summarise
        >>> from fedlightning.scores.rows import Row
        >>> from fedlightning.study.finished_runs import Run
        >>> def run(method, seed, *accuracies):
        ...     rows = [Row(5, "L1", "personal", "latest", "local", "test", f"client{i}", "test_accuracy", value, 10)
        ...             for i, value in enumerate(accuracies)]
        ...     sizes = {row.client: row.num_samples for row in rows}
        ...     return Run(method, seed, None, {"num_samples": sizes, "results": summarise(rows)})
        >>> study = Study([run("local", 0, 0.5, 0.7), run("local", 1, 0.6, 0.6),
        ...                run("apfl", 0, 0.7, 0.9), run("apfl", 1, 0.6, 0.8)])
        >>> [(line["method"], round(line["mean"], 2), line["n_seeds"]) for line in study.overview()]
        [('local', 0.6, 2), ('apfl', 0.75, 2)]
        >>> [(line["client"], round(line["gain"], 2)) for line in study.clients() if line["method"] == "apfl"]
        [('client0', 0.1), ('client1', 0.2)]
    """

    def __init__(
        self,
        runs: Iterable[Run],
        metric: str | None = None,
        checkpoint: str = DEPLOYED,
        confidence: float = 0.95,
        interval: str = "t",
        split: str = "test",
    ) -> None:
        self.data = StudyData(runs, metric, checkpoint, confidence, interval, split)

    @cached_property
    def problems(self) -> list[Problem]:
        """Everything a reader must know before believing the tables."""
        return find_problems(self.data)

    def overview(self) -> Table:
        """Return one line a method; see :func:`fedlightning.study.overview.overview`."""
        return _overview.overview(self.data, self.problems)

    reference = _table(evidence.reference)
    negative_transfer = _table(evidence.negative_transfer)
    results = _table(score_tables.results)
    measured = _table(score_tables.measured)
    stages = _table(score_tables.stages)
    checkpoints = _table(score_tables.checkpoints)
    clients = _table(score_tables.clients)
    matrix = _table(score_tables.matrix)
    partition = _table(score_tables.partition)
    unseen = _table(score_tables.unseen)
    external = _table(external_validation.external)
    calibrations = _table(external_validation.calibrations)
    subgroups = _table(external_validation.subgroups)
    architectures = _table(score_tables.architectures)
    clusters = _table(cluster_members.clusters)
    memberships = _table(cluster_members.memberships)
    timeline = _table(arrivals.timeline)
    tokens = _table(token_tables.tokens)
    ledgers = _table(token_tables.ledgers)
    fairness = _table(incentives.fairness)
    appeal = _table(incentives.appeal)
    differences = _table(_differences.differences)
    curves = _table(learning_curves.curves)
    terms = _table(equal_terms.terms)
    costs = _table(learning_curves.costs)
