"""A table that was run: every cell and order with its values and verdict, as plain values that go to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedlightning.experiments.reproduce.measures import NoValueError, Spec, Value, better_is_higher, measure
from fedlightning.experiments.reproduce.tables import WHOLE, Cell, Order, Table
from fedlightning.experiments.reproduce.verdicts import (
    DISAGREES,
    NOT_JUDGED,
    NOT_RUN,
    ORDER_DISAGREES,
    Verdict,
    judge,
    judge_order,
)
from fedlightning.study.runs import Run, load_run


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

    @property
    def is_order(self) -> bool:
        """Whether it is an order."""
        return self.published is None

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = asdict(self)
        verdict = found.pop("verdict")
        values = {str(seed): value for seed, value in found.pop("values").items()}
        return {**found, "verdict": verdict.pop("word"), "note": verdict.pop("why"), **verdict, "values": values}


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


Places = Mapping[str, Mapping[int, Place]]
"""Name of a run -> seed -> its place."""


def measure_table(table: Table, places: Places, seeds: Sequence[int], obstacle: str = "") -> list[Line]:
    """Return all cells and orders of a table with their verdicts. It may import torch: call it in a child process."""
    measurer = _Measurer(table, places, seeds, obstacle)
    return [*map(measurer.cell, table.cells), *map(measurer.order, table.orders)]


@dataclass(frozen=True)
class _Measurer:
    table: Table
    places: Places
    seeds: Sequence[int]
    obstacle: str
    loaded: dict[str, Run] = field(default_factory=dict)

    def cell(self, cell: Cell) -> Line:
        line = partial(
            Line, cell.name, published=cell.published, tolerance=cell.tolerance, row=cell.row, column=cell.column
        )
        values = self._values(cell.run, cell.measure)
        if isinstance(values, Place):
            word = DISAGREES if values.diverged and not cell.because else NOT_RUN
            return line(Verdict(word, why=values.why), failed=values.failed, asked=values.asked)
        numbers = {seed: value.number for seed, value in values.items()}
        beyond = any(value.beyond for value in values.values())
        exact = self.table.exact or cell.run is None
        verdict = judge(list(numbers.values()), cell.published, cell.tolerance, exact=exact, beyond=beyond)
        return line(_unless(cell.because, verdict), numbers, why=self.table.reason(cell))

    def order(self, order: Order) -> Line:
        sides, missing = [], []
        for run, spec, factor in zip((order.better, order.worse), order.measures, (1.0, order.factor), strict=True):
            values = self._values(run, spec)
            if isinstance(values, Place):
                missing.append((run, values))
                continue
            sign = 1.0 if better_is_higher(spec) else -1.0
            sides.append({seed: sign * factor * value.number for seed, value in values.items()})
        if missing:
            place = _first([place for _, place in missing])
            lost = any(place.diverged for run, place in missing if run == order.better)
            judged = not order.because and all(place.asked for _, place in missing)
            verdict = Verdict(ORDER_DISAGREES if lost and judged else NOT_RUN, why=place.why)
            return Line(order.name, verdict, tolerance=order.margin, failed=place.failed, asked=place.asked)
        better, worse = sides
        verdict = judge_order(list(better.values()), list(worse.values()), order.margin, exact=self.table.exact)
        differences = {seed: better[seed] - worse[seed] for seed in better}
        why = self.table.why.get(WHOLE, "")
        return Line(order.name, _unless(order.because, verdict), differences, tolerance=order.margin, why=why)

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


def _unless(because: str, verdict: Verdict) -> Verdict:
    """Return a verdict, or that there is none if something speaks against judging."""
    return replace(verdict, word=NOT_JUDGED, why=because) if because else verdict
