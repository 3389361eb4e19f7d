"""A table that was run: every cell and order with its values and verdict, as plain values that go to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedlightning.experiments.reproduce.measures import NoValueError, Spec, Value, better_is_higher, measure
from fedlightning.experiments.reproduce.specs import runs_of
from fedlightning.experiments.reproduce.tables import WHOLE, Table
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
    return _Measurer(table, places, seeds, obstacle).lines()


class _Measurer:
    def __init__(self, table: Table, places: Places, seeds: Sequence[int], obstacle: str) -> None:
        self.table, self.places, self.obstacle = table, places, obstacle
        self.seeds = seeds
        self._loaded: dict[str, Run] = {}

    def lines(self) -> list[Line]:
        table, out = self.table, []
        for cell in table.cells:
            found = self._values(cell.run, cell.measure, cell.runs)
            line = {"published": cell.published, "tolerance": cell.tolerance, "row": cell.row, "column": cell.column}
            if isinstance(found, Place):
                verdict = Verdict(DISAGREES if found.diverged and cell.judged else NOT_RUN, why=found.why)
                out.append(Line(cell.name, verdict, failed=found.failed, asked=found.asked, **line))  # type: ignore[arg-type]
                continue
            values = {seed: value.number for seed, value in found.items()}
            beyond = any(value.beyond for value in found.values())
            exact = table.exact or cell.run is None
            verdict = judge(list(values.values()), cell.published, cell.tolerance, exact=exact, beyond=beyond)
            if not cell.judged:
                verdict = Verdict(NOT_JUDGED, verdict.mean, verdict.low, verdict.high, cell.because)
            out.append(Line(cell.name, verdict, values, why=table.reason(cell), **line))  # type: ignore[arg-type]
        return out + [self._order(order) for order in table.orders]

    def _order(self, order: Any) -> Line:
        sides, missing = [], []
        for run, spec, factor in zip((order.better, order.worse), order.measures, (1.0, order.factor), strict=True):
            found = self._values(run, spec, [run, *runs_of(spec)])
            if isinstance(found, Place):
                missing.append((run, found))
                continue
            sign = 1.0 if better_is_higher(spec) else -1.0
            sides.append({seed: sign * factor * value.number for seed, value in found.items()})
        if missing:
            told = _first([place for _, place in missing])
            lost = any(place.diverged for run, place in missing if run == order.better)
            judged = order.judged and all(place.asked for _, place in missing)
            verdict = Verdict(ORDER_DISAGREES if lost and judged else NOT_RUN, why=told.why)
            return Line(order.name, verdict, tolerance=order.margin, failed=told.failed, asked=told.asked)
        better, worse = sides
        verdict = judge_order(list(better.values()), list(worse.values()), order.margin, exact=self.table.exact)
        if not order.judged:
            verdict = Verdict(NOT_JUDGED, verdict.mean, verdict.low, verdict.high, "the order is from memory")
        differences = {seed: better[seed] - worse[seed] for seed in better}
        return Line(order.name, verdict, differences, tolerance=order.margin, why=self.table.why.get(WHOLE, ""))

    def _values(self, run: str | None, spec: Spec, needed: Sequence[str]) -> dict[int, Value] | Place:
        """Return seed -> value, or the place that has none."""
        if self.obstacle:
            return Place(None, self.obstacle)
        if run is None:
            return {0: measure(spec, {}, None)}
        found = {}
        needs = {
            (name, seed): self.places.get(name, {}).get(seed, Place(None, f"run {name} was not asked for", asked=False))
            for seed in self.seeds
            for name in needed
        }
        if missing := [place for place in needs.values() if place.folder is None]:
            return _first(missing)
        for seed in self.seeds:
            runs = {name: self._run(str(needs[name, seed].folder), name) for name in needed}
            try:
                found[seed] = measure(spec, runs, run)
            except (NoValueError, IndexError) as error:
                return Place(None, f"run {run}, seed {seed}: {error}", failed=True)
        return found

    def _run(self, folder: str, name: str) -> Run:
        if folder not in self._loaded:
            self._loaded[folder] = load_run(Path(folder), name)
        return self._loaded[folder]
