"""A study: several methods and seeds on the same data, and every number that comparing them needs.

`docs/reference/evaluation.md` says what each number means and where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

from fedlightning.study import clusters as _clusters
from fedlightning.study import curves as _curves
from fedlightning.study import differences as _differences
from fedlightning.study import evidence as _evidence
from fedlightning.study import external as _external
from fedlightning.study import incentives as _incentives
from fedlightning.study import overview as _overview
from fedlightning.study import scores as _architectures
from fedlightning.study import scores as _clients
from fedlightning.study import scores as _scores
from fedlightning.study import scores as _unseen
from fedlightning.study import terms as _terms
from fedlightning.study import timeline as _timeline
from fedlightning.study import token_tables as _tokens
from fedlightning.study.data import StudyData, Table
from fedlightning.study.problems import Problem, find_problems
from fedlightning.study.runs import DEPLOYED, Run

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
        runs: Runs as :func:`fedlightning.study.runs.load_study` returns them.
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
        >>> from fedlightning.scores.metrics import summarise
        >>> from fedlightning.scores.rows import Row
        >>> from fedlightning.study.runs import Run
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

    reference = _table(_evidence.reference)
    negative_transfer = _table(_evidence.negative_transfer)
    results = _table(_scores.results)
    measured = _table(_scores.measured)
    stages = _table(_scores.stages)
    checkpoints = _table(_scores.checkpoints)
    clients = _table(_clients.clients)
    matrix = _table(_clients.matrix)
    partition = _table(_clients.partition)
    unseen = _table(_unseen.unseen)
    external = _table(_external.external)
    calibrations = _table(_external.calibrations)
    subgroups = _table(_external.subgroups)
    architectures = _table(_architectures.architectures)
    clusters = _table(_clusters.clusters)
    memberships = _table(_clusters.memberships)
    timeline = _table(_timeline.timeline)
    tokens = _table(_tokens.tokens)
    ledgers = _table(_tokens.ledgers)
    fairness = _table(_incentives.fairness)
    appeal = _table(_incentives.appeal)
    differences = _table(_differences.differences)
    curves = _table(_curves.curves)
    terms = _table(_terms.terms)
    costs = _table(_curves.costs)
