"""The overview of a study: score, worst client, costs and significance of each method in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlightning.study.columns import GLOBAL, LOCAL, POOLED
from fedlightning.study.data import StudyData, Table
from fedlightning.study.differences import best_method, differences
from fedlightning.study.incentives import incentives
from fedlightning.study.problems import Problem
from fedlightning.study.run_scores import mean_of
from fedlightning.study.score_tables import chosen, local_and_pooled, statistic

PRICES = {"local_steps": "local_steps_total", "seconds": "seconds", "peak_memory_mb": "peak_memory_mb"}
"""Column -> key of `summary.json`."""


def overview(study: StudyData, problems: Sequence[Problem]) -> Table:
    """Return one line a method: means over seeds, of deployed models on test data unless said otherwise.

    - `method`; `role` of a baseline, else `None`; `baseline`: whether `compare` added it; `model`, `checkpoint` and
      `stage` of the deployed models.
    - `mean` (uniform over clients; Acc(L)) with `ci95` and `ci95_radius`; `weighted_mean`, `median`, `std`, `worst`
      and `tenth_percentile` over clients; `pooled` (Acc(G): the same models on the union of all test data) with
      `pooled_ci95`; `sum` of both (FLIU); `global`: the global model on each client's data, with `global_ci95`.
    - `best`: whether its mean is the best (central training is left out); `gap`: mean paired difference to the best
      method over common seeds, with `gap_ci95`, `gap_radius`, `gap_p`, `gap_p_holm` and `gap_n`.
    - `ipr`, `opt_outs` (percent of clients), `pma`, `gma`: see :func:`fedlightning.study.incentives.incentives`.
    - `mb_up`, `mb_down` and `mb_total` (10**6 bytes, all clients and rounds), `local_steps` (all clients together),
      `seconds`, `peak_memory_mb`.
    - `clients` that have a score (at the seed that has the fewest), of `clients_of`: means are over these.
    - `n_seeds` that have a score, of `seeds` in the study; `comparable`: whether it is on the same test data as the
      others; `flags`: the texts of its problems.
    """
    winner = best_method(study)
    gaps = {line["method"]: line for line in differences(study, winner)} if winner is not None else {}
    return [
        _line(study, method, winner, gaps.get(method, {}))
        | {"flags": [problem.text for problem in problems if problem.run == method]}
        for method in study.methods
    ]


def _line(study: StudyData, method: str, winner: str | None, gap: dict[str, Any]) -> dict[str, Any]:
    scores = study.deployed(method)
    means_of_models = local_and_pooled(study, scores, study.deployed(method, data=POOLED))
    shared = study.estimate([score.mean for score in study.shared(method).values()], study.metric)
    model, checkpoint, stage = chosen(study, method)
    gains = incentives(study, method)
    each = list(scores.values())
    runs = [study.finished[method, seed].run.summary for seed in study.seeds_of(method)]
    up, down = (_price(runs, key, 1e6) for key in ("bytes_up", "bytes_down"))
    return {
        "method": method,
        "role": study.role(method),
        "baseline": any(run.baseline for run in study.runs if run.name == method),
        "model": model,
        "checkpoint": checkpoint,
        "stage": stage,
        "mean": means_of_models[LOCAL],
        "ci95": means_of_models[f"{LOCAL}_ci95"],
        "ci95_radius": means_of_models[f"{LOCAL}_radius"],
        "weighted_mean": mean_of([score.weighted_mean for score in each]),
        **{name: statistic(each, name) for name in ("median", "std", "worst", "tenth_percentile")},
        **{name: means_of_models[name] for name in (POOLED, f"{POOLED}_ci95", "sum")},
        GLOBAL: shared.mean,
        f"{GLOBAL}_ci95": shared.ci95,
        "best": method == winner,
        "gap": gap.get("mean"),
        "gap_ci95": gap.get("ci95"),
        "gap_radius": gap.get("ci95_radius"),
        "gap_p": gap.get("p"),
        "gap_p_holm": gap.get("p_holm"),
        "gap_n": gap.get("n", 0),
        **{name: gains[name] for name in ("ipr", "opt_outs", "pma", "gma", "gma_loss")},
        "mb_up": up,
        "mb_down": down,
        "mb_total": None if up is None or down is None else up + down,
        **{name: _price(runs, key) for name, key in PRICES.items()},
        "clients": min((len(score.defined) for score in each), default=0),
        "clients_of": max((len(score.per_client) for score in each), default=0),
        "n_seeds": sum(score.mean is not None for score in each),
        "seeds": len(study.seeds),
        "comparable": study.comparable(method),
    }


def _price(summaries: list[dict[str, Any]], key: str, unit: float = 1.0) -> float | None:
    """Return the mean over the runs that recorded a cost; diverged runs count, since they cost as much as others."""
    costs = [float(summary[key]) for summary in summaries if summary.get(key) is not None]
    return mean_of([value / unit for value in costs])
