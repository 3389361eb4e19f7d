"""Figures of clients: scores against siloed training, spread of gains, every model on every client's data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedlightning.report.cells import is_number, number
from fedlightning.report.drawing import clients_below, no_value, panel, rows_of
from fedlightning.report.styles import BAD, INK, ON_BRIGHT, ON_DARK, SEQUENTIAL, Style, short_names

MANY = 24
"""Up to this many clients are named; more are drawn in the order of their scores."""
Scores = Mapping[str, float | None]
"""Client -> score."""


def client_bars(values: Scores, style: Style, ylabel: str, gains: bool) -> Figure:
    """Draw a bar for each client, the highest first, with the mean over clients as a line; a red cross: no value.

    Bars of gains begin at 0. Those of scores would hide all differences there: they are marks.
    """
    clients = sorted(values, key=lambda client: -_or(values[client], -math.inf))
    heights = [_or(values[client], math.nan) for client in clients]
    known = [height for height in heights if not math.isnan(height)]
    many = len(clients) > MANY
    figure, axes = panel()
    places = np.arange(len(clients))
    if gains:
        axes.bar(places, heights, 0.9 if many else 0.72, color=style.colour)
        axes.axhline(0, color=INK, linewidth=1)
    else:
        axes.plot(places, heights, linestyle="", marker=style.marker, color=style.colour, markersize=3 if many else 6)
    mean = float(np.mean(known))
    axes.axhline(
        mean,
        color=INK,
        linewidth=1.2,
        linestyle=(0, (4, 2)),
        label=f"mean {number(mean, 3, sign=gains)}",
    )
    lost = [place for place, height in enumerate(heights) if math.isnan(height)]
    if lost:
        axes.plot(
            lost, [0.0 if gains else min(known)] * len(lost), "x", color=BAD, markersize=8, mew=2, label="no value"
        )
    names = [] if many else list(short_names(clients, 14).values())
    clients_below(axes, names, len(clients), "highest", upright=max(map(len, names), default=0) * len(clients) > 44)
    axes.set_ylabel(ylabel)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.1, handlelength=2)
    return figure


def strips(values: Mapping[str, Scores], styles: Mapping[str, Style], xlabel: str, zero: bool = False) -> Figure:
    """Draw a line of markers for each method, one marker a client, with the median as a bar."""
    figure, axes = panel(height=min(9.0, 0.85 + 0.34 * max(2, len(values))))
    if zero:
        axes.axvline(0, color=INK, linewidth=1)
    names = short_names(values)
    for place, (method, of) in enumerate(values.items()):
        x = np.array([value for value in of.values() if is_number(value)], dtype=float)
        if not len(x):
            no_value(axes, place)
            continue
        size = 34 if len(x) <= MANY else 14
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
    axes.grid(visible=False)
    axes.patch.set(facecolor="#f6d9d6", hatch="////", edgecolor=BAD, linewidth=0)
    image = axes.imshow(
        np.ma.masked_invalid(table), cmap=SEQUENTIAL, vmin=limits[0], vmax=limits[1], interpolation="nearest"
    )
    n = len(clients)
    if n <= MANY:
        names = short_names(clients, 12)
        labels = [names[client] for client in clients]
        axes.set_xticks(range(n), labels, rotation=90 if max(map(len, labels)) > 2 else 0, fontsize=9 if n < 14 else 7)
        axes.set_yticks(range(n), labels, fontsize=9 if n < 14 else 7)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    axes.set_xlabel("test data of client")
    axes.set_ylabel("model of client")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
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


def _swarm(x: np.ndarray, bins: int = 48, reach: float = 0.3) -> np.ndarray:
    """Return heights that keep markers of near values apart, from the middle outwards; the same for the same values."""
    span = float(x.max() - x.min()) or 1.0
    cells = np.floor((x - x.min()) / span * bins).astype(int)
    heights = np.zeros(len(x))
    crowd = max(np.bincount(cells).max(), 1)
    step = min(0.12, 2 * reach / crowd)
    seen: dict[int, int] = {}
    for index in np.argsort(x, kind="stable"):
        count = seen.get(int(cells[index]), 0)
        seen[int(cells[index])] = count + 1
        heights[index] = step * ((count + 1) // 2) * (1 if count % 2 else -1)
    return heights


def _or(value: Any, other: float) -> float:
    return float(value) if is_number(value) else other
