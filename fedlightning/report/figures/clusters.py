"""Figure of clusters: where each client was, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedlightning.report.drawing import panel
from fedlightning.report.figures.clients import MANY
from fedlightning.report.figures.partition import CLASSES, colour_of
from fedlightning.report.styles import INK, short_names
from fedlightning.study.clusters import Places
from fedlightning.study.runs import natural

LEGEND = len(CLASSES)
"""Most clusters that the legend names."""
UNKNOWN = "#e6e9ec"
"""Colour of a client that has no cluster yet."""


def membership_map(places: Places, groups: Mapping[str, str] | None = None) -> Figure:
    """Draw a row for each client and a column for each round, in the colour of the cluster that it belongs to most.

    The smaller its share, the paler the colour; grey where the client had no cluster yet. Clients stand by their planted
    groups, with lines between these, then by their last clusters.
    """
    names = sorted({cluster for of in places.values() for cluster, _ in of.values()}, key=natural)
    colours = {name: np.array(to_rgb(colour_of(index, len(names)))) for index, name in enumerate(names)}
    clients = _in_order(places, groups or {}, names)
    rounds = max(max(of) for of in places.values())
    image = np.tile(np.array(to_rgb(UNKNOWN)), (len(clients), rounds, 1))
    for row, client in enumerate(clients):
        for number, (cluster, share) in places[client].items():
            image[row, number - 1] = 1 - share * (1 - colours[cluster])
    many = len(clients) > MANY
    figure, axes = panel(height=3.2 if many else 0.9 + 0.2 * max(4, len(clients)))
    axes.grid(visible=False)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0.5, rounds + 0.5, len(clients) - 0.5, -0.5))
    if many:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(clients)} clients")
    else:
        short = short_names(clients, 14)
        axes.set_yticks(range(len(clients)), [short[client] for client in clients])
        axes.hlines(np.arange(1, len(clients)) - 0.5, 0.5, rounds + 0.5, color="white", linewidth=1)
        axes.set_ylabel("client")
    of = [(groups or {}).get(client) for client in clients]
    borders = [row - 0.5 for row in range(1, len(clients)) if of[row] != of[row - 1]]
    axes.hlines(borders, 0.5, rounds + 0.5, color=INK, linewidth=1.8)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("round")
    if len(names) <= LEGEND:
        shown = short_names(names, 18)
        columns = 3 if max(map(len, shown.values())) <= 12 else 2
        figure.set_figheight(figure.get_figheight() + 0.24 * -(-len(names) // columns))
        handles = [Patch(color=to_hex(colours[name].tolist()), label=shown[name]) for name in names]
        figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=1.1, columnspacing=1.2)
    return figure


def _in_order(places: Places, groups: Mapping[str, str], clusters: Sequence[str]) -> list[str]:
    """Return the clients by planted group, last cluster and name; those without a group come last."""
    last = {client: clusters.index(of[max(of)][0]) for client, of in places.items()}
    group = {client: (client not in groups, natural(groups.get(client, ""))) for client in places}
    return sorted(places, key=lambda client: (group[client], last[client], natural(client)))
