"""Differences between methods, paired over seeds, since the same seed is the same split; the variance by crossed sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, variance
from typing import Any

from fedlightning.study.baselines import test_share
from fedlightning.study.data import StudyData, Table
from fedlightning.study.finished_runs import Run
from fedlightning.study.run_scores import bounded, bounds, mean_of
from fedlightning.study.score_tables import per_client
from fedlightning.study.significance import crossed_difference, holm, paired_difference, resampled_difference, wilcoxon

UNEXPLAINED = "together, and by chance"
"""What sources do not explain alone."""


def differences(study: StudyData, reference: str | None = None) -> Table:
    """Compare every other method with a reference, seed by seed, by the deployed score (mean over clients).

    `p` is of the paired t-test where all seeds test the same samples (it speaks of this test set) or disjoint folds, and of
    the corrected resampled t-test where their test sets overlap, with the test/train ratio of these runs; the interval
    likewise. Of crossed seeds both are of :func:`~fedlightning.study.significance.crossed_difference`.
    `p_clients` is of Wilcoxon's test over the clients' means over seeds: whether other clients like these would gain too.
    """
    if reference == "best" and "best" not in study.methods:
        reference = best_method(study)
    elif reference is None:
        reference = study.baselines.get("siloed") or study.baselines.get("fedavg") or study.methods[0]
    if reference is None:
        return []
    if reference not in study.methods:
        raise ValueError(f"There is no method '{reference}' in this study; it has {', '.join(study.methods)}.")
    lines = [difference(study, method, reference) for method in study.methods if method != reference]
    tested = [line for line in lines if line["p"] is not None]
    for line, adjusted in zip(tested, holm([line["p"] for line in tested]), strict=True):
        line["p_holm"] = adjusted
    return lines


def difference(study: StudyData, method: str, reference: str) -> dict[str, Any]:
    """Return one line of :func:`differences`, not yet adjusted for the number of comparisons."""
    a, b = pairs(study, method, reference)
    line: dict[str, Any] = {"method": method, "reference": reference}
    line |= dict.fromkeys(("mean", "ci95", "ci95_radius", "test", "p", "p_holm", "p_wilcoxon", "p_clients", "better"))
    line |= {"n": len(a), "per_seed": {}}
    x, y = ([float(value) for value in means.values() if value is not None] for means in (a, b))
    if not x or len(x) < len(a):
        return line
    if study.grid_size:
        if len(x) < study.grid_size:
            return line
        gaps = [minuend - other for minuend, other in zip(x, y, strict=True)]
        share = test_share(_runs(study, method, reference, a), study.split) if study.sampling == "splits" else 0.0
        interval, p = crossed_difference(gaps, study.crossed[0], share, study.confidence)
    elif study.sampling == "splits":
        share = test_share(_runs(study, method, reference, a), study.split)
        interval, p = resampled_difference(x, y, share, study.confidence)
    else:
        interval, p = paired_difference(x, y, study.confidence, study.interval)
    low, high = bounds(study.metric, [*x, *y])
    line |= bounded(interval, (low - high, high - low), len(x)).columns()
    line |= {"test": interval.method, "p_clients": _over_clients(study, method, reference)}
    line["per_seed"] = {str(seed): minuend - other for seed, minuend, other in zip(a, x, y, strict=True)}
    line["better"] = interval.centre > 0 if study.higher_is_better else interval.centre < 0
    if len(x) > 1:
        line["p"] = p
        line["p_wilcoxon"] = None if study.grid_size else wilcoxon(x, y)  # it takes independent runs
    return line


def _runs(study: StudyData, method: str, other: str, seeds: Iterable[int]) -> list[Run]:
    return [study.finished[name, seed].run for name in (method, other) for seed in seeds]


def _over_clients(study: StudyData, method: str, reference: str) -> float | None:
    """Return the p-value of Wilcoxon's test over clients, each with its mean over seeds; `None` of fewer than two."""
    means = [per_client(list(study.deployed(name).values())) for name in (method, reference)]
    shared = [client for client, score in means[0].items() if None not in (score, means[1].get(client))]
    if len(shared) < 2:
        return None
    return wilcoxon(*([scores[client] for client in shared] for scores in means))  # type: ignore[arg-type]


def pairs(study: StudyData, method: str, other: str) -> tuple[dict[int, float | None], dict[int, float | None]]:
    """Return the deployed means of two methods, by seed.

    Only seeds that both methods have on the same test data are in it. All means are `None` if a run diverged.
    """
    if not (study.comparable(method) and study.comparable(other)):
        return {}, {}
    a, b = study.deployed(method), study.deployed(other)
    seeds = [seed for seed in a if seed in b]
    if any(score.mean is None for score in (*a.values(), *b.values())):  # also at a seed that the other does not have
        return dict.fromkeys(seeds), dict.fromkeys(seeds)
    return {seed: a[seed].mean for seed in seeds}, {seed: b[seed].mean for seed in seeds}


def best_method(study: StudyData) -> str | None:
    """Return the method with the best deployed mean among those that have the most seeds, or `None`.

    Central training is left out because it moves the data, and so is a method that was tested on other data.
    """
    means, seeds = {}, {}
    for method in study.methods:
        scores = study.deployed(method)
        mean = mean_of([score.mean for score in scores.values()])
        if mean is not None and study.comparable(method) and study.role(method) != "central":
            means[method] = mean if study.higher_is_better else -mean
            seeds[method] = len(scores)
    means = {method: mean for method, mean in means.items() if seeds[method] == max(seeds.values())}
    return max(means, key=lambda name: means[name]) if means else None


def variances(study: StudyData) -> Table:
    """Return one line for each method and source: `std` of the score by it alone, and its `share` of the variance.

    They are the components of a random-effects analysis of variance without interactions, which stand in the last source.
    Methods that lack a run have none.
    """
    levels, sources = study.crossed
    lines: Table = []
    for method in study.methods if sources else ():
        means = {seed: score.mean for seed, score in study.deployed(method, every_seed=True).items()}
        scored = {seed: mean for seed, mean in means.items() if mean is not None}
        if len(scored) == levels ** len(sources):
            parts = _components(scored, levels, sources)
            total = sum(parts.values())
            lines += [
                {"method": method, "source": source, "std": part**0.5, "share": 100 * part / total if total else None}
                for source, part in parts.items()
            ]
    return lines


def _components(values: Mapping[int, float], levels: int, sources: Mapping[int, str]) -> dict[str, float]:
    """Return the components of variance of a full grid of values."""
    each, grand = len(values) // levels, fmean(values.values())
    effects = {
        source: [fmean(v for n, v in values.items() if n // levels**place % levels == digit) for digit in range(levels)]
        for place, source in sources.items()
    }
    rest = sum(
        (v - grand - sum(effects[source][n // levels**place % levels] - grand for place, source in sources.items()))
        ** 2
        for n, v in values.items()
    ) / (len(values) - 1 - len(sources) * (levels - 1))
    parts = {source: max(0.0, variance(means) - rest / each) for source, means in effects.items()}
    return parts | {UNEXPLAINED: rest}
