"""A table that was run: the rule of verdicts, every cell and order with its values and verdict, and how these are written.

The rule is fixed before a table is run, and the same for all tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedlightning.experiments.methods import Method
from fedlightning.experiments.reproduce.measures import NoValueError, Spec, Value, better_is_higher, measure
from fedlightning.experiments.reproduce.published_tables import ALL, ERROR, WHOLE, Cell, Order, Table
from fedlightning.study.finished_runs import Run, load_run
from fedlightning.study.significance import mean_interval

AGREES, DISAGREES, INCONCLUSIVE = "agrees", "disagrees", "inconclusive"
ORDER_AGREES, ORDER_DISAGREES = "order agrees", "order disagrees"
NOT_RUN, NOT_JUDGED = "not run", "not judged"
SEVERAL = {AGREES: "agree", DISAGREES: "disagree", ORDER_AGREES: "orders agree", ORDER_DISAGREES: "orders disagree"}
"""Verdicts as they are counted, where there are several."""
GOOD = (AGREES, ORDER_AGREES)
BAD = (DISAGREES, ORDER_DISAGREES)
_ROUNDING = 1e-12
_UNREACHED = "a seed did not reach the target: its value is a bound"


@dataclass(frozen=True)
class Verdict:
    """A verdict with what it was made from.

    Attributes:
        word: One of the constants above.
        mean: Mean over seeds, of an order that of the differences; `None` without a value.
        low: Lower end of the interval; `None` if there is none.
        high: Upper end.
        why: What a reader must know beside the word.
        confidence: Confidence of the interval: 0.95, or more where a table is looked at more than once.
    """

    word: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""
    confidence: float = 1 - ERROR

    @property
    def random(self) -> bool:
        """Whether chance could have changed it: its interval has a width."""
        return self.word in (*GOOD, *BAD, INCONCLUSIVE) and self.low is not None and self.low != self.high


def judge(
    values: Sequence[float],
    published: float,
    tolerance: float,
    *,
    exact: bool = False,
    beyond: bool = False,
    below: bool = False,
    confidence: float = 1 - ERROR,
) -> Verdict:
    """Judge a cell by the values of its seeds.

    It *agrees* if the interval of the mean over seeds (Student's t) lies inside published ± tolerance, it *disagrees* if
    the interval lies entirely outside, and between it is *inconclusive*. One seed has no interval and is inconclusive, unless
    nothing in the run is random (`exact`): then it is an interval of width zero. A value that is not a number disagrees.

    Args:
        values: A value for each seed.
        published: The published value.
        tolerance: Distance from it that still agrees.
        exact: Whether nothing in the run is random.
        beyond: Whether a value is only a lower bound. Such a cell cannot agree.
        below: Whether one is only an upper bound.
        confidence: Confidence of the interval.

    Example:
        >>> judge([0.71, 0.72, 0.70], published=0.70, tolerance=0.05).word
        'agrees'
        >>> judge([0.71], 0.70, 0.05).word, judge([0.71], 0.70, 0.05, exact=True).word, judge([0.7, 0.8], 0.70, 0.05).word
        ('inconclusive', 'agrees', 'inconclusive')
    """
    if any(not math.isfinite(value) for value in values):
        return Verdict(DISAGREES, why="a value is not a finite number: a model diverged")
    interval = mean_interval(values, confidence)
    if len(values) == 1 and not exact:
        return Verdict(INCONCLUSIVE, interval.centre, why="one seed has no interval")
    low, high = published - tolerance - _ROUNDING, published + tolerance + _ROUNDING
    verdict = partial(Verdict, mean=interval.centre, low=interval.low, high=interval.high, confidence=confidence)
    if (interval.low > high and not below) or (interval.high < low and not beyond):
        return verdict(DISAGREES, why="more rounds than the run has" if beyond else "")
    if beyond or below:
        return verdict(INCONCLUSIVE, why=_UNREACHED)
    if interval.low >= low and interval.high <= high:
        return verdict(AGREES)
    return verdict(INCONCLUSIVE, why="the interval crosses an end of the tolerance: more seeds")


def judge_order(
    better: Sequence[float],
    worse: Sequence[float],
    margin: float = 0.0,
    *,
    exact: bool = False,
    beyond: bool = False,
    below: bool = False,
    confidence: float = 1 - ERROR,
) -> Verdict:
    """Judge an order by the differences between two runs, paired by seed.

    The *order agrees* if the interval of the mean difference (paired, Student's t) lies above `margin`, it *disagrees*
    if it lies below, and between it is *inconclusive*; so is one seed, unless nothing is random.

    Args:
        better: A value for each seed of the run that was published as better, where higher is better.
        worse: Those of the other run, for the same seeds.
        margin: Distance by which the better one must be ahead.
        exact: Whether nothing in the runs is random.
        beyond: Whether a difference is only a lower bound. Such an order cannot disagree.
        below: Whether one is only an upper bound. Such an order cannot agree.
        confidence: Confidence of the interval.

    Example:
        >>> judge_order([0.80, 0.82, 0.81], [0.75, 0.78, 0.75]).word
        'order agrees'
    """
    differences = [a - b for a, b in zip(better, worse, strict=True)]
    if any(not math.isfinite(value) for value in differences):
        return Verdict(ORDER_DISAGREES, why="a value is not a finite number: a model diverged")
    interval = mean_interval(differences, confidence)
    if len(differences) == 1 and not exact:
        return Verdict(INCONCLUSIVE, interval.centre, why="one seed has no interval")
    verdict = partial(Verdict, mean=interval.centre, low=interval.low, high=interval.high, confidence=confidence)
    if interval.low > margin and not below:
        return verdict(ORDER_AGREES)
    if interval.high < margin and not beyond:
        return verdict(ORDER_DISAGREES)
    if beyond or below:
        return verdict(INCONCLUSIVE, why=_UNREACHED)
    return verdict(INCONCLUSIVE, why="the interval of the difference contains the margin: more seeds")


# -- lines of a table --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    """A cell or an order with what was found.

    Attributes:
        name: Its name in the table.
        verdict: Its verdict.
        values: Seed -> value; of an order, the difference between its runs.
        published: The published value; `None` for an order.
        tolerance: Distance that agrees; for an order, the margin.
        failed: Whether it has no value because a run failed.
        why: Why it disagrees, from the table.
        row: Row of a cell.
        column: Column of a cell.
        asked: Whether its runs were asked for; those of another set were not.
        looks: Numbers of seeds that it is judged at.
    """

    name: str
    verdict: Verdict
    values: Mapping[int, float] = field(default_factory=dict)
    published: float | None = None
    tolerance: float = 0.0
    failed: bool = False
    why: str = ""
    row: str = ""
    column: str = ""
    asked: bool = True
    looks: Sequence[int] = ()

    @property
    def is_order(self) -> bool:
        """Whether it is an order."""
        return self.published is None

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        fields = asdict(self)
        del fields["looks"]  # those of the table's plan
        verdict = fields.pop("verdict")
        values = {str(seed): value for seed, value in fields.pop("values").items()}
        return {**fields, "verdict": verdict.pop("word"), "note": verdict.pop("why"), **verdict, "values": values}


NO_UPDATE = "no client could contribute"
"""Part of the error of a run that no client's update could continue."""


@dataclass(frozen=True)
class Place:
    """Where the run of a table with one seed lies, or why there is none.

    Attributes:
        folder: Its folder; `None` without a run.
        why: Why there is none.
        failed: Whether it was tried.
        asked: Whether it was asked for.
    """

    folder: str | None
    why: str = ""
    failed: bool = False
    asked: bool = True

    @property
    def diverged(self) -> bool:
        """Whether training itself ended the run: what all clients sent was refused, as NaN or far too large."""
        return self.failed and NO_UPDATE in self.why


def _first(missing: Sequence[Place]) -> Place:
    """Return the place to tell of: one that failed, else one that was asked for, else any."""
    return max(missing, key=lambda place: (place.failed, place.asked))


@dataclass
class TableRun:
    """A table that is run again: what was asked for, what is made, and what was found.

    Attributes:
        table: The table.
        runs: Names of the runs that were asked for.
        seeds: Seeds of each.
        obstacle: Why nothing can be run here; empty: it can.
        methods: Name of a run -> its complete configuration.
        lines: Its cells and orders with their verdicts.
    """

    table: Table
    runs: Sequence[str]
    seeds: Sequence[int]
    obstacle: str = ""
    methods: Mapping[str, Method] = field(default_factory=dict)
    lines: Sequence[Line] = ()


Places = Mapping[str, Mapping[int, Place]]
"""Name of a run -> seed -> its place."""


def measure_table(table: Table, places: Places, seeds: Sequence[int], obstacle: str = "") -> list[Line]:
    """Return all cells and orders of a table with their verdicts. It may import torch: call it in a child process."""
    measurer = _Measurer(table, places, seeds, obstacle)
    return [*map(measurer.cell, table.cells), *map(measurer.order, table.orders)]


def measure_tables(asked: Sequence[tuple[Table, Places, Sequence[int], str]]) -> list[list[Line]]:
    """Return for each table what :func:`measure_table` returns of it."""
    return [measure_table(*arguments) for arguments in asked]


@dataclass(frozen=True)
class _Measurer:
    table: Table
    places: Places
    seeds: Sequence[int]
    obstacle: str
    loaded: dict[str, Run] = field(default_factory=dict)

    def cell(self, cell: Cell) -> Line:
        published = {"published": cell.published, "tolerance": cell.tolerance, "row": cell.row, "column": cell.column}
        line: partial[Line] = partial(Line, cell.name, looks=self.table.looks, **published)  # type: ignore[arg-type]
        values = self._values(cell.run, cell.measure)
        if isinstance(values, Place):
            word = DISAGREES if values.diverged and not cell.because else NOT_RUN
            return line(Verdict(word, why=values.why), failed=values.failed, asked=values.asked)
        numbers = {seed: value.number for seed, value in values.items()}
        bounds = {name: any(getattr(value, name) for value in values.values()) for name in ("beyond", "below")}
        exact = self.table.exact or cell.run is None
        seen, confidence = list(numbers.values()), self.table.confidence
        verdict = judge(seen, cell.published, cell.tolerance, exact=exact, confidence=confidence, **bounds)
        return line(_withhold(cell.because, verdict), numbers, why=self.table.reason(cell))

    def order(self, order: Order) -> Line:
        sides, missing, beyond, below = [], [], False, False
        for run, spec, factor in zip((order.better, order.worse), order.measures, (1.0, order.factor), strict=True):
            values = self._values(run, spec)
            if isinstance(values, Place):
                missing.append((run, values))
                continue
            sign = 1.0 if better_is_higher(spec) else -1.0
            sides.append({seed: sign * factor * value.number for seed, value in values.items()})
            for value in values.values():  # the worse side, and one of which lower is better, bound the other way round
                turned = (sign < 0) != (bool(sides[1:]))
                beyond |= value.below if turned else value.beyond
                below |= value.beyond if turned else value.below
        if missing:
            place = _first([place for _, place in missing])
            lost = any(place.diverged for run, place in missing if run == order.better)
            judged = not order.because and all(place.asked for _, place in missing)
            verdict = Verdict(ORDER_DISAGREES if lost and judged else NOT_RUN, why=place.why)
            return Line(order.name, verdict, tolerance=order.margin, failed=place.failed, asked=place.asked)
        better, worse = sides
        pair = list(better.values()), list(worse.values())
        rule = partial(judge_order, exact=self.table.exact, confidence=self.table.confidence)
        verdict = rule(*pair, order.margin, beyond=beyond, below=below)
        differences = {seed: better[seed] - worse[seed] for seed in better}
        why = self.table.why.get(WHOLE, "")
        return Line(order.name, _withhold(order.because, verdict), differences, tolerance=order.margin, why=why)

    def _values(self, run: str | None, spec: Spec) -> dict[int, Value] | Place:
        """Return seed -> value, or the place that has none."""
        if self.obstacle:
            return Place(None, self.obstacle)
        if run is None:
            return {0: measure(spec, {}, None)}
        values, absent = {}, partial(Place, None, asked=False)
        needs = {
            (name, seed): self.places.get(name, {}).get(seed, absent(f"run {name} was not asked for"))
            for seed in self.seeds
            for name in (run, *spec.runs)
        }
        if missing := [place for place in needs.values() if place.folder is None]:
            return _first(missing)
        for seed in self.seeds:
            runs = {name: self._run(str(needs[name, seed].folder), name) for name in (run, *spec.runs)}
            try:
                values[seed] = measure(spec, runs, run)
            except (NoValueError, IndexError) as error:
                return Place(None, f"run {run}, seed {seed}: {error}", failed=True)
        return values

    def _run(self, folder: str, name: str) -> Run:
        if folder not in self.loaded:
            self.loaded[folder] = load_run(Path(folder), name)
        return self.loaded[folder]


def _withhold(because: str, verdict: Verdict) -> Verdict:
    """Return a verdict, or that there is none if something speaks against judging."""
    return replace(verdict, word=NOT_JUDGED, why=because) if because else verdict


# -- as they are written -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Chance:
    """How many verdicts of random runs are wrong by chance, at most, with independent seeds.

    Attributes:
        verdicts: Verdicts that rest on intervals with a width.
        disagree: How many would say *disagrees*, if every true mean lay within its tolerance.
        agree: How many would say *agrees*, if none did.
    """

    verdicts: int = 0
    disagree: float = 0.0
    agree: float = 0.0

    def __str__(self) -> str:
        """Return both numbers in a sentence."""
        if not self.verdicts:
            return "No verdict rests on a random run, so none is wrong by chance."
        return (
            f"{self.verdicts} verdicts rest on random runs. By chance alone at most {self.disagree:.2g} of them would be "
            f"'disagrees' if every true mean lay within its tolerance, and at most {self.agree:.2g} 'agrees' if none did "
            "(seeds are taken as independent)."
        )


def expected_by_chance(lines: Iterable[Line]) -> Chance:
    """Return how many verdicts chance alone would turn, at most."""
    pairs = [wrong_by_chance(line) for line in lines if line.verdict.random]
    return Chance(len(pairs), sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))


def wrong_by_chance(line: Line) -> tuple[float, float]:
    """Return the largest chances that a line disagrees although its true mean agrees, and that it agrees although not.

    With the true mean at one end of the tolerance, the interval lies beyond that end with 2.5 %, and beyond the other end
    with less: with almost as much where the tolerance is small beside the standard error. That part is the non-central t
    distribution's, with the standard deviation that the seeds have; an earlier look has a larger error. An order has one end.
    Several looks share the 2.5 %.
    """
    side = ERROR / 2
    n, verdict = len(line.values), line.verdict
    if line.is_order or n < 2 or verdict.low is None or verdict.high is None:
        return side, side
    from scipy.stats import nct, t  # here: it costs half a second

    at = (1 + verdict.confidence) / 2
    deviation = (verdict.high - verdict.low) / 2 / float(t.ppf(at, n - 1)) * math.sqrt(n)
    planned = [*line.looks, *[n] * (round(ERROR / (1 - verdict.confidence)) - len(line.looks))]
    beyond = sum(  # the lower tail, where `cdf` ends in NaN
        float(nct.sf(t.ppf(at, look - 1), look - 1, -2 * line.tolerance * math.sqrt(look) / deviation))
        for look in planned
        if look > 1
    )
    return side + beyond, side


def digits(line: Line) -> int:
    """Return decimals that show the published value and the tolerance.

    Example:
        >>> digits(Line("a", judge([0.7], 0.724, 0.03), published=0.724, tolerance=0.03))
        4
    """
    shown_numbers = [number for number in (line.published, line.tolerance) if number]
    shown = max((len(f"{abs(number):.10f}".rstrip("0").partition(".")[2]) for number in shown_numbers), default=2)
    return min(shown + 1, 8)


def number_of(value: float | None, places: int) -> str:
    """Write a number with as many decimals, or more briefly if it is large."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    return f"{value:.{places}f}".rstrip("0").rstrip(".") if abs(value) < 1e6 else f"{value:.4g}"


def ours(line: Line) -> str:
    """Write the mean over seeds with its interval."""
    verdict, places = line.verdict, digits(line) if line.published is not None else 4
    if verdict.mean is None:
        return "-"
    text = f"{verdict.mean:.{places}f}"
    if verdict.low is not None and verdict.high is not None and verdict.low != verdict.high:
        text += f" [{verdict.low:.{places}f}, {verdict.high:.{places}f}]"
    return text


def list_headings(orders: bool) -> dict[str, str]:
    """Return the titles of the columns of cells, or of orders, by the keys of :func:`row_of`."""
    titles = {"name": "cell", "published": "published", "ours": "ours", "verdict": "verdict"}
    return {"name": "order", "ours": "difference", "verdict": "verdict"} if orders else titles


def row_of(line: Line) -> dict[str, str]:
    """Return a cell or an order in words: its name, the published value with the tolerance, ours, and the verdict."""
    places = digits(line)
    published = "" if line.is_order else f"{number_of(line.published, places)} ± {number_of(line.tolerance, places)}"
    return {"name": line.name, "published": published, "ours": ours(line), "verdict": line.verdict.word}


def reasons(lines: Sequence[Line]) -> list[str]:
    """Return why verdicts are what they are, each reason once, with the cells that it is about."""
    names_by_reason: dict[str, list[str]] = {}
    for line in lines:
        reason = line.why if line.verdict.word in (*BAD, INCONCLUSIVE) else ""
        for text in filter(None, (line.verdict.why, reason)):
            names_by_reason.setdefault(text, []).append(line.name)
    return [f"{'all' if len(names) == len(lines) else _few(names)}: {text}" for text, names in names_by_reason.items()]


def _few(names: Sequence[str]) -> str:
    return "; ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def left_out(lines: Sequence[Line]) -> list[str]:
    """Return a sentence on the lines that need runs of another set; none, if there are none."""
    number = sum(not line.asked for line in lines)
    return (
        [f"{number} more {'need' if number > 1 else 'needs'} runs of other sets than was asked for."] if number else []
    )


def times(table: Table) -> str:
    """Return the sets of a table with their expected minutes, and those of all runs if they are others."""
    minutes_by_set = dict.fromkeys(table.sets) | dict(table.minutes)
    if len(minutes_by_set) > 1 and minutes_by_set.get(ALL) == next(iter(minutes_by_set.values())):
        minutes_by_set.pop(ALL)
    return ", ".join(name if minutes is None else f"{name}: {minutes:g}" for name, minutes in minutes_by_set.items())


def sentence_of_plan(table: Table) -> str:
    """Return when verdicts of a table are made, and with which intervals."""
    if len(table.looks) == 1:
        return f"One look, at {table.looks[0]} seeds, with 95 % intervals."
    numbers = ", ".join(map(str, table.looks))
    text = f"Looks at {numbers} seeds, each with {100 * table.confidence:g} % intervals, together as strict as one at 95 %."
    return f"{text} {table.unplanned}".strip()


def verdict_counts(words: Iterable[str]) -> str:
    """Return how many verdicts of each kind there are, in words.

    Example:
        >>> verdict_counts(["agrees", "agrees", "not run"])
        '2 agree, 1 not run'
    """
    counts = Counter(words).items()
    return ", ".join(f"{number} {word if number == 1 else SEVERAL.get(word, word)}" for word, number in counts)
