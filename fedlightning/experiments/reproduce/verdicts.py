"""The rule of verdicts. It is fixed before a table is run, and the same for all tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedlightning.study.significance import mean_interval

AGREES, DISAGREES, INCONCLUSIVE = "agrees", "disagrees", "inconclusive"
ORDER_AGREES, ORDER_DISAGREES = "order agrees", "order disagrees"
NOT_RUN, NOT_JUDGED = "not run", "not judged"
GOOD = (AGREES, ORDER_AGREES)
BAD = (DISAGREES, ORDER_DISAGREES)
BY_CHANCE = 0.025
"""Largest chance that a cell disagrees although the true mean lies within its tolerance.

The 95 % interval then lies beyond one end of the tolerance only if it misses the true mean on that side: 2.5 %. The same
holds for an order whose true difference is not negative.
"""
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Verdict:
    """A verdict with what it was made from.

    Attributes:
        word: One of the constants above.
        mean: Mean over seeds, of an order that of the differences; `None` without a value.
        low: Lower end of the 95 % interval; `None` if there is none.
        high: Upper end.
        why: What a reader must know beside the word.
    """

    word: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""

    @property
    def random(self) -> bool:
        """Whether chance could have changed it: its interval has a width."""
        return self.word in (*GOOD, *BAD, INCONCLUSIVE) and self.low is not None and self.low != self.high


def judge(
    values: Sequence[float], published: float, tolerance: float, *, exact: bool = False, beyond: bool = False
) -> Verdict:
    """Judge a cell by the values of its seeds.

    It *agrees* if the 95 % interval of the mean over seeds (Student's t) lies inside published ± tolerance, it *disagrees* if
    the interval lies entirely outside, and between it is *inconclusive*. One seed has no interval and is inconclusive, unless
    nothing in the run is random (`exact`): then it is an interval of width zero. A value that is not a number disagrees.

    Args:
        values: A value for each seed.
        published: The published value.
        tolerance: Distance from it that still agrees.
        exact: Whether nothing in the run is random.
        beyond: Whether a value is only a lower bound. Such a cell cannot agree.

    Example:
        >>> judge([0.71, 0.72, 0.70], published=0.70, tolerance=0.05).word
        'agrees'
        >>> judge([0.71], 0.70, 0.05).word, judge([0.71], 0.70, 0.05, exact=True).word, judge([0.7, 0.8], 0.70, 0.05).word
        ('inconclusive', 'agrees', 'inconclusive')
    """
    if any(not math.isfinite(value) for value in values):
        return Verdict(DISAGREES, why="a value is not a finite number: a model diverged")
    found = mean_interval(values)
    if len(values) == 1 and not exact:
        return Verdict(INCONCLUSIVE, found.centre, why="one seed has no interval")
    low, high = published - tolerance - _ROUNDING, published + tolerance + _ROUNDING
    ends = found.centre, found.low, found.high
    if found.low > high or (found.high < low and not beyond):
        return Verdict(DISAGREES, *ends, why="more rounds than the run has" if beyond else "")
    if beyond:
        return Verdict(INCONCLUSIVE, *ends, why="a seed did not reach the target: its value is a lower bound")
    if found.low >= low and found.high <= high:
        return Verdict(AGREES, *ends)
    return Verdict(INCONCLUSIVE, *ends, why="the interval crosses an end of the tolerance: more seeds")


def judge_order(
    better: Sequence[float], worse: Sequence[float], margin: float = 0.0, *, exact: bool = False
) -> Verdict:
    """Judge an order by the differences between two runs, paired by seed.

    The *order agrees* if the 95 % interval of the mean difference (paired, Student's t) lies above `margin`, it *disagrees*
    if it lies below, and between it is *inconclusive*; so is one seed, unless nothing is random.

    Args:
        better: A value for each seed of the run that was published as better, where higher is better.
        worse: Those of the other run, for the same seeds.
        margin: Distance by which the better one must be ahead.
        exact: Whether nothing in the runs is random.

    Example:
        >>> judge_order([0.80, 0.82, 0.81], [0.75, 0.78, 0.75]).word
        'order agrees'
    """
    differences = [a - b for a, b in zip(better, worse, strict=True)]
    if any(not math.isfinite(value) for value in differences):
        return Verdict(ORDER_DISAGREES, why="a value is not a finite number: a model diverged")
    found = mean_interval(differences)
    if len(differences) == 1 and not exact:
        return Verdict(INCONCLUSIVE, found.centre, why="one seed has no interval")
    ends = found.centre, found.low, found.high
    if found.low > margin:
        return Verdict(ORDER_AGREES, *ends)
    if found.high < margin:
        return Verdict(ORDER_DISAGREES, *ends)
    return Verdict(INCONCLUSIVE, *ends, why="the interval of the difference contains the margin: more seeds")


def expected_by_chance(verdicts: Iterable[Verdict]) -> float:
    """Return how many verdicts would be *disagrees* by chance, at most, if every true mean agreed.

    Example:
        >>> expected_by_chance([judge([0.7, 0.7], 0.7, 0.1), judge([0.6, 0.7], 0.7, 0.1)])
        0.025
    """
    return BY_CHANCE * sum(verdict.random for verdict in verdicts)
