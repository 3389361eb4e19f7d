"""Is the difference real? Intervals over seeds, ranks over data sets, the Friedman test and its post-hoc distance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """A centre with its confidence interval; ``n`` values, ``low == high`` when they are all equal or only one."""

    centre: float
    low: float
    high: float
    n: int
    method: str

    @property
    def radius(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2


def mean_interval(values: ArrayLike, confidence: float = 0.95, method: str = "t", seed: int = 0) -> Interval:
    r"""Mean over runs with its confidence interval.

    ``"t"``: :math:`t_{(1+c)/2, R-1}\, s / \sqrt{R}` with the sample deviation (R = 5: 2.776 s / 2.236); ``"normal"``:
    1.96 in the place of t; ``"bootstrap"``: percentiles of 1000 seeded resamples of the mean.

    Args:
        values: one number per run; NaN is refused, not averaged away.
        confidence: in (0, 1).
        method, seed: as above.

    Raises:
        ValueError: for no value, a NaN, or an unknown method.
    """
    x = _finite(values)
    centre = float(x.mean())
    if len(x) == 1 or bool((x == x[0]).all()):
        return Interval(centre, centre, centre, len(x), method)
    if method == "bootstrap":
        low, high = _bootstrap(x, np.mean, confidence, seed)
        return Interval(centre, low, high, len(x), method)
    if method not in ("t", "normal"):
        raise ValueError(f"method={method!r} is unknown. Use 't', 'normal' or 'bootstrap'.")
    radius = _quantile(confidence, len(x) - 1 if method == "t" else None) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(centre, centre - radius, centre + radius, len(x), method)


def median_interval(values: ArrayLike, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Median with percentiles of 1000 seeded bootstrap resamples (PLayer-FL); below 5 values the median alone."""
    x = _finite(values)
    centre = float(np.median(x))
    if len(x) < 5:
        return Interval(centre, centre, centre, len(x), "median")
    low, high = _bootstrap(x, np.median, confidence, seed)
    return Interval(centre, low, high, len(x), "median bootstrap")


def paired_difference(
    a: ArrayLike, b: ArrayLike, confidence: float = 0.95, method: str = "t"
) -> tuple[Interval, float]:
    """Mean of ``a - b`` over paired runs with its interval, and the p-value of the paired t-test (1 if all equal).

    Args:
        a, b: one number per run, in the same order.
        confidence, method: of the interval, as in :func:`mean_interval`.

    Raises:
        ValueError: if the two are not of one length.
    """
    x, y = _finite(a), _finite(b)
    if len(x) != len(y):
        raise ValueError(f"Paired runs are needed: {len(x)} values against {len(y)}. Compare runs of the same seeds.")
    difference = x - y
    constant = bool(np.allclose(difference, difference[0], rtol=0, atol=1e-15))
    if len(x) < 2 or constant:
        p = 1.0 if len(x) < 2 or difference[0] == 0 else 0.0
    else:
        p = float(stats.ttest_rel(x, y).pvalue)
    return mean_interval(difference, confidence, method), p


def wilcoxon(a: ArrayLike, b: ArrayLike) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test of paired runs; equal pairs say nothing (1 if all are).

    With n pairs that differ it is at least 2 / 2**n: five seeds cannot reach 0.05.
    """
    difference = _finite(a) - _finite(b)
    return 1.0 if not difference.any() else float(stats.wilcoxon(difference).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for the number of comparisons (Holm 1979): the i-th smallest of m times (m - i + 1), then made
    non-decreasing, at most 1; in the order given.
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
        ranks: mean rank of each algorithm (1 is best).
        statistic, p_value: chi-square form with tie correction; iman_davenport, iman_davenport_p: the F form, less
            conservative (Demšar 2006). critical_difference: Nemenyi distance of mean ranks at ``alpha``.
        datasets: how many rows were ranked.
    """

    ranks: dict[str, float]
    statistic: float
    p_value: float
    iman_davenport: float
    iman_davenport_p: float
    critical_difference: float
    datasets: int


def friedman(scores: Mapping[str, Sequence[float]], higher_is_better: bool = True, alpha: float = 0.05) -> Friedman:
    """Do the algorithms differ over data sets? One list per algorithm, one entry per data set, in the same order.

    (One list per data set would test whether the data sets differ, which is another question.) Ties get mid-ranks.

    Raises:
        ValueError: for fewer than 3 algorithms or 2 data sets, lists of different lengths, or a NaN.
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
    ranks = np.apply_along_axis(stats.rankdata, 0, -table if higher_is_better else table)
    mean_ranks = ranks.mean(axis=1)
    q = float(stats.studentized_range.ppf(1 - alpha, k, np.inf)) / math.sqrt(2)
    distance = q * math.sqrt(k * (k + 1) / (6 * d))
    if bool((ranks == ranks[0]).all()):  # every row is one big tie: 0/0
        statistic, p = 0.0, 1.0
    else:
        result = stats.friedmanchisquare(*table)
        statistic, p = float(result.statistic), float(result.pvalue)
    room = d * (k - 1) - statistic
    f = (d - 1) * statistic / room if room > 1e-12 else math.inf
    f_p = float(stats.f.sf(f, k - 1, (k - 1) * (d - 1))) if math.isfinite(f) else 0.0
    return Friedman(dict(zip(names, mean_ranks.tolist(), strict=True)), statistic, p, f, f_p, distance, d)


def nemenyi(ranks: Mapping[str, float], datasets: int) -> dict[tuple[str, str], float]:
    """Nemenyi's post-hoc test of mean ranks: p-value of every pair (Demšar 2006, section 3.2.2).

    Args:
        ranks: mean rank of each algorithm; datasets: over how many data sets.
    """
    names, k = list(ranks), len(ranks)
    unit = math.sqrt(k * (k + 1) / (6 * datasets))
    return {
        (a, b): float(stats.studentized_range.sf(math.sqrt(2) * abs(ranks[a] - ranks[b]) / unit, k, np.inf))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }


@lru_cache(maxsize=64)
def _quantile(confidence: float, degrees: int | None) -> float:
    """Upper quantile of Student's t, or of the normal distribution; scipy takes longer for one than for a table."""
    tail = (1 + confidence) / 2
    return float(stats.norm.ppf(tail) if degrees is None else stats.t.ppf(tail, degrees))


def _finite(values: ArrayLike) -> np.ndarray:
    x = np.atleast_1d(np.asarray(values, dtype=float))
    if x.size == 0:
        raise ValueError("There is no value to describe.")
    if not bool(np.isfinite(x).all()):
        raise ValueError(
            f"{int((~np.isfinite(x)).sum())} of {x.size} values are NaN or infinite. They are not averaged away."
        )
    return x


def _bootstrap(x: np.ndarray, statistic: object, confidence: float, seed: int) -> tuple[float, float]:
    result = stats.bootstrap(
        (x,),
        statistic,
        n_resamples=1000,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
