"""Figure of the partition: samples of each class at each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from fedlightning.report.drawing import clients_below, panel
from fedlightning.report.figures.client_maps import MAX_NAMED_CLIENTS
from fedlightning.report.styles import MUTED, short_names

# Classes are not methods, so they have other colours (Tol's "light" and "muted"); their order in a bar helps, too.
CLASSES = (
    "#77aadd", "#ee8866", "#44bb99", "#ffaabb", "#aaaa00", "#99ddff",
    "#eedd88", "#bbcc33", "#aa4499", "#5566aa", "#882255", "#117733",
)  # fmt: skip


def partition_bars(clients: Sequence[str], counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Figure:
    """Draw stacked bars, one a client, the biggest first if there are too many clients to name."""
    table = np.asarray(counts, dtype=np.int64)
    many = len(clients) > MAX_NAMED_CLIENTS
    order = np.argsort(-table.sum(axis=1), kind="stable") if many else np.arange(len(clients))
    table = table[order]
    figure, axes = panel()
    places = np.arange(len(clients))
    bottom = np.zeros(len(clients))
    width = 1.0 if many else 0.8
    shown = short_names(classes, 20)
    for index, name in enumerate(classes):
        colour = MUTED if len(classes) == 1 else colour_of(index, len(classes))
        axes.bar(
            places, table[:, index], width, bottom, color=colour, label=shown[name], edgecolor="white", lw=0 if many else 0.4,
            rasterized=table.size > 1200,
        )  # fmt: skip
        bottom += table[:, index]
    names = [] if many else list(short_names([clients[i] for i in order], 14).values())
    clients_below(axes, names, len(clients), "biggest")
    axes.set_ylabel("samples")
    if 1 < len(classes) <= 12:
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles[::-1], labels[::-1], title="class", loc="outside right center", handlelength=1, labelspacing=0.25
        )
    return figure


def colour_of(index: int, count: int) -> Any:
    """Return the colour of one of several classes, clusters or clients, which are not methods."""
    return CLASSES[index] if count <= len(CLASSES) else colormaps["viridis"](index / (count - 1))
