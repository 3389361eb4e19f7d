"""What the rows of a task say: differences from the references, and scores at equal rounds, gradients and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlightning.experiments.league.reading import League, LeagueTask
from fedlightning.experiments.league.rows import Row
from fedlightning.study.measures import mean_of
from fedlightning.study.significance import Interval, holm, resampled_difference

BUDGET, ALONE = "FedAvg", "Local"
"""The method whose costs are the equal budget, and the one that a gain is measured from."""
EQUAL = ("rounds", "gradients", "bytes")


@dataclass
class Difference:
    """A method's test score minus that of a reference, over the splits that both have.

    Attributes:
        interval: Mean with its 95 % interval, corrected for overlapping splits.
        p: p-value of the same test.
        p_holm: p-value adjusted for all methods of the task that are compared with this reference.
    """

    interval: Interval
    p: float
    p_holm: float = 1.0


@dataclass
class Standing:
    """The results of a method on a task.

    Attributes:
        method: Its name.
        score: Mean over splits of the mean over clients; `None` if a client diverged.
        scores: The same for each split.
        worst: Mean over splits of the worst client.
        mb: Megabytes sent up and down.
        gain: Gain over Local for each megabyte; `None` where nothing is sent, or Local has no row.
        minus: Reference -> difference.
        equal: `"rounds"`, `"gradients"` and `"bytes"` -> validation score of the models as received, at FedAvg's budget.
    """

    method: str
    score: float | None
    scores: list[float | None]
    worst: float | None
    mb: float
    gain: float | None = None
    minus: dict[str, Difference] = field(default_factory=dict)
    equal: dict[str, float | None] = field(default_factory=dict)


def standings(league: League, task: LeagueTask, rows: Mapping[str, Row]) -> list[Standing]:
    """Return the standings of all methods that have a result on a task, best first; diverged ones come last."""
    runs = {name: row["seeds"] for name in league.methods if "seeds" in (row := rows.get(name, {}))}
    found = {name: _standing(name, of) for name, of in runs.items()}
    alone = found[ALONE].score if ALONE in found else None
    for name, line in found.items():
        if line.mb > 0 and line.score is not None and alone is not None:
            line.gain = (line.score - alone) / line.mb
        if BUDGET in runs:
            line.equal = _equal(runs[name], runs[BUDGET], league.methods[name].gradients)
    for reference in (name for name in league.references if name in runs):
        minus = {name: one for name in runs if name != reference and (one := _minus(runs[name], runs[reference]))}
        for (name, one), p in zip(minus.items(), holm([one.p for one in minus.values()]), strict=True):
            one.p_holm = p
            found[name].minus[reference] = one
    return sorted(found.values(), key=lambda line: (line.score is None, -(line.score or 0.0)))


def _standing(name: str, runs: Mapping[str, Any]) -> Standing:
    scores = [run["score"] for run in runs.values()]
    mb = mean_of([run["mb"] for run in runs.values()])
    return Standing(name, mean_of(scores), scores, mean_of([run["worst"] for run in runs.values()]), mb or 0.0)


def _minus(runs: Mapping[str, Any], reference: Mapping[str, Any]) -> Difference | None:
    """Return a difference; `None` if fewer than two splits are there for both, or one run has no score."""
    seeds = [seed for seed in runs if seed in reference]
    a, b = ([of[seed]["score"] for seed in seeds] for of in (runs, reference))
    if len(seeds) < 2 or None in (*a, *b):
        return None
    share = sum(runs[seed]["test"] / runs[seed]["train"] for seed in seeds) / len(seeds)
    return Difference(*resampled_difference(a, b, share))


def _equal(runs: Mapping[str, Any], budgets: Mapping[str, Any], gradients: float) -> dict[str, float | None]:
    """Return the mean over splits of the last score within the budget's rounds, gradient evaluations and bytes."""
    found: dict[str, list[float | None]] = {name: [] for name in EQUAL}
    for seed in (seed for seed in runs if seed in budgets and budgets[seed]["curve"]):
        budget = budgets[seed]["curve"][-1]
        for place, name in enumerate(EQUAL):
            factor = gradients if name == "gradients" else 1.0
            within = [point for point in runs[seed]["curve"] if factor * point[place] <= budget[place] * (1 + 1e-9)]
            found[name].append(within[-1][3] if within else None)
    return {name: mean_of(values) for name, values in found.items()}


def missing_rows(league: League, task: LeagueTask, rows: Mapping[str, Row]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the methods that have not been run on a task, and those whose row was made with another setting."""
    wanted = [name for name in league.methods if name not in task.without]
    made = [name for name in wanted if name in rows]
    old = [name for name in made if rows[name]["setting"] != league.setting(task, league.methods[name])]
    return [name for name in wanted if name not in rows], old
