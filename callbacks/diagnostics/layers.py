"""Analysis of tables of layers: where the transition is, how stable it is, and what sensitivity correlates with.

The tables are what `LayerDiagnostics` writes (`read_layers(run)`). Several runs, for example of several seeds, are a
mapping from a name to a table. Every result is a list of plain rows, so that it can be shown beside its figure
(`fedlightning.callbacks.diagnostics.layer_figures`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from fedlightning.callbacks.diagnostics.layer_values import ALL, LayerRow, read_layers
from fedlightning.callbacks.diagnostics.sensitivity_terms import Sensitivity

Runs = Mapping[str, Sequence[LayerRow]]
COMPANIONS = ("grad_var_samples_per_parameter", "grad_var_params", "hessian_trace_per_parameter", "cka")
"""Quantities to compare federation sensitivity with. It is a mean over parameters, so sums are taken per parameter."""


def transition(values: Sequence[float], threshold: float, num_parameters: Sequence[int] | None = None) -> int:
    """Return how many layers PLayer-FL's rule federates, see `Sensitivity.transition`.

    Example:
        >>> transition([1.0, 0.25, 2.5], threshold=2.0)
        2
    """
    return _sensitivity([str(k) for k in range(len(values))], values, num_parameters).transition(threshold)


def sensitivities(
    rows: Iterable[LayerRow], quantity: str = "sensitivity_online", stage: str = "L2", client: str = ALL
) -> dict[int, Sensitivity]:
    """Return the sensitivity by round.

    Example:
        >>> values = {"body": 1.0, "head": 3.0}
        >>> rows = [LayerRow(1, "L2", ALL, k, n, "sensitivity_online", v) for k, (n, v) in enumerate(values.items(), 1)]
        >>> sensitivities(rows)[1].ratios
        [4.0]
    """
    values: dict[int, dict[str, float]] = {}
    counts: dict[int, dict[str, int]] = {}
    for row in sorted(rows, key=lambda row: row.layer_index):
        if row.stage == stage and row.client == client and row.quantity == quantity:
            values.setdefault(row.round, {})[row.layer] = row.value
        elif row.stage == stage and row.client == ALL and row.quantity == "num_parameters":
            counts.setdefault(row.round, {})[row.layer] = int(row.value)
    return {
        number: _sensitivity(list(layers), list(layers.values()), [counts.get(number, {}).get(la, 1) for la in layers])
        for number, layers in sorted(values.items())
    }


def ratio_rows(runs: Runs, quantity: str = "sensitivity_online", stage: str = "L2") -> list[dict[str, Any]]:
    """Return the ratio curve `F_{l+1} / F_l` of every run and round.

    Example:
        >>> values = {"body": 1.0, "head": 3.0}
        >>> rows = [LayerRow(1, "L2", ALL, k, n, "sensitivity_online", v) for k, (n, v) in enumerate(values.items(), 1)]
        >>> ratio_rows({"seed 0": rows})
        [{'run': 'seed 0', 'round': 1, 'layer_index': 1, 'layer': 'body', 'next': 'head', 'ratio': 4.0}]
    """
    return [
        {"run": run, "round": number, "layer_index": index, "layer": layer, "next": two, "ratio": ratio}
        for run, rows in runs.items()
        for number, sensitivity in sensitivities(rows, quantity, stage).items()
        for index, (layer, two, ratio) in enumerate(
            zip(sensitivity.layers[:-1], sensitivity.layers[1:], sensitivity.ratios, strict=True), start=1
        )
    ]


def transition_curve(
    runs: Runs, thresholds: Iterable[float], quantity: str = "sensitivity_online", stage: str = "L2"
) -> list[dict[str, Any]]:
    """Return p(t) of every run and round at the given thresholds.

    Example:
        >>> values = {"body": 1.0, "head": 3.0}
        >>> rows = [LayerRow(1, "L2", ALL, k, n, "sensitivity_online", v) for k, (n, v) in enumerate(values.items(), 1)]
        >>> [(row["threshold"], row["p"]) for row in transition_curve({"seed 0": rows}, [2.0, 5.0])]
        [(2.0, 1), (5.0, 2)]
    """
    grid = list(thresholds)
    return [
        {"run": run, "round": number, "threshold": t, "p": (p := curve.transition(t)), "layer": curve.layers[p - 1]}
        for run, rows in runs.items()
        for number, curve in sensitivities(rows, quantity, stage).items()
        for t in grid
    ]


def transition_ranges(runs: Runs, quantity: str = "sensitivity_online", stage: str = "L2") -> list[dict[str, Any]]:
    """Return p(t) of every run and round exactly.

    Example:
        >>> values = {"body": 1.0, "head": 3.0}
        >>> rows = [LayerRow(1, "L2", ALL, k, n, "sensitivity_online", v) for k, (n, v) in enumerate(values.items(), 1)]
        >>> [(row["p"], row["low"], row["high"]) for row in transition_ranges({"seed 0": rows})]
        [(1, 1.0, 4.0), (2, 4.0, inf)]
    """
    return [
        {"run": run, "round": number, "p": p, "layer": sensitivity.layers[p - 1], "low": low, "high": high}
        for run, rows in runs.items()
        for number, sensitivity in sensitivities(rows, quantity, stage).items()
        for p, low, high in _steps(sensitivity)
    ]


def common_range(ranges: Iterable[Mapping[str, Any]], p: int) -> tuple[float, float] | None:
    """Return the thresholds `low <= t < high` that give `p` in every run and round; `None` if there are none.

    Example:
        >>> lows = {"seed 0": 1.5, "seed 1": 2.0}
        >>> common_range([{"run": run, "round": 1, "p": 2, "low": low, "high": 5.0} for run, low in lows.items()], p=2)
        (2.0, 5.0)
    """
    ranges = list(ranges)
    chosen = [row for row in ranges if row["p"] == p]
    if not chosen or {(r["run"], r["round"]) for r in chosen} < {(r["run"], r["round"]) for r in ranges}:
        return None
    low, high = max(row["low"] for row in chosen), min(row["high"] for row in chosen)
    return (low, high) if low < high else None


def _steps(sensitivity: Sensitivity) -> list[tuple[int, float, float]]:
    """The steps of p(t): p can only change where t passes a ratio."""
    edges = [1.0, *sorted({ratio for ratio in sensitivity.ratios if 1 < ratio < math.inf}), math.inf]
    steps: list[tuple[int, float, float]] = []
    for low, high in itertools.pairwise(edges):
        p = sensitivity.transition(low if low > 1 else math.nextafter(1.0, 2.0))
        if steps and steps[-1][0] == p:
            steps[-1] = (p, steps[-1][1], high)
        else:
            steps.append((p, low, high))
    return steps


def _sensitivity(layers: list[str], values: Sequence[float], counts: Sequence[int] | None) -> Sensitivity:
    return Sensitivity(layers, list(counts) if counts is not None else [1] * len(layers), list(values))


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rank correlation over the layers, as a mean over groups with its interval.

    Attributes:
        a: The first quantity.
        b: The second quantity.
        rho: Mean over the groups.
        low: Lower bootstrap percentile of that mean.
        high: Upper bootstrap percentile of that mean.
        groups: Number of groups (run, round, client).
        runs: Number of runs that they come from.
        positive: Share of groups with a positive correlation.
        left_out: Number of groups in which it is not defined (fewer than 3 layers, or all values equal).
    """

    a: str
    b: str
    rho: float
    low: float
    high: float
    groups: int
    runs: int
    positive: float
    left_out: int


def rank_correlation(
    runs: Runs,
    a: str,
    b: str,
    *,
    stage: str = "L2",
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    unit: Literal["group", "run"] = "group",
) -> RankCorrelation:
    """Measure how far two quantities order the layers alike.

    In each group (run, round, client) Spearman's correlation over the layers is taken; then its mean over the groups,
    with percentiles over seeded resamples. Groups of one run are not independent: `unit="run"` resamples whole runs and
    is the careful interval where there are several.

    Example:
        >>> values = {"cka": (0.9, 0.5, 0.1), "hessian_trace": (1.0, 2.0, 8.0)}
        >>> rows = [LayerRow(1, "L2", "0", k, f"l{k}", q, v) for q, vs in values.items() for k, v in enumerate(vs, 1)]
        >>> round(rank_correlation({"seed 0": rows}, "cka", "hessian_trace").rho, 6)
        -1.0
    """
    if unit not in ("group", "run"):
        raise ValueError(f"unit={unit!r} is unknown. Use 'group' or 'run'.")
    by_run: dict[str, list[float]] = {}
    left_out = 0
    for run, rows in runs.items():
        for pairs in _groups(rows, a, b, stage):
            rho = _spearman(pairs)
            if math.isfinite(rho):
                by_run.setdefault(run, []).append(rho)
            else:
                left_out += 1
    values = [np.array(rhos) for rhos in by_run.values()]
    if not values:
        raise ValueError(
            f"No group (run, round, client) has '{a}' and '{b}' in 3 layers or more at stage {stage}. "
            f"There are: {', '.join(sorted({row.quantity for rows in runs.values() for row in rows})) or 'no rows'}."
        )
    everything = np.concatenate(values)
    blocks = values if unit == "run" else [everything[i : i + 1] for i in range(len(everything))]
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(blocks), size=(resamples, len(blocks)))
    sums, sizes = np.array([block.sum() for block in blocks]), np.array([len(block) for block in blocks])
    means = sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    rho, positive = float(everything.mean()), float((everything > 0).mean())
    return RankCorrelation(a, b, rho, float(low), float(high), len(everything), len(values), positive, left_out)


def correlation_rows(
    runs: Runs, a: str = "sensitivity_online", others: Sequence[str] = COMPANIONS, **options: Any
) -> list[dict[str, Any]]:
    """Return :func:`rank_correlation` of `a` with each of `others` that is in the tables, as rows.

    Example:
        >>> values = {"sensitivity_online": (1.0, 2.0, 3.0), "cka": (0.9, 0.5, 0.1)}
        >>> rows = [LayerRow(1, "L2", "0", k, f"l{k}", q, v) for q, vs in values.items() for k, v in enumerate(vs, 1)]
        >>> [(row["b"], round(row["rho"], 6)) for row in correlation_rows({"seed 0": rows}, resamples=10)]
        [('cka', -1.0)]
    """
    quantities = {row.quantity for rows in runs.values() for row in rows if row.client != ALL}
    return [asdict(rank_correlation(runs, a, b, **options)) for b in others if b in quantities]


def _groups(rows: Iterable[LayerRow], a: str, b: str, stage: str) -> list[list[tuple[float, float]]]:
    """Per (round, client) the pairs of values of the layers that have both."""
    groups: dict[tuple[int, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.stage == stage and row.client != ALL and row.quantity in (a, b):
            groups.setdefault((row.round, row.client), {}).setdefault(row.layer, {})[row.quantity] = row.value
    return [[(both[a], both[b]) for both in layers.values() if a in both and b in both] for layers in groups.values()]


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if len(finite) < 3:
        return math.nan
    x, y = (stats.rankdata(values) for values in zip(*finite, strict=True))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


__all__ = [
    "ALL",
    "COMPANIONS",
    "LayerRow",
    "RankCorrelation",
    "common_range",
    "correlation_rows",
    "rank_correlation",
    "ratio_rows",
    "read_layers",
    "sensitivities",
    "transition",
    "transition_curve",
    "transition_ranges",
]
