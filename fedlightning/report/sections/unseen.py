"""Section about clients that took no part in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlightning.report.cells import Column, interval_of, is_number, summary
from fedlightning.report.context import METHOD, SEEDS, Context, Row
from fedlightning.report.figures.dots import Dot, dot_plot
from fedlightning.report.html import Section, Table
from fedlightning.study.columns import GLOBAL


def unseen(context: Context) -> Section | None:
    """Show the scores of held-out clients, apart from those of the clients that trained."""
    rows = context.study.unseen()
    if not rows:
        return None
    rows, better = context.best_first(rows), context.better
    columns = [
        METHOD,
        Column("mean", "mean", radius="ci95_radius", group="unseen clients", better=better,
               help="the model that an unseen client deploys after one message (stage L1), ± half the 95 % interval"),
        Column("worst", "worst", group="unseen clients", better=better, help="worst-served unseen client"),
        Column(GLOBAL, "global model", group="unseen clients", better=better, help="the server's latest model (stage G)"),
        Column("best_global", "best global", group="unseen clients", better=better,
               help="the global model with the best validation score of the clients that trained"),
        Column("trained", "mean", group="clients that trained", help="their deployed models, as in the overview"),
        Column("gap", "difference", "difference", interval="gap_ci95", group="clients that trained",
               help="unseen minus trained: of other clients with other data"),
        SEEDS,
    ]  # fmt: skip
    table = context.table(
        "unseen", f"Test {context.metric} of clients that took no part in training", columns, rows, _notes(rows)
    )
    parts: list[Any] = [table]
    scored = [row for row in rows if is_number(row["mean"])]
    if scored:
        lines = [context.line(row["method"], [Dot(row["mean"], interval_of(row))]) for row in scored]
        picture = context.picture(
            "unseen",
            f"Mean test {context.metric} of unseen clients",
            f"Dots: mean test {context.metric} of unseen clients: {summary([(r['method'], r['mean']) for r in scored])}.",
            lambda: dot_plot(lines, f"test {context.metric}, mean over unseen clients"),
        )
        parts = [context.gallery([picture], table, open=True), _by_client(context, scored)]
    return context.section(
        "unseen",
        "Clients that come later",
        "Unseen clients",
        parts,
        "Held-out clients were kept out of training and are in no other number of this page. Each is given what the method "
        "gives to a client it has never seen, trains nothing, and is scored on its own test data.",
    )


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return the lines below the table: who was held out, and why a method has no scores."""
    clients = list(dict.fromkeys(text for row in rows for text in row["clients"]))
    sentence = f"Held out: {clients[0]}." if len(clients) == 1 else f"Held out, by seed: {'; '.join(clients)}."
    return [sentence, *dict.fromkeys(row["refused"] for row in rows if row["refused"])]


def _by_client(context: Context, rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(client for row in rows for client in row["per_client"]))
    lines = [{"client": name} | {f"@{row['method']}": row["per_client"].get(name) for row in rows} for name in names]
    columns = [Column("client", "client", "text"), *(Column(f"@{row['method']}", row["method"]) for row in rows)]
    caption = f"Test {context.metric} of each unseen client, mean over the seeds that held it out"
    return context.table("unseen-clients", caption, columns, lines)
