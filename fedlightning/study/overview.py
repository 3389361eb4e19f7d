"""One line a method: is it good, for whom, at what price, and is the difference real?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedlightning.study.differences import best_method, differences
from fedlightning.study.incentives import incentives
from fedlightning.study.measures import mean_of
from fedlightning.study.scores import chosen, local_and_pooled, statistic

if TYPE_CHECKING:
    from fedlightning.study.study import Study

PRICES = {"local_steps": "local_steps_total", "seconds": "seconds", "peak_memory_mb": "peak_memory_mb"}
"""Column -> key of ``summary.json``."""


def overview(study: Study) -> list[dict[str, Any]]:
    """One line a method; means over seeds, of deployed models on test data unless said otherwise.

    - ``method``; ``role``: of a baseline, else ``None``; ``baseline``: added by ``compare``; ``model``, ``checkpoint``,
      ``stage``: what is deployed.
    - ``mean`` (uniform over clients; Acc(L)) with ``ci95`` and ``ci95_radius``; ``weighted_mean``, ``median``, ``std``,
      ``worst``, ``tenth_percentile`` over clients; ``pooled`` (Acc(G): the same models on the union of all test data)
      with ``pooled_ci95``; ``sum`` of both (FLIU); ``global``: the global model on each client's data, with
      ``global_ci95``.
    - ``best``: whether its mean is the best (central training is not asked); ``gap``: mean paired difference to the best
      method over common seeds, with ``gap_ci95``, ``gap_radius``, ``gap_p`` (paired t), ``gap_p_holm``, ``gap_n``.
    - ``ipr``, ``opt_outs`` (percent of clients), ``pma``, ``gma``: see
      :func:`fedlightning.study.incentives.incentives`.
    - ``mb_up``, ``mb_down``, ``mb_total`` (10**6 bytes, all clients and rounds), ``local_steps`` (all clients together),
      ``seconds``, ``peak_memory_mb``.
    - ``n_seeds`` that have a score of ``seeds`` asked for; ``comparable``: on the same test data as the others; ``flags``:
      every problem of this method, in sentences.
    """
    winner = best_method(study)
    gaps = {line["method"]: line for line in differences(study, winner)} if winner is not None else {}
    return [_line(study, method, winner, gaps.get(method, {})) for method in study.methods]


def _line(study: Study, method: str, winner: str | None, gap: dict[str, Any]) -> dict[str, Any]:
    scores = study.deployed(method)
    found = local_and_pooled(study, scores, study.deployed(method, data="pooled"))
    shared = study.estimate([score.mean for score in study.shared(method).values()])
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
        "mean": found["local"],
        "ci95": found["local_ci95"],
        "ci95_radius": found["local_radius"],
        "weighted_mean": mean_of([score.weighted_mean for score in each]),
        **{name: statistic(each, name) for name in ("median", "std", "worst", "tenth_percentile")},
        "pooled": found["pooled"],
        "pooled_ci95": found["pooled_ci95"],
        "sum": found["sum"],
        "global": shared.mean,
        "global_ci95": shared.ci95,
        "best": method == winner,
        "gap": gap.get("mean"),
        "gap_ci95": gap.get("ci95"),
        "gap_radius": gap.get("radius"),
        "gap_p": gap.get("p"),
        "gap_p_holm": gap.get("p_holm"),
        "gap_n": gap.get("n", 0),
        **{name: gains[name] for name in ("ipr", "opt_outs", "pma", "gma", "gma_loss")},
        "mb_up": up,
        "mb_down": down,
        "mb_total": None if up is None or down is None else up + down,
        **{name: _price(runs, key) for name, key in PRICES.items()},
        "n_seeds": sum(score.mean is not None for score in each),
        "seeds": len(study.seeds),
        "comparable": study.comparable(method),
        "flags": [problem.text for problem in study.problems if problem.run == method],
    }


def _price(summaries: list[dict[str, Any]], key: str, unit: float = 1.0) -> float | None:
    """Mean over the runs that recorded it: a price does not depend on whether the model became any good."""
    known = [float(summary[key]) for summary in summaries if summary.get(key) is not None]
    return mean_of([value / unit for value in known])
