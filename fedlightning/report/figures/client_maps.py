"""Figures of clients: scores and gains with every method, their spread, every model on every client's data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlightning.report.cells import is_number
from fedlightning.report.drawing import WIDE, WIDTH, no_value, panel, rows_of, upright
from fedlightning.report.styles import BAD, INK, ON_BRIGHT, ON_DARK, SEQUENTIAL, Style, short_names

NARROW = 4
"""Up to this many methods fit into a map of one column of the page, which a telephone shows whole."""
MAX_NAMED_CLIENTS = 24
"""Up to this many clients are named; more are a row of colour each."""
Scores = Mapping[str, float | None]
"""Client -> score."""


def client_map(values: Mapping[str, Scores], gains: bool) -> Figure:
    """Draw a row for each client and a column for each method, in the colour of its score; hatched where there is none.

    Gains have two colours that meet at 0. Small maps show the numbers. Where all values are one, the bar names no other.
    """
    clients = list(dict.fromkeys(client for scores in values.values() for client in scores))
    table = np.array(
        [[_or(scores.get(client), math.nan) for scores in values.values()] for client in clients], dtype=float
    )
    ends = float(np.nanmin(table)), float(np.nanmax(table))
    most = max(map(abs, ends)) or 1.0
    limits = (-most, most) if gains else ends if ends[0] < ends[1] else (ends[0] - 0.5, ends[1] + 0.5)
    methods, many = short_names(values, 16), len(clients) > MAX_NAMED_CLIENTS
    narrow = len(methods) <= NARROW
    angle = upright(list(methods.values()), 42 if narrow else 115)
    height = (3.4 if many else 0.7 + 0.24 * max(4, len(clients))) + (1.2 if angle else 0.0)
    figure, axes = panel(height=height, width=WIDTH if narrow else WIDE)
    image = _map(axes, table, limits, "RdBu" if gains else SEQUENTIAL)
    axes.set_xticks(range(len(methods)), list(methods.values()), rotation=angle)
    if many:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(clients)} clients, in order")
    else:
        short = short_names(clients, 14)
        axes.set_yticks(range(len(clients)), [short[client] for client in clients])
        axes.set_ylabel("client")
    if not many and len(methods) <= 12:
        for (row, column), value in np.ndenumerate(table):
            share = 0.5 if math.isnan(value) else (value - limits[0]) / (limits[1] - limits[0])
            dark = min(share, 1 - share) < 0.15 if gains else share < 0.5
            text = "?" if math.isnan(value) else f"{value:+z.3f}".replace("-", "\u2212") if gains else f"{value:.3f}"
            colour = BAD if math.isnan(value) else ON_DARK if dark else ON_BRIGHT
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8.5)
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=30, ticks=[ends[0]] if ends[0] == ends[1] else None)
    bar.outline.set_visible(False)
    return figure


def _map(axes: Axes, table: np.ndarray, limits: tuple[float, float], colours: str) -> Any:
    """Draw a table as a map of colours, hatched where a value is missing."""
    axes.grid(visible=False)
    axes.patch.set(facecolor="#f6d9d6", hatch="////", edgecolor=BAD, linewidth=0)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return axes.imshow(
        np.ma.masked_invalid(table),
        cmap=colours,
        vmin=limits[0],
        vmax=limits[1],
        interpolation="nearest",
        aspect="auto",
    )


def strips(values: Mapping[str, Scores], styles: Mapping[str, Style], xlabel: str, zero: bool = False) -> Figure:
    """Draw a line of markers for each method, one marker a client, with the median as a bar."""
    figure, axes = panel(height=min(9.0, 0.85 + 0.34 * max(2, len(values))))
    if zero:
        axes.axvline(0, color=INK, linewidth=1)
    names = short_names(values)
    for place, (method, scores) in enumerate(values.items()):
        x = np.array([value for value in scores.values() if is_number(value)], dtype=float)
        if not len(x):
            no_value(axes, place)
            continue
        size = 34 if len(x) <= MAX_NAMED_CLIENTS else 14
        axes.scatter(
            x, place + _swarm(x), s=size, marker=styles[method].marker, color=styles[method].colour, alpha=0.75, lw=0
        )
        axes.plot([np.median(x)] * 2, [place - 0.32, place + 0.32], color=INK, linewidth=2)
    rows_of(axes, [names[method] for method in values])
    axes.set_xlabel(xlabel)
    return figure


def heat_map(
    clients: Sequence[str], values: Sequence[Sequence[float | None]], label: str, limits: tuple[float, float]
) -> Figure:
    """Draw the scores of each client's model (rows) on each client's test data (columns).

    Missing values are hatched. Maps of up to ten clients show the numbers.
    """
    table = np.array([[_or(value, math.nan) for value in row] for row in values], dtype=float)
    figure, axes = panel(height=3.55, width=4.4)
    image = _map(axes, table, limits, SEQUENTIAL)
    axes.set_aspect("equal")
    n = len(clients)
    if n <= MAX_NAMED_CLIENTS:
        names = short_names(clients, 12)
        labels = [names[client] for client in clients]
        axes.set_xticks(range(n), labels, rotation=90 if max(map(len, labels)) > 2 else 0, fontsize=9 if n < 14 else 7)
        axes.set_yticks(range(n), labels, fontsize=9 if n < 14 else 7)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    axes.set_xlabel("test data of client")
    axes.set_ylabel("model of client")
    middle = sum(limits) / 2
    if n <= 10:
        for (row, column), value in np.ndenumerate(table):
            text = "?" if math.isnan(value) else _brief(value)
            colour = BAD if math.isnan(value) else ON_DARK if value < middle else ON_BRIGHT
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=9 if n <= 7 else 8)
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label(label)
    return figure


def _brief(value: float) -> str:
    """Write two decimals without the zero before the point, or two digits of larger numbers."""
    text = f"{value:.2f}"
    return text.replace("0.", ".", 1) if abs(float(text)) < 1 else text if abs(value) < 10 else f"{value:.2g}"


def _swarm(x: np.ndarray) -> np.ndarray:
    """Return heights that keep markers of near values apart, from the middle outwards; the same for the same values."""
    span = float(x.max() - x.min()) or 1.0
    cells = np.floor((x - x.min()) / span * 48).astype(int)
    heights = np.zeros(len(x))
    crowd = max(np.bincount(cells).max(), 1)
    step = min(0.12, 0.6 / crowd)
    seen: dict[int, int] = {}
    for index in np.argsort(x, kind="stable"):
        count = seen.get(int(cells[index]), 0)
        seen[int(cells[index])] = count + 1
        heights[index] = step * ((count + 1) // 2) * (1 if count % 2 else -1)
    return heights


def _or(value: Any, other: float) -> float:
    return float(value) if is_number(value) else other
