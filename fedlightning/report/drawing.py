"""Matplotlib figures for a page and for print, in one look. The same numbers give the same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlightning.report.styles import BAD, variable

WIDTH, HEIGHT, WIDE = 5.0, 3.2, 11.0
"""Size of a panel in inches: a column of a page on paper, 360 points on a screen; a wide one goes over the page."""

MOST_TICKS = 5
"""Most ticks of an axis of numbers."""

_LOOK = mpl.rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=False)


@contextmanager
def use_style() -> Iterator[None]:
    """Use the report's settings of matplotlib, whatever the user's are, and restore those afterwards."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_LOOK)
        yield


def panel(height: float = HEIGHT, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return an empty figure of one panel, which pyplot does not manage. Call it under :func:`use_style`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04)  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def rows_of(axes: Axes, names: Sequence[str]) -> None:
    """Name the lines of a figure that stand below each other, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)


def no_value(axes: Axes, place: int) -> None:
    """Say in red that a line has no number."""
    axes.text(0.01, place, "no value", transform=axes.get_yaxis_transform(), color=BAD, va="center", fontsize=9)


def upright(names: Sequence[str], room: int) -> int:
    """Return the angle of names below their places: 90 where they would touch in a line of so many letters, else 0."""
    return 90 if (max(map(len, names), default=0) + 1) * len(names) > room else 0


def clients_below(axes: Axes, names: Sequence[str], count: int, order: str) -> None:
    """Name the clients below their bars; without names say how many there are, and in which order they stand."""
    axes.set_xticks(np.arange(len(names)), names, rotation=upright(names, 42))
    axes.set_xlabel("client" if names else f"{count} clients, {order} first")
    axes.set_xlim(-0.7, count - 0.3)
    axes.grid(axis="x", visible=False)


def legend_below(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """Put the legend under the axes, where it hides no data, and make the figure higher by its lines."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    longest = max(len(label) for label in labels)
    columns = min(columns if longest <= 12 else 2 if longest <= 22 else 1, len(labels))
    lines = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.21 * lines)
    # Matplotlib fills column by column; readers go line by line.
    order = [i for column in range(columns) for i in range(column, len(labels), columns)]
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower left",
        ncols=columns,
        handlelength=2.4,
        columnspacing=1.2,
        handletextpad=0.5,
        borderaxespad=0.2,
    )


def count_along_x(axes: Axes) -> None:
    """Let ticks below be whole numbers, also where there is one."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def label_logarithms(axis: Axis) -> None:
    """Label a logarithmic axis at powers of ten, and at 2 and 5 times these, which are few enough for any axis."""
    axis.set_major_formatter("{x:g}")

    def label(value: float, place: float) -> str:
        return f"{value:g}" if f"{value:e}"[0] in "25" else ""

    axis.set_minor_formatter(label)


def settle(figure: Figure) -> None:
    """Lay the figure out once, so that every file looks the same (and is written in a third of the time)."""
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        locator = axis.get_major_locator()
        if isinstance(locator, MaxNLocator):
            locator.set_params(nbins=MOST_TICKS - 1)
    with use_style():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def svg(figure: Figure) -> str:
    """Return the figure as an SVG file, with text as text."""
    buffer = io.BytesIO()
    with use_style():
        figure.savefig(buffer, format="svg", dpi=150, metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode()


def save(figure: Figure, text: str, folder: Path, name: str) -> None:
    """Write a figure as SVG, PNG (300 dpi) and PDF (TrueType fonts embedded, as publishers ask), without dates."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    with use_style():
        figure.savefig(folder / f"{name}.png", dpi=300)
        figure.savefig(folder / f"{name}.pdf", dpi=300, metadata={"CreationDate": None})


def inline(text: str, name: str, alt: str) -> str:
    """Return an SVG file as an element for a page.

    Text stays text, so it can be searched and read aloud, and has the font of the page. Ids start with `name`, so that
    several figures can share a page. Coordinates have two decimals.
    """
    text = text[text.index("<svg") :].rstrip()
    opening, _, body = text.partition(">")
    box = re.search(r'viewBox="([^"]+)"', opening)
    assert box is not None
    changes: list[_Change] = [*_PAGE, *_ids(name)]
    for pattern, replacement in changes:
        body = re.sub(pattern, replacement, body, flags=re.DOTALL)
    body = re.sub(r"(?<=[\s\"])-?\d+\.\d{3,}(?=[\s\"])", _two_decimals, body)
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(alt, quote=True)}">{body}'


# Removed from SVG in a page: metadata, comments, the style for everything ("*"), namespaces, matplotlib's font.
_Change = tuple[str, str | Callable[[re.Match[str]], str]]
_PAGE: tuple[_Change, ...] = (
    (r"<metadata>.*?</metadata>\s*", ""),
    (r"<!--.*?-->\s*", ""),
    (r"<style[^>]*>.*?</style>\s*", ""),
    (r"<defs>\s*</defs>\s*", ""),
    (r"xlink:href", "href"),
    (r' xmlns="[^"]*"', ""),
    (r"(?<=base64,)[^\"]*", lambda data: re.sub(r"\s", "", data[0])),
    (r"\s*\n\s*", "\n"),
    (r" \nL ", "L"),
    (r' transform="rotate\(-0 [^)]*\)"', ""),
    (r" font-family: [^;\"]+;", ""),
    (r"(?<=[:] )#[0-9a-f]{6}", lambda colour: variable(colour[0])),
)


def _ids(name: str) -> tuple[tuple[str, str], ...]:
    return (
        (r'\bid="([^"]+)"', rf'id="{name}-\1"'),
        (r'href="#([^"]+)"', rf'href="#{name}-\1"'),
        (r"url\(#([^)]+)\)", rf"url(#{name}-\1)"),
    )


def _two_decimals(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
