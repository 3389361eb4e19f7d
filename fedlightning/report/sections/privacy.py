"""Section about what runs have promised: the budget of differential privacy that they have spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlightning.report.cells import Column, is_number
from fedlightning.report.context import METHOD, Context
from fedlightning.report.html import Prose, Section

FILE = "privacy.json"
PROMISE = ("who", "cannot_learn", "provided", "left")
"""Fields of a promise of a callback, which stand in `summary.json`."""


def privacy(context: Context) -> Section | None:
    """Show epsilon and delta of each run, for whom they hold, and what epsilon does not count."""
    accounts = {key: account for key, account in context.read_of_runs(FILE).items() if isinstance(account, dict)}
    promises = _promises(context)
    if not accounts and not promises:
        return None
    rows = [_row(method, seed, account) for (method, seed), account in accounts.items()]
    columns = [
        METHOD,
        Column("seed", "seed", "text"),
        Column("unit", "hides", "text", help="whose part in the training the guarantee is about"),
        Column("epsilon", "epsilon", decimals=3, help="the largest of all clients where each has its own; none: the noise "
               "came from a fixed seed, and nothing is private"),
        Column("known", "participants known", decimals=3, help="the same against whoever knows who took part in which round, "
               "as readers of a run's folder do: drawing clients hides nothing from them"),
        Column("delta", "delta", "text", help="probability with which the guarantee may fail"),
        Column("noise", "noise multiplier", decimals=3),
        Column("clip", "clip", decimals=3, help="the most that one of them may change a sum"),
        Column("rounds", "rounds", "count"),
    ]  # fmt: skip
    table = context.table("privacy", "Differential privacy: what runs have spent", columns, rows, seeds=False)
    notes = map(describe_account, accounts.values())
    return context.section(
        "privacy",
        "What was promised",
        "Privacy",
        [*promises, *([table] if accounts else []), Prose(list(dict.fromkeys(notes)), title="In words")],
        "Each run counts alone, unless it has a ledger: who sees the models of several runs on the same data has the sum of "
        "them. Scores in this report are of test data, and are not counted.",
    )


def describe_account(account: Mapping[str, Any]) -> str:
    """Return what is hidden, from whom, and what was not counted."""
    clear = ", ".join(map(str, account.get("in_the_clear") or [])) or "nothing"
    also = "".join(f" Also: {promise}." for promise in map(str, account.get("also") or []))
    against = account.get("against", "whom is not known")
    return f"{account.get('unit', 'unit')}: against {against}. Not counted: {clear}.{also}"


def _promises(context: Context) -> list[Any]:
    """Return a table of who cannot learn what, of the callbacks of all runs; none where nothing is promised."""
    rows: list[dict[str, Any]] = []
    for scores in context.study.data.finished.values():
        promises = scores.run.summary.get("promises")
        rows += (
            [row for row in promises if isinstance(row, dict) and row not in rows] if isinstance(promises, list) else []
        )
    columns = [Column(name, name.replace("_", " "), "text") for name in ("callback", *PROMISE)]
    title = "Who cannot learn what"
    return [context.table("promises", title, columns, rows, seeds=False)] if rows else []


def _row(method: str, seed: str, account: Mapping[str, Any]) -> dict[str, Any]:
    def number(name: str) -> float | None:
        value = account.get(name)
        return value if is_number(value) else None

    delta = number("delta")
    return {
        "method": method,
        "seed": seed,
        "unit": str(account.get("unit", "")),
        "epsilon": number("epsilon"),
        "known": number("epsilon_participants_known"),
        "delta": "" if delta is None else f"{delta:g}",
        "noise": number("noise_multiplier"),
        "clip": number("clip"),
        "rounds": number("rounds"),
    }
