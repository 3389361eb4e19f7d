"""Ranks of methods over data sets: average ranks, Friedman's test, and which pairs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlightning.study.data import StudyData
from fedlightning.study.run_scores import mean_of
from fedlightning.study.significance import friedman, nemenyi
from fedlightning.study.study import Study


def ranks(studies: Mapping[str, Study], alpha: float = 0.05) -> dict[str, Any]:
    """Rank the methods that every data set has by their deployed mean (1 is best, ties share a rank).

    Example:
        >>> from fedlightning.scores.metric_names import summarise
        >>> from fedlightning.scores.rows import Row
        >>> from fedlightning.study.finished_runs import Run
        >>> def run(method, accuracy):
        ...     row = Row(5, "L1", "personal", "latest", "local", "test", "client0", "test_accuracy", accuracy, 10)
        ...     return Run(method, 0, None, {"results": summarise([row])})
        >>> digits = Study([run("local", 0.6), run("fedavg", 0.7), run("apfl", 0.8)])
        >>> heart = Study([run("local", 0.7), run("fedavg", 0.6), run("apfl", 0.9)])
        >>> found = ranks({"digits": digits, "heart": heart})
        >>> found["ranks"], round(found["p_value"], 2), round(found["critical_difference"], 2)
        ({'apfl': 1.0, 'local': 2.5, 'fedavg': 2.5}, 0.22, 2.34)
    """
    each = {name: study.data for name, study in studies.items()}
    metrics = {data.metric for data in each.values()}
    if len(metrics) != 1:
        names = ", ".join(sorted(metrics)) or "none"
        raise ValueError(f"Ranks need studies of one metric; here it is {names}. Build all of them with the same one.")
    left_out: dict[str, str] = {}
    scores: dict[str, list[float]] = {}
    for method in dict.fromkeys(name for data in each.values() for name in data.methods):
        values: list[float] = []
        for name, data in each.items():
            value, why = _score(data, method)
            if value is None:
                left_out.setdefault(method, f"{why} on {name}")
            else:
                values.append(value)
        if method not in left_out:
            scores[method] = values
    good = next(iter(each.values())).higher_is_better
    return _ranked(scores, good, alpha, "data sets", list(each), metrics.pop(), left_out)


def seed_ranks(study: Study, alpha: float = 0.05) -> dict[str, Any]:
    """Rank the methods over the seeds of one study.

    Seeds are not data sets: this says which order the splits agree on, and nothing about other data. Methods that lack a
    seed, or diverged at one, are left out.
    """
    data = study.data
    left_out: dict[str, str] = {}
    scores: dict[str, list[float]] = {}
    for method in data.methods:
        means = {seed: score.mean for seed, score in data.deployed(method).items()}
        scored = [mean for mean in means.values() if mean is not None]
        if not data.comparable(method):
            left_out[method] = "tested on other data"
        elif len(scored) < len(means):
            left_out[method] = "a run diverged"
        elif len(scored) < len(data.seeds):
            left_out[method] = "has no score at every seed"
        else:
            scores[method] = scored
    names = [f"seed {seed}" for seed in data.seeds]
    return _ranked(scores, data.higher_is_better, alpha, "seeds", names, data.metric, left_out)


def _ranked(
    scores: dict[str, list[float]],
    good: bool,
    alpha: float,
    blocks: str,
    names: list[str],
    metric: str,
    left_out: dict[str, str],
) -> dict[str, Any]:
    if len(scores) < 3 or len(names) < 2:
        out = "".join(f" {method}: {why}." for method, why in left_out.items())
        raise ValueError(
            f"Friedman's test needs at least 3 methods on at least 2 {blocks}; here {len(scores)} methods have a score on "
            f"each of {len(names)} {blocks}.{out}"
        )
    test = friedman(scores, good, alpha)
    order = sorted(scores, key=lambda name: test.ranks[name])
    pairwise: dict[str, dict[str, float]] = {name: {} for name in order}
    for (a, b), p in nemenyi(test.ranks, len(names)).items():
        pairwise[a][b] = pairwise[b][a] = p
    return {
        "blocks": blocks,
        "names": names,
        "datasets": len(names),
        "metric": metric,
        "methods": order,
        "scores": {name: scores[name] for name in order},
        "ranks": {name: test.ranks[name] for name in order},
        "statistic": test.statistic,
        "p_value": test.p_value,
        "iman_davenport": test.iman_davenport,
        "iman_davenport_p": test.iman_davenport_p,
        "critical_difference": test.critical_difference,
        "alpha": alpha,
        "pairwise": pairwise,
        "left_out": left_out,
    }


def _score(data: StudyData, method: str) -> tuple[float | None, str]:
    if method not in data.methods:
        return None, "not run"
    if not data.comparable(method):
        return None, "tested on other data"
    return mean_of([score.mean for score in data.deployed(method).values()]), "no score, or a run that diverged,"
