"""Parts of the page (sections, tables, pictures), rendered as one HTML file that needs no other file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedlightning.report.cells import Cell, Column, Missing, layout
from fedlightning.report.styles import Style, dark_variables, variable

_PACKAGE = "fedlightning.report"


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: Id that is unique on the page.
        caption: Caption of the table.
        columns: Columns; see :class:`~fedlightning.report.cells.Column`.
        rows: Values by the columns' keys.
        missing: Says why a value is missing.
        notes: Lines below the table.
        across: The best cell of each row is bold, not that of each column.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    missing: Missing | None = None
    notes: Sequence[str] = ()
    across: bool = False

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """Cells of the table, row by row."""
        return layout(self.columns, self.rows, self.missing, self.across)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Titles above several columns with the number of columns they span; empty if no column has one."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return spans if any(title for title, _ in spans) else []


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    Attributes:
        name: Id that is unique on the page, and the name of the files.
        title: Title above the figure.
        alt: Description of what it shows, with the main numbers.
        svg: Element from :func:`~fedlightning.report.drawing.inline`.
    """

    name: str
    title: str
    alt: str
    svg: Markup


@dataclass(frozen=True)
class Gallery:
    """Pictures with the table of their numbers. The table of a single picture is beside it if there is room.

    Attributes:
        pictures: Pictures to show.
        table: Numbers that the pictures are drawn from.
        caption: Line that says how to read the pictures.
        open: Whether the table is unfolded.
        warning: Methods that are missing in the pictures.
        wide: Whether the picture is as wide as the page.
    """

    pictures: Sequence[Picture]
    table: Table
    caption: str = ""
    open: bool = False
    warning: str = ""
    wide: bool = False

    @property
    def layout(self) -> str:
        """How pictures stand: one beside its table, above one that is too wide, or over the page; two; many."""
        single = "single" if sum(map(_room, self.table.columns)) <= BESIDE else "alone"
        return "broad" if self.wide else {1: single, 2: "pair"}.get(len(self.pictures), "many")


BESIDE = 46
"""Widest table, in rem, that has room beside a picture on a page of 1440 pixels."""


def _room(column: Column) -> float:
    """Return about how wide a column is, in rem."""
    return 10 if column.interval else 8.5 if column.radius else 8.5 if column.kind == "method" else 4.2


@dataclass(frozen=True)
class Prose:
    """Paragraphs, or a list of terms with their definitions.

    Attributes:
        paragraphs: Texts.
        terms: Terms and their definitions.
        tone: `"warn"` and `"bad"` are set in colour.
        title: Title above, if any.
    """

    paragraphs: Sequence[str] = ()
    terms: Sequence[tuple[str, str]] = ()
    tone: Literal["", "warn", "bad"] = ""
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
        name: Id that is unique on the page.
        title: Heading.
        short: Title in the list of sections.
        lead: Sentence below the heading.
        parts: Tables, galleries and prose.
        level: Level of the heading.
    """

    name: str
    title: str
    short: str
    lead: str = ""
    parts: Sequence[Table | Gallery | Prose] = ()
    level: int = 2


@dataclass(frozen=True)
class Answer:
    """A box at the top of the page.

    Attributes:
        question: The question.
        answer: The answer in a few words.
        sentence: The answer with the numbers.
        method: Method whose colour is shown, if any.
    """

    question: str
    answer: str
    sentence: str
    method: str | None = None


@dataclass(frozen=True)
class Trouble:
    """Problems of the runs of one method, or of several.

    Attributes:
        about: Names of the methods.
        method: The method, if it is only one.
        texts: Sentences.
    """

    about: str
    method: str | None
    texts: Sequence[str]


@dataclass(frozen=True)
class Page:
    """The whole report.

    Attributes:
        title: Title of the page.
        subtitle: Line below the title.
        answers: Data set -> boxes at the top. A single study has an empty name.
        problems: Problems that take numbers away.
        notes: Problems that a reader must know to read the numbers.
        sections: Sections of the page.
        styles: Method -> style.
        kicker: Line above the title.
    """

    title: str
    subtitle: str
    answers: Mapping[str, Sequence[Answer]]
    problems: Sequence[Trouble] = ()
    notes: Sequence[Trouble] = ()
    sections: Sequence[Section] = ()
    styles: Mapping[str, Style] = field(default_factory=dict)
    kicker: str = "Comparison of federated methods"


def render(page: Page) -> str:
    """Return the page as HTML. All text is escaped; only figures are inserted as they are."""
    environment = Environment(
        loader=PackageLoader(_PACKAGE, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["breakable"] = breakable
    environment.tests["table"] = lambda part: isinstance(part, Table)
    environment.tests["gallery"] = lambda part: isinstance(part, Gallery)
    files = resources.files(_PACKAGE)
    return environment.get_template("template.html.jinja").render(
        page=page,
        css=Markup(files.joinpath("style.css").read_text().replace("/* figures */", dark_variables())),
        script=Markup(files.joinpath("sort.js").read_text()),
        swatch=lambda method: swatch(page.styles[method]) if method in page.styles else "",
    )


def swatch(style: Style) -> Markup:
    """Return the colour and marker of a method as a small picture, to be shown beside its name."""
    shape = _SHAPES.get(style.marker, _SHAPES["o"])
    return Markup(
        '<svg class="swatch" viewBox="-6 -6 12 12" aria-hidden="true"><path style="fill: {}" d="{}"/></svg>'
    ).format(variable(style.colour), shape)


def breakable(name: str) -> Markup:
    """Return `name` with places where a narrow column may break it: after signs, and before a capital in a word."""
    parts = re.split(r"(?<=[_/+=,:])(?=\w)|(?<=\.)(?=[A-Za-z])|(?<=[a-z\d])(?=[A-Z])", name)
    return Markup("<wbr>").join(parts)


def slug(text: str, taken: Iterable[str] = ()) -> str:
    """Return a name for ids and files, made of letters, digits and dashes, that is not in `taken`.

    Example:
        >>> slug("PLayer-FL (t = 0.1)"), slug("FedAvg", ["fedavg"])
        ('player-fl-t-0-1', 'fedavg-2')
    """
    base = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "x"
    name, number, seen = base, 2, set(taken)
    while name in seen:
        name, number = f"{base}-{number}", number + 1
    return name


# Matplotlib's markers in a box of 12 by 12.
_SHAPES = {
    "o": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "s": "M-4.2-4.2h8.4v8.4h-8.4z",
    "^": "M0-5L5 4H-5z",
    "v": "M0 5L5-4H-5z",
    "<": "M-5 0L4-5V5z",
    ">": "M5 0L-4-5V5z",
    "D": "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "d": "M0-5.5L3.6 0L0 5.5L-3.6 0z",
    "P": "M-1.8-5h3.6v3.2H5v3.6H1.8V5h-3.6V1.8H-5v-3.6h3.2z",
    "X": "M-5-2.5L-2.5-5L0-2.5L2.5-5L5-2.5L2.5 0L5 2.5L2.5 5L0 2.5L-2.5 5L-5 2.5L-2.5 0z",
    "p": "M0-5L4.9-1.5L3 4.2H-3L-4.9-1.5z",
    "h": "M0-5L4.4-2.5V2.5L0 5L-4.4 2.5V-2.5z",
}
