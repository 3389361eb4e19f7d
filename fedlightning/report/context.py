"""The context of a report's sections: the study, the styles, and the folder for figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup
from matplotlib.figure import Figure

from fedlightning.compat import sheets
from fedlightning.report.cells import Column, Missing, is_number
from fedlightning.report.drawing import inline, save, settle, svg, use_style
from fedlightning.report.figures.dots import Dot, Line
from fedlightning.report.html import Gallery, Picture, Section, Table, slug
from fedlightning.report.styles import Style
from fedlightning.scores.metric_names import higher_is_better, metric_label
from fedlightning.storage.files import UnreadableError, read_json
from fedlightning.study.columns import GLOBAL
from fedlightning.study.evidence import word_of_best
from fedlightning.study.study import Study

Row = Mapping[str, Any]
R = TypeVar("R", bound=Row)
MAX_UNFOLDED_ROWS = 14
"""Tables of up to this many rows are unfolded beside their picture."""
METHOD = Column("method", "method", "method")
SEEDS = Column("n_seeds", "seeds", "count", help="runs behind the row")
REASONS = {"failed": "run failed", "missing_score": "not scored", "different_splits": "other test data"}
"""Kinds of problems that take away a method's numbers -> the words in the cells instead."""
FEW_SEEDS = 5
"""With fewer seeds figures of scores show single seeds and no intervals, which are in the tables."""
INCENTIVES = ("ipr", "opt_outs", "pma", "pma_mean", "gma")
"""Columns that are measured against baselines."""


@dataclass(frozen=True)
class Context:
    """A study with everything that its sections need to make tables and figures.

    Attributes:
        study: The runs and their tables.
        styles: Method -> style, of all methods on the page.
        figures: Folder for figures and their tables. `None` writes none.
        name: Name of the data set, `""` if the page has only one.
        prefix: Prefix of ids and names of files.
        level: Level of the sections' headings.
    """

    study: Study
    styles: Mapping[str, Style]
    figures: Path | None = None
    name: str = ""
    prefix: str = ""
    level: int = 2

    @property
    def metric(self) -> str:
        """Name of the metric for readers."""
        return metric_label(self.study.data.metric)

    @cached_property
    def higher(self) -> bool:
        """Whether a higher value of the metric is better."""
        return higher_is_better(self.study.data.metric)

    @property
    def better(self) -> Any:
        """Better end of the metric, for :attr:`Column.better`."""
        return "high" if self.higher else "low"

    @property
    def tenth(self) -> str:
        """Name of the score that a tenth of the clients is worse than."""
        return "10th pct." if self.higher else "90th pct."

    def over(self, name: str) -> str:
        """Describe the gain over `name`, which is positive if better: for a loss, the value of `name` comes first."""
        return f"{self.metric} minus {name}’s" if self.higher else f"{name}’s {self.metric} minus own"

    @cached_property
    def overview(self) -> list[dict[str, Any]]:
        """One line a method, best first; methods without a mean come last."""
        word = word_of_best(self.study.data)
        rows = [
            row | {"mb_total": _sum(row["mb_up"], row["mb_down"])} | ({"gap": word} if row["best"] else {})
            for row in self.study.overview()
        ]
        return self.best_first(rows)

    def best_first(self, rows: Iterable[R]) -> list[R]:
        """Return rows by their means, the best first; those without a mean come last."""
        sign = -1.0 if self.higher else 1.0
        return sorted(rows, key=lambda row: (not is_number(row["mean"]), sign * (row["mean"] or 0.0)))

    def sort_rows(self, rows: Iterable[R]) -> list[R]:
        """Return rows in the order of the overview's methods."""
        order = [row["method"] for row in self.overview]
        return sorted(rows, key=lambda row: order.index(row["method"]))

    @property
    def few_seeds(self) -> bool:
        """Whether there are too few seeds for a figure of intervals: they would reach beyond any value that can be."""
        return len(self.study.data.seeds) < FEW_SEEDS

    def line(self, method: str, dots: Sequence[Dot], label: str = "", runs: Sequence[float] = ()) -> Line:
        """Return a line of a figure of dots in the method's colour, with its marker."""
        style = self.styles[method]
        return Line(label or method, style.colour, dots, style.marker, runs)

    def read_of_runs(self, name: str) -> dict[tuple[str, str], Any]:
        """Return a JSON file of finished runs' folders, by method and seed; one that cannot be read counts as none."""
        contents = {}
        for (method, seed), scores in self.study.data.finished.items():
            path = None if scores.run.path is None else scores.run.path / name
            if path is not None and path.exists():
                with suppress(UnreadableError):
                    contents[method, str(seed)] = read_json(path)
        return contents

    def id(self, name: str) -> str:
        """Return `name` with the prefix of the data set."""
        return f"{self.prefix}-{name}" if self.prefix else name

    def section(self, name: str, title: str, short: str, parts: Sequence[Any], lead: str = "") -> Section | None:
        """Return a section of this study, or `None` if all of its parts are `None`."""
        kept = [part for part in parts if part is not None]
        return Section(self.id(name), title, short, lead, kept, self.level) if kept else None

    def table(
        self, name: str, caption: str, columns: Sequence[Column], rows: Sequence[Row], notes: Sequence[str] = (),
        missing: Missing | None = None, seeds: bool = True, across: bool = False,
    ) -> Table:  # fmt: skip
        """Return a table whose empty cells say why they are empty. Columns without any value are left out."""
        first, *others = columns
        shown = [first, *(column for column in others if _any(column, rows))]
        all_notes = [*notes, self.study.data.seed_text] if seeds and not across else list(notes)
        return Table(f"table-{self.id(name)}", caption, shown, rows, missing or self.missing, all_notes, across)

    def missing(self, row: Row, column: Column) -> str | None:
        """Return why `row` has no value, if a problem of its method takes it away."""
        method = column.key[1:] if column.key.startswith("@") else row.get("method")
        if method is None or column.kind == "text":
            return None
        role = self.study.data.role(method)
        if column.key in INCENTIVES and (role == "fedavg" or (role == "siloed" and column.key in ("ipr", "gma"))):
            return None  # it would be measured against itself
        if column.key == GLOBAL and not self.study.data.shared(method):
            return None  # it has no global model
        if broken := self.diverged.get(method):
            return broken
        kinds = set(REASONS)
        if self.study.data.deployed(method):
            kinds = {"different_splits"} if not self.study.data.comparable(method) else set()
        mine = [problem for problem in self.study.problems if problem.run == method]
        for kind in (kind for kind in REASONS if kind in kinds):
            seeds = sorted({problem.seed for problem in mine if problem.kind == kind and problem.seed is not None})
            if seeds:
                return f"{REASONS[kind]} (seed {', '.join(map(str, seeds))})"
        if column.key in INCENTIVES and any(problem.kind == "uncomparable_baseline" for problem in mine):
            return "baseline not comparable"
        return None

    @cached_property
    def diverged(self) -> dict[str, str]:
        """Methods with a model that has no finite score -> the text that says which."""
        texts = {}
        for method in self.study.data.methods:
            places = [
                f"seed {seed}, client {', '.join(score.diverged)}"
                for seed, score in self.study.data.deployed(method).items()
                if score.diverged
            ]
            if places:
                texts[method] = f"undefined: NaN at {'; '.join(places)}"
        return texts

    @cached_property
    def slugs(self) -> dict[str, str]:
        """Method -> name for ids and files."""
        out: dict[str, str] = {}
        for method in self.study.data.methods:
            out[method] = slug(method, out.values())
        return out

    def seed_means(self, method: str) -> list[float]:
        """Return the deployed mean of each seed that has one."""
        return [score.mean for score in self.study.data.deployed(method).values() if score.mean is not None]

    @property
    def siloed(self) -> str | None:
        """The method that trains every client alone, if there is one."""
        return self.study.data.baselines.get("siloed")

    @cached_property
    def client_rows(self) -> list[dict[str, Any]]:
        """The lines of :meth:`Study.clients`."""
        return self.study.clients()

    def by_client(self, key: str) -> dict[str, dict[str, float | None]]:
        """Return a column of :attr:`client_rows` by method and client, best method first.

        Methods without a number are left out.
        """
        order = [row["method"] for row in self.overview]
        values_by_method: dict[str, dict[str, float | None]] = {method: {} for method in order}
        for row in self.client_rows:
            values_by_method[row["method"]][row["client"]] = row[key]
        return {
            method: column
            for method, column in values_by_method.items()
            if any(is_number(value) for value in column.values())
        }

    def picture(self, name: str, title: str, alt: str, draw: Callable[[], Figure]) -> Picture:
        """Draw a figure, write its files, and return the picture for the page."""
        with use_style():
            figure = draw()
            settle(figure)
            text = svg(figure)
            if self.figures is not None:
                save(figure, text, self.figures, self.id(name))
            element = inline(text, f"svg-{self.id(name)}", alt)
        return Picture(f"figure-{self.id(name)}", title, alt, Markup(element))

    def gallery(
        self, pictures: Sequence[Picture], table: Table, caption: str = "", open: bool | None = None, wide: bool = False
    ) -> Gallery | None:
        """Return pictures above the table of their numbers, or `None` if there is no picture.

        The table is also written as CSV beside the figures. Methods of the table that diverged are named, since a figure
        shows them in part or not at all.
        """
        if not pictures:
            return None
        if self.figures is not None:
            write_csv(self.figures / f"{table.name.removeprefix('table-')}.csv", table)
        keys = {row.get("method") for row in table.rows} | {column.key.removeprefix("@") for column in table.columns}
        lost = [f"{method} is {why}." for method, why in self.diverged.items() if method in keys]
        warning = f"Drawn in part or not at all: {' '.join(lost)}" if lost else ""
        short = len(pictures) == 1 and len(table.rows) <= MAX_UNFOLDED_ROWS
        return Gallery(pictures, table, caption, short if open is None else open, warning, wide)


def write_csv(path: Path, table: Table) -> None:
    """Write the numbers of a table, unrounded."""
    keys = list(dict.fromkeys(k for c in table.columns for k in (c.key, c.radius, c.interval) if k is not None))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = sheets.Writer(file)
        writer.writerow(keys)
        writer.writerows([_plain(row.get(key)) for key in keys] for row in table.rows)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _any(column: Column, rows: Sequence[Row]) -> bool:
    return any(row.get(column.key) not in (None, "", []) for row in rows)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value
