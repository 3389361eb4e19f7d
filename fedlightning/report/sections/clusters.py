"""Section about clusters of clients: who belongs to which, over rounds."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedlightning.report.cells import Column, counted, number
from fedlightning.report.context import METHOD, SEEDS, Context, Row
from fedlightning.report.figures.clients import MANY
from fedlightning.report.figures.clusters import LEGEND, membership_map
from fedlightning.report.html import Gallery, Section
from fedlightning.study.clusters import by_seed, planted_groups


def clusters(context: Context) -> Section | None:
    """Show where each client was over rounds, how many clusters there are, and whether planted groups were found."""
    rows = context.in_order(context.study.clusters())
    if not rows:
        return None
    columns = [
        METHOD,
        counted("clusters", "at the end", rows, group="clusters with a client", help="after the last round"),
        counted("most", "at most", rows, group="clusters with a client", help="the most after any round"),
        Column("changes", "a client", decimals=2, group="changes", help="how often it is in another cluster than before"),
        Column("changed", "of clients", "percent", group="changes", help="clients that ever change"),
        counted("last_change", "last in round", rows, group="changes", help="0: none ever changes"),
        Column("share", "share", decimals=2, help="how much of a client belongs to its cluster, at the end"),
        Column("agreement", "agreement", radius="agreement_radius", better="high",
               help="adjusted Rand index with the planted groups: 1 the same, 0 as by chance"),
        SEEDS,
    ]  # fmt: skip
    notes = ["A client is in the cluster that it belongs to most. A cluster that is divided counts as a change for all who "
             "are in one with a new name."]  # fmt: skip
    known = any(row["agreement"] is not None for row in rows)
    notes += [
        "Agreement: adjusted Rand index of the last clusters and the groups that the data module planted."
    ] * known
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
    pictures, grouped, many, several = [], False, False, len(context.study.seeds) > 1
    for row in rows:
        method = row["method"]
        seed, places = next(iter(by_seed(context.study, method).items()))
        groups = planted_groups(context.study.finished[method, seed].run)
        grouped |= len({groups.get(client) for client in places}) > 1
        many |= len({cluster for of in places.values() for cluster, _ in of.values()}) > LEGEND
        of = [line for line in lines if line["method"] == method]
        pictures.append(
            context.picture(
                f"clusters-{context.slugs[method]}",
                method + (f", seed {seed}" if several else ""),
                f"Map: the cluster of each of {len(places)} clients over rounds; at the end {_sizes(of)}.",
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
        reading += " Black lines part the planted groups."
    if many:
        reading += f" More than {LEGEND} clusters have no legend; the table names them."
    return context.gallery(pictures, table, reading, open=len(lines) <= MANY)


def _sizes(lines: list[dict[str, Any]]) -> str:
    sizes: dict[str, int] = {}
    for line in lines:
        sizes[line["cluster"]] = sizes.get(line["cluster"], 0) + 1
    listed = [f"{number(count, 0)} in {name}" for name, count in sorted(sizes.items(), key=lambda one: -one[1])]
    return ", ".join(listed[:12]) + (f", and {len(listed) - 12} more clusters" if len(listed) > 12 else "")


def _silent(row: Row, column: Column) -> None:
    """Return no reason: what is empty here does not depend on scores."""
