"""Figures of clients: scores against siloed training, spread of gains, every model on every client's data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedlightning.study.report.cells import is_number
from fedlightning.study.report.drawing import clients_below, no_value, panel, rows_of
from fedlightning.study.report.styles import BAD, INK, SEQUENTIAL, Style, short_names

MANY = 24
"""Up to this many clients are named; more are drawn in the order of their scores."""
Scores = Mapping[str, float | None]
"""Client -> score."""


def client_bars(
    scores: Scores, reference: Scores | None, style: Style, ylabel: str, reference_name: str = "siloed", top: float = 1
) -> Figure:
    """Draw a bar for each client, with the reference as a line across it. A red cross shows a missing score."""
    clients = list(scores)
    many = len(clients) > MANY
    if many:
        clients.sort(key=lambda client: -_or(scores[client], -math.inf))
    figure, axes = panel()
    places = np.arange(len(clients))
    axes.bar(places, [_or(scores[client], 0.0) for client in clients], 0.9 if many else 0.72, color=style.colour)
    lost = [place for place, client in enumerate(clients) if not is_number(scores[client])]
    if lost:
        axes.plot(lost, [0.03 * top] * len(lost), "x", color=BAD, markersize=8, markeredgewidth=2, label="no value")
    if reference is not None:
        heights = [_or(reference.get(client), math.nan) for client in clients]
        if many:
            axes.plot(places, heights, ".", color=INK, markersize=3, label=reference_name)
        else:
            axes.hlines(heights, places - 0.43, places + 0.43, color=INK, linewidth=2, label=reference_name)
    names = [] if many else list(short_names(clients, 14).values())
    long = max(map(len, names), default=0) * len(clients) > 44
    clients_below(axes, names, len(clients), "highest", upright=long)
    axes.set_ylabel(ylabel)
    axes.set_ylim(0, top * 1.02)
    if reference is not None or lost:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.1, handlelength=1.4)
    return figure


def strips(values: Mapping[str, Scores], styles: Mapping[str, Style], xlabel: str) -> Figure:
    """Draw a line of markers for each method, one marker a client, with the median as a bar."""
    figure, axes = panel(height=min(9.0, 0.85 + 0.34 * max(2, len(values))))
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
            colour = BAD if math.isnan(value) else "white" if value < middle else INK
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
