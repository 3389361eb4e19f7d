"""Statistics of comparisons: intervals over seeds, paired tests, Friedman's test over data sets and its post-hoc test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedlightning.study.fairness_measures import ROUNDING


@dataclass(frozen=True)
class Interval:
    """A centre with its confidence interval.

    Attributes:
        centre: Mean or median.
        low: Lower end. It equals `high` if all values are equal, or there is only one.
        high: Upper end.
        n: Number of values.
        method: Name of the method that made the interval.
    """

    centre: float
    low: float
    high: float
    n: int
    method: str

    @property
    def radius(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2


def mean_interval(values: ArrayLike, confidence: float = 0.95, method: str = "t") -> Interval:
    r"""Return the mean over runs with its confidence interval.

    Example:
        >>> found = mean_interval([0.70, 0.72, 0.69, 0.75, 0.74])
        >>> round(found.centre, 3), round(found.low, 3), round(found.high, 3)
        (0.72, 0.688, 0.752)
        >>> round(mean_interval([0.70, 0.72, 0.69, 0.75, 0.74], method="normal").radius, 3)
        0.022
    """
    x = _finite(values)
    centre = float(x.mean())
    if len(x) == 1 or bool((x == x[0]).all()):
        return Interval(centre, centre, centre, len(x), method)
    if method == "bootstrap":
        low, high = _bootstrap(x, confidence)
        return Interval(centre, low, high, len(x), method)
    if method not in ("t", "normal"):
        raise ValueError(f"method={method!r} is unknown. Use 't', 'normal' or 'bootstrap'.")
    radius = _quantile(confidence, len(x) - 1 if method == "t" else None) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(centre, centre - radius, centre + radius, len(x), method)


def paired_difference(
    a: ArrayLike, b: ArrayLike, confidence: float = 0.95, method: str = "t"
) -> tuple[Interval, float]:
    """Return the mean of `a - b` over paired runs with its interval, and the p-value of the paired t-test.

    The p-value is 1 if all pairs are equal.

    Example:
        >>> found, p = paired_difference([0.80, 0.82, 0.81], [0.75, 0.78, 0.75])
        >>> round(found.centre, 3), round(found.radius, 3), round(p, 3)
        (0.05, 0.025, 0.013)
    """
    x, y = _finite(a), _finite(b)
    if len(x) != len(y):
        raise ValueError(f"Paired runs are needed: {len(x)} values against {len(y)}. Compare runs of the same seeds.")
    difference = x - y
    constant = bool(np.allclose(difference, difference[0], rtol=0, atol=1e-15))
    if len(x) < 2 or constant:
        p = 1.0 if len(x) < 2 or difference[0] == 0 else 0.0
    else:
        p = float(_stats().ttest_rel(x, y).pvalue)
    return mean_interval(difference, confidence, method), p


def resampled_difference(
    a: ArrayLike, b: ArrayLike, test_share: float, confidence: float = 0.95
) -> tuple[Interval, float]:
    """Return the mean of `a - b` over runs on overlapping random splits with its interval, and the p-value.

    Splits of the same samples share most of them, so their scores vary together and a paired t-test finds too much. The
    corrected resampled t-test (Nadeau, Bengio, "Inference for the generalization error", Machine Learning 2003) takes
    `1 / n + test_share` times the variance of the differences in place of `1 / n` times. The p-value is 1 if all pairs are
    equal.

    Example:
        >>> found, p = resampled_difference([0.80, 0.82, 0.81], [0.75, 0.78, 0.75], test_share=0.25)
        >>> round(found.centre, 3), round(found.radius, 3), round(p, 3)
        (0.05, 0.033, 0.023)
    """
    narrow, p = paired_difference(a, b, confidence)
    wide = widened(narrow, test_share)
    if narrow.radius == 0:
        return wide, p
    t = abs(narrow.centre) / (wide.radius / _quantile(confidence, narrow.n - 1))
    return wide, 2 * float(_stats().t.sf(t, narrow.n - 1))


def widened(interval: Interval, test_share: float) -> Interval:
    """Return a t interval over runs on overlapping random splits; see :func:`resampled_difference`.

    Example:
        >>> round(widened(mean_interval([0.80, 0.82, 0.81]), test_share=0.25).radius, 4)
        0.0329
    """
    radius = math.sqrt(1 + interval.n * test_share) * interval.radius
    return Interval(interval.centre, interval.centre - radius, interval.centre + radius, interval.n, "resampled t")


def crossed_difference(
    values: ArrayLike, levels: int, test_share: float = 0.0, confidence: float = 0.95
) -> tuple[Interval, float]:
    """Return the mean of values over a full grid of crossed sources with its interval, and the p-value of a mean of 0.

    Runs that share a split, or first weights, vary together, so that of `L` values of each of `k` sources there are not
    `L**k` independent runs. The mean's variance is that of a random-effects analysis of variance without interactions: of all
    sources' mean squares, less `k - 1` times that of the rest, with Satterthwaite's degrees of freedom. With `test_share`,
    splits overlap: see :func:`resampled_difference`.

    Args:
        values: One a run, in the order of the runs' numbers, of which the sources are digits.
        levels: Values of each source.
        test_share: Samples tested for each trained on, where splits are a source; else 0.
        confidence: Of the interval.

    Example:
        >>> found, p = crossed_difference([0.01, 0.02, 0.09, 0.10], levels=2)
        >>> round(found.centre, 3), round(found.radius, 2), round(p, 2)
        (0.055, 0.48, 0.4)
    """
    x = _finite(values)
    sources = round(math.log(len(x), levels))
    grid = x.reshape((levels,) * sources)
    centred = [grid.mean(axis=tuple(set(range(sources)) - {axis})) - x.mean() for axis in range(sources)]
    squares = [len(x) / levels * float((effects**2).sum()) for effects in centred]
    degrees = len(x) - 1 - sources * (levels - 1)
    rest = max(float(((x - x.mean()) ** 2).sum()) - sum(squares), 0.0) / degrees
    parts = [square / (levels - 1) for square in squares]
    less = (sources - 1) * rest
    spread = max(sum(parts) - less, rest)
    uncertain = sum(part**2 for part in parts) / (levels - 1) + less**2 / degrees
    centre, variance = float(x.mean()), spread / len(x) + test_share * float(x.var(ddof=1))
    if variance == 0 or uncertain == 0:
        return Interval(centre, centre, centre, len(x), "crossed t"), float(centre == 0)
    freedom = max(spread**2 / uncertain, 1.0)
    radius = _quantile(confidence, freedom) * math.sqrt(variance)
    p = 2 * float(_stats().t.sf(abs(centre) / math.sqrt(variance), freedom))
    return Interval(centre, centre - radius, centre + radius, len(x), "crossed t"), p


def wilcoxon(a: ArrayLike, b: ArrayLike) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test of paired runs.

    Pairs that are equal, but for rounding, are ignored; the p-value is 1 if all are. With n pairs that differ it is at least
    2 / 2**n, so five seeds cannot reach 0.05.

    Example:
        >>> wilcoxon([0.80, 0.82, 0.85, 0.81, 0.90], [0.75, 0.76, 0.77, 0.78, 0.76])
        0.0625
    """
    x, y = _finite(a), _finite(b)
    difference = np.where(np.isclose(x, y, rtol=ROUNDING, atol=0), 0.0, x - y)
    return _signed_rank(tuple(max(difference.tolist(), (-difference).tolist())))  # of two sides: either sign will do


# Ties are resolved by all signs of ten clients, and every table of a report asks for the same pairs.
@lru_cache(maxsize=4096)
def _signed_rank(differences: tuple[float, ...]) -> float:
    return float(_stats().wilcoxon(differences).pvalue) if any(differences) else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of comparisons (Holm 1979), in the order given.

    The i-th smallest of m is multiplied by (m - i + 1). The results are then made non-decreasing and at most 1.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True)
class Friedman:
    """Average ranks and the Friedman test.

    Attributes:
        ranks: Mean rank of each algorithm (1 is best).
        statistic: Chi-square form of the test, corrected for ties.
        p_value: p-value of `statistic`.
        iman_davenport: F form of the test, which is less conservative (Demšar 2006).
        iman_davenport_p: p-value of `iman_davenport`.
        critical_difference: Nemenyi's distance of mean ranks at `alpha`.
        datasets: Number of data sets that were ranked.
    """

    ranks: dict[str, float]
    statistic: float
    p_value: float
    iman_davenport: float
    iman_davenport_p: float
    critical_difference: float
    datasets: int


def friedman(scores: Mapping[str, Sequence[float]], higher_is_better: bool = True, alpha: float = 0.05) -> Friedman:
    """Test whether algorithms differ over data sets. Ties get mid-ranks.

    Example:
        >>> found = friedman({"local": [0.6, 0.7, 0.5], "fedavg": [0.7, 0.6, 0.6], "apfl": [0.8, 0.9, 0.7]})
        >>> {name: round(rank, 2) for name, rank in found.ranks.items()}
        {'local': 2.67, 'fedavg': 2.33, 'apfl': 1.0}
        >>> round(found.statistic, 2), round(found.p_value, 3), round(found.critical_difference, 2)
        (4.67, 0.097, 1.91)
    """
    names = list(scores)
    lengths = {len(values) for values in scores.values()}
    if len(names) < 3 or lengths == {0} or min(lengths, default=0) < 2 or len(lengths) > 1:
        raise ValueError(
            f"The Friedman test needs at least 3 algorithms with one score for each of at least 2 data sets; got "
            f"{len(names)} algorithms with {sorted(lengths)} scores."
        )
    table = np.array([_finite(scores[name]) for name in names])
    k, d = table.shape
    ranks = np.apply_along_axis(_stats().rankdata, 0, -table if higher_is_better else table)
    mean_ranks = ranks.mean(axis=1)
    q = float(_stats().studentized_range.ppf(1 - alpha, k, np.inf)) / math.sqrt(2)
    distance = q * math.sqrt(k * (k + 1) / (6 * d))
    if bool((ranks == ranks[0]).all()):  # all algorithms tie on every data set, where the statistic is 0/0
        statistic, p = 0.0, 1.0
    else:
        result = _stats().friedmanchisquare(*table)
        statistic, p = float(result.statistic), float(result.pvalue)
    room = d * (k - 1) - statistic
    f = (d - 1) * statistic / room if room > 1e-12 else math.inf
    f_p = float(_stats().f.sf(f, k - 1, (k - 1) * (d - 1))) if math.isfinite(f) else 0.0
    return Friedman(dict(zip(names, mean_ranks.tolist(), strict=True)), statistic, p, f, f_p, distance, d)


def nemenyi(ranks: Mapping[str, float], datasets: int) -> dict[tuple[str, str], float]:
    """Return the p-value of every pair by Nemenyi's post-hoc test of mean ranks (Demšar 2006, section 3.2.2).

    Example:
        >>> found = nemenyi({"local": 2.67, "fedavg": 2.33, "apfl": 1.0}, datasets=3)
        >>> round(found["local", "apfl"], 3), round(found["local", "fedavg"], 3)
        (0.102, 0.909)
    """
    names, k = list(ranks), len(ranks)
    unit = math.sqrt(k * (k + 1) / (6 * datasets))
    return {
        (a, b): float(_stats().studentized_range.sf(math.sqrt(2) * abs(ranks[a] - ranks[b]) / unit, k, np.inf))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }


def _stats() -> Any:
    """Return `scipy.stats`, whose import takes half a second: most who import this module want no statistics of it."""
    from scipy import stats

    return stats


@lru_cache(maxsize=64)
def _quantile(confidence: float, degrees: float | None) -> float:
    """Return the upper quantile of Student's t, or of the normal distribution. Cached, since scipy's take long."""
    tail = (1 + confidence) / 2
    return float(_stats().norm.ppf(tail) if degrees is None else _stats().t.ppf(tail, degrees))


def _finite(values: ArrayLike) -> np.ndarray:
    x = np.atleast_1d(np.asarray(values, dtype=float))
    if x.size == 0:
        raise ValueError("There is no value to describe.")
    if not bool(np.isfinite(x).all()):
        raise ValueError(
            f"{int((~np.isfinite(x)).sum())} of {x.size} values are NaN or infinite. They are not averaged away."
        )
    return x


def _bootstrap(x: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return percentiles of the mean of 1000 seeded resamples."""
    result = _stats().bootstrap(
        (x,), np.mean, n_resamples=1000, confidence_level=confidence, method="percentile", rng=np.random.default_rng(0)
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
