"""Section about clients that failed, and what grew by orders of magnitude."""

from __future__ import annotations

from typing import Any

from fedlightning.report.cells import Column
from fedlightning.report.context import METHOD, Context
from fedlightning.report.html import Section, Table
from fedlightning.study.client_failures import failure_rows

RUN = (METHOD, Column("seed", "seed", "text"), Column("client", "client", "text"))


def failures(context: Context) -> Section | None:
    """Show who failed where, in which rounds and why, and what came of it."""
    return context.section(
        "failures",
        "Clients that failed",
        "Failures",
        [_failures(context), _warnings(context)],
        "What a client that failed contributed is not in the numbers above: its update was left out of the round, or its "
        "score out of the means.",
    )


def _failures(context: Context) -> Table | None:
    rows: list[dict[str, Any]] = []
    for (method, seed), scores in context.study.data.finished.items():
        failures = failure_rows(scores.run.summary.get("failures", []), scores.run.summary.get("sites"))
        rows += [{"method": method, "seed": str(seed)} | row for row in failures]
    columns = [
        *RUN,
        *([Column("site", "site", "text")] if any("site" in row for row in rows) else []),
        Column("where", "where", "text", help="training, or the stage whose model could not be scored"),
        Column("rounds", "rounds", "text"),
        Column("count", "times", "count"),
        Column("reason", "reason", "text"),
        Column("decision", "decision", "text"),
    ]
    return context.table("failures", "Failures by client and reason", columns, rows, seeds=False) if rows else None


def _warnings(context: Context) -> Table | None:
    rows: list[dict[str, Any]] = []
    for (method, seed), scores in context.study.data.finished.items():
        for warning in scores.run.summary.get("warnings", []):
            texts = {key: None if warning.get(key) is None else str(warning[key]) for key in ("round", "what", "entry")}
            sizes = {key: f"{float(warning[key]):.3g}" for key in ("value", "usual") if warning.get(key) is not None}
            rows.append({"method": method, "seed": str(seed), "client": warning["client"]} | texts | sizes)
    columns = [
        *RUN,
        Column("round", "round", "text"),
        Column("what", "what", "text", help="update: the norm of what the client has changed; else a loss"),
        Column("entry", "entry", "text", help="entry of the model that moved most"),
        Column("value", "value", "text"),
        Column("usual", "usual so far", "text"),
    ]
    caption = "Updates and losses that grew by orders of magnitude"
    return context.table("explosions", caption, columns, rows, seeds=False) if rows else None
