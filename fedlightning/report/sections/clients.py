"""Sections about clients: the scores of each one, and each model on every client's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedlightning.report.cells import Column, Kind, counted, is_number, is_ranked, summary
from fedlightning.report.context import METHOD, Context
from fedlightning.report.figures.client_maps import NARROW, client_map, heat_map, strips
from fedlightning.report.html import Gallery, Section, Table
from fedlightning.study.client_failures import site_of

MAX_MATRIX_CLIENTS = 16
"""Up to this many clients, the whole matrix is shown; with more, a summary of each row (and the whole as CSV)."""


def clients(context: Context) -> Section | None:
    """Show every client's score with every method, and against its own siloed model."""
    scores = context.by_client("score")
    methods = list(scores)
    if not methods:
        return None
    siloed = context.siloed
    gains = {} if siloed is None else {m: column for m, column in context.by_client("gain").items() if m != siloed}
    names = list(dict.fromkeys(client for column in scores.values() for client in column))
    shown, what = (gains, context.over(str(siloed))) if gains else (scores, f"test {context.metric}")
    means = [(method, float(np.mean([v for v in column.values() if is_number(v)]))) for method, column in shown.items()]
    picture = context.picture(
        "clients",
        f"{what[:1].upper()}{what[1:]} of each client",
        f"Heat map: {what} of each client (rows) with each method (columns); means {summary(means)}.",
        lambda: client_map(shown, bool(gains)),
    )
    table = by_client_table(
        context, "clients", f"Test {context.metric} of each client's deployed model, mean over seeds", scores, names
    )
    reading = "Blue: better than alone; red: worse." if gains else ""
    return context.section(
        "clients",
        "Which client gets what",
        "Clients",
        [
            context.gallery([picture], table, reading, open=False, wide=len(shown) > NARROW),
            _gains(context, names),
            _harm(context),
        ],
    )


def _harm(context: Context) -> Table | None:
    """Show how many clients lose by each method against training alone, and by how much."""
    rows = context.sort_rows(context.study.negative_transfer())
    columns = [
        METHOD,
        counted("lose", "lose", rows, better="low", help="clients below their own siloed model, by means over seeds"),
        Column("clients", "of", "count"),
        Column("mean_loss", "their mean", "difference"),
        Column("tail", "worst tenth", "difference", better="high", help="mean gain of the worst tenth of the clients"),
        Column("worst", "worst", "difference", better="high"),
        Column("client", "client", "text"),
    ]
    caption = f"Negative transfer: clients that lose against {context.siloed}, and how much"
    return context.table("harm", caption, columns, rows) if rows else None


def by_client_table(
    context: Context,
    name: str,
    caption: str,
    values: Mapping[str, Mapping[str, float | None]],
    clients: Sequence[str],
    kind: Kind = "score",
    better: Any = None,
) -> Table:
    """Return a table with a row a client and a column a method.

    In each row, the best of the methods that have all seeds on the same data is bold.
    """
    sites = {c: site for run in context.study.data.runs for c, site in site_of(run.summary.get("sites", {})).items()}
    rows = [
        {"client": c}
        | ({"site": sites.get(c, c)} if sites else {})
        | {f"@{m}": column.get(c) for m, column in values.items()}
        for c in clients
    ]
    ranked = [row["method"] for row in context.overview if row["method"] in values and is_ranked(row)]
    end = better or context.better
    columns = [Column("client", "client", "text"), *([Column("site", "site", "text")] if sites else [])]
    columns += [Column(f"@{method}", method, kind, better=end if method in ranked else None) for method in values]
    if len(ranked) > 1:
        caption += "; bold: the best of these methods for that client"
    return context.table(name, caption, columns, rows, across=True)


def _gains(context: Context, clients: Sequence[str]) -> Gallery | None:
    """Show each client's gain over its own siloed model, if there is one."""
    siloed = context.siloed
    gains = {method: column for method, column in context.by_client("gain").items() if method != siloed}
    if siloed is None or not gains:
        return None
    picture = context.picture(
        "clients-gain",
        f"Gain of each client over {siloed}",
        "Marks: what each client gains over its score alone; medians: "
        + summary([(m, _median(column)) for m, column in gains.items()]),
        lambda: strips(gains, context.styles, f"{context.over(siloed)}, one mark per client", zero=True),
    )
    caption = f"{context.over(siloed)[:1].upper()}{context.over(siloed)[1:]}, by client, mean over seeds"
    table = by_client_table(context, "clients-gain", caption, gains, clients, "difference", "high")
    return context.gallery([picture], table, "Right of 0: better than alone. Lines: medians.", open=False)


def matrices(context: Context) -> Section | None:
    """Show the score of each client's model (rows) on each client's test data (columns)."""
    matrix_by_method = {
        row["method"]: context.study.matrix(row["method"]) for row in context.overview if row["n_seeds"]
    }
    matrix_by_method = {
        method: matrix
        for method, matrix in matrix_by_method.items()
        if matrix and _mean(matrix, diagonal=False) is not None
    }
    if not matrix_by_method:
        return None
    values = [value for matrix in matrix_by_method.values() for value in _numbers(matrix)]
    limits = (min(values), max(values)) if max(values) > min(values) else (min(values) - 0.5, max(values) + 0.5)
    pictures = [
        context.picture(
            f"matrix-{context.slugs[method]}",
            method,
            f"Heat map: {context.metric} of each client's {method} model (rows) on each client's test data (columns): "
            + summary([("own data", _mean(matrix, diagonal=True)), ("others' data", _mean(matrix, diagonal=False))]),
            partial(heat_map, matrix["clients"], matrix["values"], f"test {context.metric}", limits),
        )
        for method, matrix in matrix_by_method.items()
    ]
    tone, others = ("bright", "dark") if context.higher else ("dark", "bright")
    return context.section(
        "matrix",
        "Every model on every client's data",
        "Matrix",
        [context.gallery(pictures, _matrix_table(context, matrix_by_method), "All maps share one scale of colours.")],
        f"How well a client's model generalises to the other clients. A {tone} diagonal on a {others} ground is a model "
        "that fits its own client only; an even map is one model for all.",
    )


def _matrix_table(context: Context, matrix_by_method: Mapping[str, Mapping[str, Any]]) -> Table:
    names = next(iter(matrix_by_method.values()))["clients"]
    rows: list[dict[str, Any]] = []
    for method, matrix in matrix_by_method.items():
        for source, line in zip(matrix["clients"], matrix["values"], strict=True):
            place = matrix["clients"].index(source)
            others = [value for i, value in enumerate(line) if i != place and is_number(value)]
            rows.append(
                {
                    "method": method,
                    "source": source,
                    "own": line[place],
                    "others": float(np.mean(others)) if others else None,
                    "lowest": min(others, default=None),
                    "highest": max(others, default=None),
                }
                | {f"on {client}": value for client, value in zip(matrix["clients"], line, strict=True)}
            )
    columns = [Column("method", "method", "method"), Column("source", "model of", "text")]
    columns += [Column("own", "own data"), Column("others", "others, mean")]
    if len(names) <= MAX_MATRIX_CLIENTS:
        columns += [Column(f"on {name}", name, group="on the test data of client") for name in names]
        return context.table("matrix", f"Test {context.metric}: whose model on whose data", columns, rows)
    columns += [Column("lowest", "others, lowest"), Column("highest", "others, highest")]
    notes = [f"All {len(names)} columns of each map are in comparison.json (data = client:NAME)."]
    return context.table("matrix", f"Test {context.metric} of each model on other clients' data", columns, rows, notes)


def _median(scores: Mapping[str, float | None]) -> float | None:
    values = [value for value in scores.values() if is_number(value)]
    return float(np.median(values)) if values else None


def _numbers(matrix: Mapping[str, Any]) -> list[float]:
    return [value for line in matrix["values"] for value in line if is_number(value)]


def _mean(matrix: Mapping[str, Any], diagonal: bool) -> float | None:
    """Return the mean score on clients' own data, or on that of the others."""
    lines = enumerate(matrix["values"])
    values = [v for i, line in lines for j, v in enumerate(line) if (i == j) == diagonal and is_number(v)]
    return float(np.mean(values)) if values else None
