"""Section about clusters of clients: who belongs to which, over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedlightning.report.cells import Column, counted, number
from fedlightning.report.context import METHOD, SEEDS, Context, Row
from fedlightning.report.drawing import count_along_x, panel
from fedlightning.report.figures.client_maps import MAX_NAMED_CLIENTS
from fedlightning.report.figures.partition_bars import CLASSES, colour_of
from fedlightning.report.html import Gallery, Section
from fedlightning.report.styles import INK, short_names
from fedlightning.study.cluster_members import Places, by_seed, planted_groups
from fedlightning.study.finished_runs import natural

LEGEND = len(CLASSES)
"""Most clusters that the legend names."""
UNKNOWN = "#e6e9ec"
"""Colour of a client that has no cluster yet."""


def membership_map(places: Places, groups: Mapping[str, str] | None = None) -> Figure:
    """Draw a row for each client and a column for each round, in the colour of the cluster that it belongs to most.

    The smaller its share, the paler the colour; grey where the client had no cluster yet. Clients stand by their planted
    groups, with lines between these, then by their last clusters.
    """
    names = sorted({cluster for track in places.values() for cluster, _ in track.values()}, key=natural)
    colours = {name: np.array(to_rgb(colour_of(index, len(names)))) for index, name in enumerate(names)}
    clients = _in_order(places, groups or {}, names)
    rounds = max(max(track) for track in places.values())
    image = np.tile(np.array(to_rgb(UNKNOWN)), (len(clients), rounds, 1))
    for row, client in enumerate(clients):
        for time, (cluster, share) in places[client].items():
            image[row, time - 1] = 1 - share * (1 - colours[cluster])
    many = len(clients) > MAX_NAMED_CLIENTS
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
    group_names = [(groups or {}).get(client) for client in clients]
    borders = [row - 0.5 for row in range(1, len(clients)) if group_names[row] != group_names[row - 1]]
    axes.hlines(borders, 0.5, rounds + 0.5, color=INK, linewidth=1.8)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    count_along_x(axes)
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
    last = {client: clusters.index(track[max(track)][0]) for client, track in places.items()}
    group = {client: (client not in groups, natural(groups.get(client, ""))) for client in places}
    return sorted(places, key=lambda client: (group[client], last[client], natural(client)))


def clusters(context: Context) -> Section | None:
    """Show where each client was over rounds, how many clusters there are, and whether planted groups were found."""
    rows = context.sort_rows(context.study.clusters())
    if not rows:
        return None
    columns = [
        METHOD,
        counted("clusters", "at the end", rows, group="clusters with a client", help="after the last round"),
        counted("most", "at most", rows, group="clusters with a client", help="the most after any round"),
        Column("changes", "per client", decimals=2, group="changes", help="how often it is in another cluster than before"),
        Column("changed", "of clients", "percent", group="changes", help="clients that ever change"),
        counted("last_change", "last in round", rows, group="changes", help="0: none ever changes"),
        Column("share", "share", decimals=2, help="how much of a client belongs to its cluster, at the end"),
        Column("agreement", "agreement", radius="agreement_radius", better="high",
               help="adjusted Rand index with the planted groups: 1 the same, 0 as by chance"),
        SEEDS,
    ]  # fmt: skip
    notes = ["A client is in the cluster that it belongs to most. A cluster that is divided counts as a change for all who "
             "are in one with a new name."]  # fmt: skip
    planted = any(row["agreement"] is not None for row in rows)
    notes += [
        "Agreement: adjusted Rand index of the last clusters and the groups that the data module planted."
    ] * planted
    table = context.table("clusters", "Clusters of each method, means over clients", columns, rows, notes, _silent)
    return context.section(
        "clusters",
        "Who belongs to which cluster",
        "Clusters",
        [table, _maps(context, rows)],
        "Methods with several models at the server decide whose updates make which model.",
    )


def _maps(context: Context, rows: list[dict[str, Any]]) -> Gallery | None:
    lines = context.study.memberships()
    pictures, grouped, many, several = [], False, False, len(context.study.data.seeds) > 1
    for row in rows:
        method = row["method"]
        seed, places = next(iter(by_seed(context.study.data, method).items()))
        groups = planted_groups(context.study.data.finished[method, seed].run)
        grouped |= len({groups.get(client) for client in places}) > 1
        many |= len({cluster for by_round in places.values() for cluster, _ in by_round.values()}) > LEGEND
        lines_of_method = [line for line in lines if line["method"] == method]
        pictures.append(
            context.picture(
                f"clusters-{context.slugs[method]}",
                method + (f", seed {seed}" if several else ""),
                f"Map: the cluster of each of {len(places)} clients over rounds; at the end {_sizes(lines_of_method)}.",
                partial(membership_map, places, groups),
            )
        )
    columns = [
        *([METHOD] if len(rows) > 1 else []),
        Column("client", "client", "text"),
        Column("group", "planted group", "text"),
        Column("first", "first", "text", group="cluster"),
        Column("cluster", "last", "text", group="cluster"),
        Column("share", "share", decimals=2, group="cluster"),
        counted("changes", "changes", lines),
    ]
    first = "at the first seed; changes are means over seeds" if several else ""
    whose = "" if len(rows) > 1 else f" with {rows[0]['method']}"
    caption = f"Where each client began and ended{whose}" + (f" ({first})" if several else "")
    table = context.table("memberships", caption, columns, lines, missing=_silent)
    reading = (
        "A row a client, a column a round, in the colour of its cluster; paler where less of it belongs there; grey: none "
        "yet."
    )
    if several:
        reading += " Pictures are of the first seed: clusters of two runs have only their names in common."
    if grouped:
        reading += " Strong lines part the planted groups."
    if many:
        reading += f" More than {LEGEND} clusters have no legend; the table names them."
    return context.gallery(pictures, table, reading, open=len(lines) <= MAX_NAMED_CLIENTS)


def _sizes(lines: list[dict[str, Any]]) -> str:
    sizes: dict[str, int] = {}
    for line in lines:
        sizes[line["cluster"]] = sizes.get(line["cluster"], 0) + 1
    listed = [f"{number(count, 0)} in {name}" for name, count in sorted(sizes.items(), key=lambda pair: -pair[1])]
    return ", ".join(listed[:12]) + (f", and {len(listed) - 12} more clusters" if len(listed) > 12 else "")


def _silent(row: Row, column: Column) -> None:
    """Return no reason: what is empty here does not depend on scores."""
