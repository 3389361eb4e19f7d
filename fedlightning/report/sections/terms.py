"""Section about the terms on which the methods were trained."""

from __future__ import annotations

from fedlightning.report.cells import Column
from fedlightning.report.context import METHOD, Context
from fedlightning.report.html import Section

_STATES = {"keep": "kept", "reset": "new in every visit"}
_COLUMNS = [
    METHOD,
    Column("state", "optimizers", "text", help="their state between visits: kept, or new in every visit"),
    Column("weighting", "weights", "text", help="by what clients are weighted in the mean"),
    Column("local_steps", "federated", "count", group="local steps, all clients"),
    Column("own_steps", "own models", "count", group="local steps, all clients", help="on models that never travel"),
    Column("fine_tuning_steps", "fine-tuning", "count", group="local steps, all clients", help="after the last round"),
    Column("candidates", "candidates", "count", group="choice by validation data",
           help="models that the best checkpoint was chosen from; 0: the last model is deployed"),
    Column("selections", "passes", "count", group="choice by validation data",
           help="over clients' validation data, with which they chose or weighted models in their visits"),
]  # fmt: skip


def terms(context: Context) -> Section | None:
    """Show each method's optimizer state, weighting, step and tuning budgets, and say what differs."""
    lines = [line for line in context.study.terms() if line["local_steps"] is not None]
    if not lines:
        return None
    rows = [
        line
        | {
            "state": _STATES.get(str(line["optimizer_state"]), "")
            + (" (no memory)" if line["optimizer_memory"] is False else ""),
            "weighting": line["weighting"] or "nothing is averaged",
        }
        for line in lines
    ]
    differ = [problem.text for problem in context.study.problems if problem.kind == "unequal_terms"]
    equal = ["All methods were trained on equal terms but for the numbers above."] if len(rows) > 1 else []
    sentences = differ or equal
    notes = ["“no memory”: SGD without momentum or schedule, for which keeping and resetting are the same.", *sentences]
    table = context.table("terms", "Terms of training", _COLUMNS, rows, notes, seeds=False)
    return context.section("terms", "On which terms each method was trained", "Terms", [table])
