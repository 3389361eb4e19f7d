"""Figures of means with their intervals, a line a method: scores, stages, checkpoints, paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedlightning.report.cells import is_number, number
from fedlightning.report.drawing import legend_below, no_value, panel, rows_of
from fedlightning.report.styles import INK, MUTED, short_names


@dataclass(frozen=True)
class Dot:
    """A mean with its interval.

    Attributes:
        mean: The mean, or `None` if it is not known.
        interval: `[low, high]`, or `None`.
        group: Name that tells the dots of one line apart.
    """

    mean: float | None
    interval: Sequence[float] | None = None
    group: str = ""


@dataclass(frozen=True)
class Line:
    """A line of the figure.

    Attributes:
        label: Name of the method.
        colour: Colour of the method.
        dots: Means to draw.
        marker: Marker of the method, used if the dots have no groups.
        runs: Values of single runs, drawn faintly.
    """

    label: str
    colour: str
    dots: Sequence[Dot]
    marker: str = "o"
    runs: Sequence[float] = ()


SHAPES: Mapping[str, tuple[str, str]] = {
    "G": ("s", "full"),
    "L1": ("o", "full"),
    "L2": ("^", "full"),
    "latest (G)": ("s", "full"),
    "latest (L1)": ("o", "full"),
    "best global": ("s", "none"),
    "best local": ("o", "none"),
}
"""Marker and filling of each kind of model: square the server's, round a client's, hollow a selected one."""


def dot_plot(
    lines: Sequence[Line],
    xlabel: str,
    zero: bool = False,
    groups: Sequence[str] = (),
    limits: tuple[float, float] | None = None,
    at: tuple[str, float] | None = None,
) -> Figure:
    """Draw horizontal dots with intervals, the first line on top; `at`: name of a value to compare with, and the value.

    A line without any number says so in red.
    """
    spread = min(0.22, 0.6 / max(1, len(groups)))
    figure, axes = panel(height=min(9.0, 0.75 + max(2, len(lines)) * (0.3 if len(groups) < 2 else 0.36)))
    if zero:
        axes.axvline(0, color=INK, linewidth=1)
    if at is not None:
        label = f"{at[0]} {number(at[1])}"
        axes.axvline(at[1], color=INK, linewidth=1, linestyle=(0, (4, 2)), label=label)
        legend_below(figure, axes)
    for place, line in enumerate(lines):
        if not any(is_number(dot.mean) for dot in line.dots):
            no_value(axes, place)
        inside = [value for value in line.runs if is_number(value)]
        axes.scatter(inside, [place] * len(inside), marker="|", s=55, color=line.colour, alpha=0.55, linewidths=1.2)
        for dot in line.dots:
            _draw(axes, dot, place, line, groups, spread)
    names = short_names(line.label for line in lines)
    rows_of(axes, [names[line.label] for line in lines])
    axes.set_xlabel(xlabel)
    if limits is not None:
        axes.set_xlim(*limits)
    if groups:
        handles = [
            Line2D([], [], color=MUTED, marker=marker, fillstyle=filling, linestyle="", label=name)  # type: ignore[arg-type]
            for name in groups
            for marker, filling in [SHAPES[name]]
        ]
        figure.set_figheight(figure.get_figheight() + 0.22)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(groups), handletextpad=0.2)
    return figure


def _draw(axes: Any, dot: Dot, place: int, line: Line, groups: Sequence[str], spread: float) -> None:
    if not is_number(dot.mean):
        return
    index = list(groups).index(dot.group) if dot.group in groups else 0
    height = place + (index - (len(groups) - 1) / 2) * spread if groups else place
    if dot.interval is not None and all(map(is_number, dot.interval)):
        axes.plot(dot.interval, [height, height], color=line.colour, linewidth=1.8, solid_capstyle="butt")
    marker, filling = SHAPES[dot.group] if groups else (line.marker, "full")
    edge = {"markeredgecolor": "white", "mew": 0.6} if filling == "full" else {"mew": 1.5}
    axes.plot([dot.mean], [height], marker=marker, color=line.colour, markersize=6.5, fillstyle=filling, **edge)


def common_limits(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Return limits that include every dot, interval and run of `lines`, or `None` if there is no number."""
    values: list[float] = []
    for line in lines:
        values += [value for value in line.runs if is_number(value)]
        for dot in line.dots:
            values += [v for v in (dot.mean, *(dot.interval or ())) if is_number(v)]
    if not values:
        return None
    low, high = float(np.min(values)), float(np.max(values))
    pad = 0.05 * ((high - low) or abs(high) or 1.0)
    return low - pad, high + pad
