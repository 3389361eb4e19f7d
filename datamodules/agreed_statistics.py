"""Statistics that clients agree on before round 1: what each gives (sums and counts), and what follows from the totals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

Sums = dict[str, list[float] | dict[str, float]]
"""By name: numbers that are added place by place, or counts that are added word by word."""
BINS = 100
"""Bins between the two ends of a range; one more on each side counts what lies outside."""
_ROUNDING = 8 * 2.0**-52  # a variance that is a smaller share of the mean square is what rounding of the sums leaves


class Open:
    """The columns of a table that are open until statistics are agreed on.

    Args:
        ranges: Column -> ends of its bins, for columns that are scaled by median and interquartile range.
        least: Fewest rows (groups) of a client behind what it gives.
        groups: Group (patient) of each row; `None`: rows are independent.

    Attributes:
        numbers: Column -> its place among the features, and its values, NaN for a gap.
        words: Column -> its first place, the most words of its map, and its cells.
    """

    def __init__(self, ranges: Mapping[str, Sequence[float]], least: int, groups: np.ndarray | None = None) -> None:
        self.ranges, self.least, self.groups = ranges, least, groups
        self.numbers: dict[str, tuple[int, np.ndarray]] = {}
        self.words: dict[str, tuple[int, int, np.ndarray]] = {}

    @property
    def wanted(self) -> dict[str, Any] | None:
        """What is asked of every client in plain values, or `None` if nothing is open."""
        if not (self.numbers or self.words):
            return None
        return {
            "moments": [name for name in self.numbers if name not in self.ranges],
            "bins": {name: [float(end) for end in self.ranges[name]] for name in self.numbers if name in self.ranges},
            "words": {name: most for name, (_, most, _) in self.words.items()},
            "least": self.least,
        }

    def sums(self, rows: np.ndarray) -> Sums:
        """Return what the rows of a client give."""
        groups = np.arange(len(rows)) if self.groups is None else self.groups[rows]
        sums: Sums = {}
        for name, (_, values) in self.numbers.items():
            column = values[rows]
            if len(np.unique(groups[~np.isnan(column)])) < self.least:
                column = column[:0]
            if name in self.ranges:
                sums[f"bins {name}"] = bins_of(column, self.ranges[name], self.least, groups[: len(column)])
            else:
                sums[f"moments {name}"] = moments_of(column, self.least)
        for name, (_, _, cells) in self.words.items():
            sums[f"words {name}"] = words_of(cells[rows].tolist(), groups.tolist(), self.least)
        return sums

    def filled(self, x: Tensor, names: Sequence[str], totals: Mapping[str, Any]) -> tuple[Tensor, list[str]]:
        """Return the features `(samples, features)` and their names, with nothing open any more."""
        x, names = x.clone(), list(names)
        for name, (place, values) in self.numbers.items():
            centre, spread = centre_and_spread(name, totals, self.ranges)
            x[:, place] = torch.from_numpy(np.nan_to_num((values - centre) / spread)).to(x.dtype)
        for name, (place, most, cells) in self.words.items():
            words = chosen_words(totals[f"words {name}"], most)
            for offset, column in enumerate(one_hot(cells, words, most)):
                x[:, place + offset] = torch.from_numpy(column).to(x.dtype)
            names[place : place + len(words)] = [f"{name}={word}" for word in words]
        return x, names


def check_scale(
    name: str, scale: str, ranges: Mapping[str, Sequence[float]], categories: Mapping[str, Sequence[str] | int]
) -> None:
    """Refuse ranges and categories of a data module that mean nothing, and ranges without `scale: federated`."""
    if "federated and" in scale:
        raise ValueError(f"{name} got scale: {scale}; leave one of them out.")
    if ranges and scale != "federated":
        raise ValueError(f"{name} got ranges, whose quantiles scale: federated takes; set that, or leave them out.")
    for column, ends in ranges.items():
        if len(ends) != 2 or not np.isfinite(ends).all() or ends[0] >= ends[1]:
            raise ValueError(f"{name} got the range {list(ends)} of {column!r}; give its two ends, the lower first.")
    for column, words in categories.items():
        few = words < 1 if isinstance(words, int) else not words or len(set(words)) < len(words)
        if few or isinstance(words, str):
            raise ValueError(
                f"{name} got categories {words!r} of {column!r}; give a list of different codes, or how many to agree on."
            )


def standardised(
    values: np.ndarray, seen: Sequence[np.ndarray], rows: Sequence[np.ndarray], moments: Sequence[float] | None = None
) -> np.ndarray:
    """Return a column with every client's values standardised, and gaps filled with the mean.

    Args:
        values: The column, NaN for a gap.
        seen: Rows of each client whose mean and standard deviation are taken.
        rows: All rows of each client.
        moments: Mean and standard deviation of all clients; `None`: each has its own.

    Example:
        >>> values = np.array([1.0, 3.0, np.nan, 50.0])
        >>> standardised(values, [np.array([0, 1])], [np.arange(4)])
        array([-1.,  1.,  0., 48.])
    """
    scaled = np.zeros_like(values)
    for mine, everything in zip(seen, rows, strict=True):
        filled = values[mine][~np.isnan(values[mine])]
        if moments is None and not len(filled):  # nothing is known of the column here
            continue
        mean, deviation = (filled.mean(), spread_of(filled)) if moments is None else moments
        scaled[everything] = np.nan_to_num((values[everything] - mean) / (deviation if deviation > 0 else 1.0))
    return scaled


def spread_of(values: np.ndarray) -> Any:
    """Return the standard deviation of each column `(samples, ...)`; 1 where all values are one.

    numpy's deviation of 0.1, 0.1, 0.1 is 1e-17, by which another value would become 1e16.

    Example:
        >>> float(spread_of(np.array([0.1, 0.1, 0.1]))), float(spread_of(np.array([1.0, 3.0])))
        (1.0, 1.0)
    """
    return np.where(np.ptp(values, axis=0) > 0, values.std(axis=0), 1.0)


def one_hot(cells: np.ndarray, words: Sequence[str], places: int) -> list[np.ndarray]:
    """Return a 0-1 column for each word, zeros up to `places`, and one for all other words; a gap is 0 in all.

    Example:
        >>> [column.tolist() for column in one_hot(np.array(["a", "x", ""]), ["a"], 1)]
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    columns = [(cells == word).astype(np.float64) for word in words]
    columns += [np.zeros(len(cells)) for _ in range(places - len(words))]
    other = (cells != "") & ~np.isin(cells, np.array(list(words), dtype=np.str_))
    return [*columns, other.astype(np.float64)]


def moments_of(values: np.ndarray, least: int) -> list[float]:
    """Return count, sum and sum of squares of the known values, each sum rounded once; zeros for fewer than `least`.

    Example:
        >>> moments_of(np.array([1.0, 2.0, np.nan]), least=2), moments_of(np.array([1.0]), least=2)
        ([2.0, 3.0, 5.0], [0.0, 0.0, 0.0])
    """
    filled = values[~np.isnan(values)]
    if len(filled) < least:
        return [0.0, 0.0, 0.0]
    return [float(len(filled)), math.fsum(filled), math.fsum((filled * filled).tolist())]


def bins_of(values: np.ndarray, ends: Sequence[float], least: int, groups: np.ndarray | None = None) -> list[float]:
    """Return the counts of the bins of a range, first and last those outside; none is of fewer than `least` rows (groups).

    Neighbouring bins are taken together until `least` are in them, and all are counted in the bin of the middle one. So
    the lowest and the highest value do not show, and quantiles are off by the width that so many rows of a client take.

    Args:
        values: The column, NaN for a gap.
        ends: Ends of the range.
        least: Fewest rows, or groups, behind a count.
        groups: Group (patient) of each row; `None`: rows are independent.

    Example:
        >>> counts = bins_of(np.array([-1.0, 0.0, 0.0, 99.5, 100.0]), (0.0, 100.0), least=2)
        >>> len(counts), [(place, count) for place, count in enumerate(counts) if count]
        (102, [(1, 3.0), (100, 2.0)])
    """
    rows = np.argsort(values)[: int((~np.isnan(values)).sum())]  # NaN comes last
    filled, owners = values[rows], rows if groups is None else groups[rows]
    edges = np.linspace(float(ends[0]), float(ends[1]), BINS + 1)
    places = np.searchsorted(edges, filled, side="right")
    counts = np.zeros(BINS + 2)
    if len(np.unique(owners)) < least:
        return counts.tolist()
    start = 0
    while start < len(filled):
        first = np.sort(np.unique(owners[start:], return_index=True)[1])  # where an owner has its first of these rows
        end = start + int(first[least - 1]) + 1
        if end < len(filled):
            end = int(np.searchsorted(places, places[end - 1], side="right"))  # all of a bin go together
        if len(np.unique(owners[end:])) < least:  # those that are left would be too few
            end = len(filled)
        counts[places[(start + end - 1) // 2]] += end - start
        start = end
    return counts.tolist()


def words_of(cells: Iterable[str], groups: Sequence[Any], least: int) -> dict[str, float]:
    """Return how many groups (patients) have each word, for words of at least `least` of them.

    Example:
        >>> words_of(["a", "a", "b", ""], [1, 2, 3, 4], least=2)
        {'a': 2.0}
    """
    counts = Counter(word for word, _ in {(cell, group) for cell, group in zip(cells, groups, strict=True) if cell})
    return {word: float(count) for word, count in sorted(counts.items()) if count >= least}


def mean_and_deviation(total: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation (of the population) from the sums, worked out without rounding in between.

    The sums themselves are rounded, so the deviation's relative error is about 1e-16 times (mean / deviation) squared. A
    deviation that could be rounding alone (below about 4e-8 times the mean) is 0.

    Example:
        >>> mean_and_deviation([4.0, 10.0, 30.0])
        (2.5, 1.118033988749895)
    """
    count, first, second = (Fraction(value) for value in total)
    square = second / count
    variance = square - (first / count) ** 2
    return float(first / count), math.sqrt(float(variance)) if variance > square * Fraction(_ROUNDING) else 0.0


def quantile(counts: Sequence[float], ends: Sequence[float], share: float) -> float:
    """Return a quantile from the counts of bins, linear within a bin: off by at most a bin's width, if it is in the range.

    Example:
        >>> quantile([0.0, *[10.0] * 100, 0.0], (0.0, 100.0), 0.5)
        50.0
    """
    edges = np.linspace(float(ends[0]), float(ends[1]), BINS + 1)
    below = np.concatenate([[0.0], np.cumsum(counts)])
    wanted = share * below[-1]
    place = int(np.clip(np.searchsorted(below, wanted, side="left") - 1, 0, BINS + 1))
    if place in (0, BINS + 1):
        return float(edges[0] if place == 0 else edges[-1])
    inside = (wanted - below[place]) / counts[place] if counts[place] else 0.0
    return float(edges[place - 1] + inside * (edges[place] - edges[place - 1]))


def centre_and_spread(
    name: str, totals: Mapping[str, Any], ranges: Mapping[str, Sequence[float]]
) -> tuple[float, float]:
    """Return what a column is centred by and divided by; 1 instead of a spread of 0."""
    if name in ranges:
        counts = totals[f"bins {name}"]
        low, middle, high = (quantile(counts, ranges[name], share) for share in (0.25, 0.5, 0.75))
        return middle, (high - low) or 1.0
    mean, deviation = mean_and_deviation(totals[f"moments {name}"])
    return mean, deviation or 1.0


def chosen_words(counts: Mapping[str, float], most: int) -> list[str]:
    """Return the words of a map: those that most have, in ascending order.

    Example:
        >>> chosen_words({"c": 7.0, "a": 5.0, "b": 5.0}, most=2)
        ['a', 'c']
    """
    return sorted(sorted(counts, key=lambda word: (-counts[word], word))[:most])
