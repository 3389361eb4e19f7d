"""Write the pages of published tables and of the five sources from recorded verdicts: ``python -m tools.reproduce_page``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.reproduce import find_tables
from fedlightning.experiments.reproduce.published_tables import WHOLE, Cell, Table
from fedlightning.experiments.reproduce.results import (
    BAD,
    INCONCLUSIVE,
    Line,
    Verdict,
    expected_by_chance,
    judge,
    row_of,
    sentence_of_plan,
    times,
    verdict_counts,
)
from fedlightning.experiments.reproduce.verdict_files import moved_goals, read_record
from fedlightning.experiments.yaml_blocks import read_yaml

PAGE = Path(__file__).resolve().parents[1] / "docs/results/reproduce.md"
HEAD = """# Published tables, run again

Made by `python -m tools.reproduce_page` from the verdicts that are recorded in `configs/reproduce/recorded`.
Run any of them with `fedlightning reproduce NAME --data-root DIR`; [the rule of
verdicts](../how-to/reproduce.md#verdicts) was fixed before. In brackets: interval over seeds (Student's t).
"""


def page(tables: Sequence[Table]) -> str:
    """Return the page of the tables, `docs/results/reproduce.md`."""
    records = {table.name: read_record(table.path) for table in tables}
    every = [line for record in records.values() for line in record.values()]
    expected = expected_by_chance(map(_line, every))
    total = sum(len(table.cells) + len(table.orders) for table in tables)
    never = total - sum(name in records[table.name] for table in tables for name in _names(table))
    parts = [
        HEAD,
        f"All tables: {verdict_counts(line['verdict'] for line in every)}. {expected} Of {total} cells and orders {never} "
        "were never run here.\n",
        _overview(tables, records),
    ]
    return "\n".join([*parts, *(_section(table, records[table.name]) for table in tables)])


def _names(table: Table) -> list[str]:
    return [line.name for line in (*table.cells, *table.orders)]


def _overview(tables: Sequence[Table], records: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| table | published in | sets: minutes on two cores | verdicts |", "|---|---|---|---|"]
    for table in tables:
        words = [line["verdict"] for line in records[table.name].values()]
        never = sum(name not in records[table.name] for name in _names(table))
        told = verdict_counts([*words, *["never run"] * never])
        link = f"[{table.name}](#{table.name.replace('_', '-')})"
        lines.append(f"| {link} | {_cell(table.source.paper)} | {times(table)} | {told} |")
    return "\n".join(lines) + "\n"


def _section(table: Table, record: Mapping[str, Any]) -> str:
    source = table.source
    parts = [
        f"({table.name.replace('_', '-')})=\n## {table.title}\n",
        f"`{table.name}`. {source.paper}, {source.table}. {source.link}\n",
        f"*Claim.* {table.claim}\n",
        f"*Setting.* {table.setting}\n",
    ]
    if table.departures:
        parts.append(f"*Ours differs.* {' '.join(table.departures)}\n")
    if table.tuned_on_test:
        parts.append("The paper chose values on test data.\n")
    known = [(cell, _line(record[cell.name])) for cell in table.cells if cell.name in record]
    if known:
        rows = [_cells(replace(line, published=cell.published, tolerance=cell.tolerance)) for cell, line in known]
        parts.append("\n".join(["| cell | published | ours | verdict |", "|---|--:|--:|---|", *rows]) + "\n")
    orders = [_line(record[order.name]) for order in table.orders if order.name in record]
    if orders:
        rows = [_cells(line) for line in orders]
        parts.append("\n".join(["| order | difference | verdict |", "|---|--:|---|", *rows]) + "\n")
    if not record:
        parts.append("It has not been run here yet.\n")
    parts += [] if table.exact or not record else [f"*Plan.* {sentence_of_plan(table)}\n"]
    parts += [*_earlier_looks(record), *_other_tolerances(table, record)]
    parts += [f"*Why: {name}.* {text}\n" for name, text in _reasons(table, known, orders).items()]
    faults = {"Detects (planted and seen)": table.detects, "Is meant to detect (not planted)": table.aims_at}
    faults["Cannot detect"] = table.cannot_detect
    parts.append(" ".join(f"*{heading}:* {'; '.join(texts)}." for heading, texts in faults.items() if texts) + "\n")
    parts += [f"**{text}**\n" for text in moved_goals(table)]
    for commit in dict.fromkeys(line["commit"] for line in record.values()):
        seeds = dict.fromkeys(seed for line in record.values() if line["commit"] == commit for seed in line["values"])
        parts.append(f"Run at commit `{commit}` with seeds {', '.join(seeds)}.\n")
    return "\n".join(parts)


def _reasons(table: Table, known: Sequence[tuple[Cell, Line]], orders: Sequence[Line]) -> dict[str, str]:
    found: dict[str, str] = {}
    told = [(table.reason(cell), line) for cell, line in known] + [(table.why.get(WHOLE, ""), line) for line in orders]
    for text, line in told:
        if text and line.verdict.word in (*BAD, INCONCLUSIVE):
            found[next(key for key, value in table.why.items() if value == text)] = text
    return found


def _line(recorded: Mapping[str, Any]) -> Line:
    """Return a recorded line as it was when it was judged."""
    word, why = recorded["verdict"], recorded["note"]
    confidence = recorded.get("confidence", 0.95)
    verdict = Verdict(word, recorded["mean"], recorded["low"], recorded["high"], why, confidence)
    values, published = recorded["values"], recorded["published"]
    looks = [*(look["seeds"] for look in recorded.get("looks", ())), len(values)]
    return Line(recorded["name"], verdict, values, published=published, tolerance=recorded["tolerance"], looks=looks)


def _other_tolerances(table: Table, record: Mapping[str, Any]) -> list[str]:
    """Return sentences on the verdicts that the cells would have with other tolerances."""
    sentences = []
    for tolerance in table.tolerances:
        words = [
            judge(list(line["values"].values()), line["published"], tolerance, confidence=table.confidence).word
            for line in record.values()
            if line["published"] is not None and line["values"]
        ]
        sentences.append(f"With a tolerance of {tolerance:g} for all cells: {verdict_counts(words)}.\n")
    return sentences


def _earlier_looks(record: Mapping[str, Any]) -> list[str]:
    """Return sentences on the verdicts of the looks before the last."""
    words: dict[int, list[str]] = {}
    for line in record.values():
        for look in line.get("looks", ()):
            words.setdefault(look["seeds"], []).append(look["verdict"])
    return [f"The look at {seeds} seeds: {verdict_counts(words[seeds])}.\n" for seeds in sorted(words)]


def _cells(line: Line) -> str:
    """Return a row of a table in Markdown."""
    return "| " + " | ".join(_cell(text) for text in row_of(line).values() if text) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- the five sources --------------------------------------------------------------------------------------------------
SOURCES = PAGE.with_name("sources.md")
ITEMS = PAGE.parent / "data/sources.yaml"
STATES = {
    "exact": "run exactly",
    "smaller": "run smaller",
    "stand-in": "run on other data",
    "configured": "configured, not run",
    "tool": "computed, not recorded",
    "no data": "data not to be had",
    "not done": "not done",
    "nothing": "nothing to run",
}
SOURCES_HEAD = """# The five sources, table by table

Made by `python -m tools.reproduce_page` from `docs/results/data/sources.yaml` and the recorded verdicts: each table and
figure of the five papers that this package is about, what was run of it, and why the rest was not.
Verdicts are those of all cells and orders of [the tables](reproduce.md) that are named.
"""


def read_items() -> dict[str, list[dict[str, Any]]]:
    """Return source -> its tables and figures.

    Raises:
        InputError: If the file cannot be read.
    """
    return {source: list(rows) for source, rows in read_yaml(ITEMS).items()}


def sources_page(tables: Sequence[Table]) -> str:
    """Return the page of the five sources, `docs/results/sources.md`."""
    known = {table.name: table for table in tables}
    items = read_items()
    counts = Counter(_state(row, known) for rows in items.values() for row in rows)
    told = ", ".join(f"{counts[state]} {words}" for state, words in STATES.items() if counts[state])
    parts = [SOURCES_HEAD, f"{counts.total()} rows: {told}.\n"]
    for source, rows in items.items():
        lines = ["| table or figure | what | state | from | why, and verdicts |", "|---|---|---|---|---|"]
        parts += [f"## {source}\n", "\n".join([*lines, *(_item(row, known) for row in rows)]) + "\n"]
    return "\n".join(parts)


RUN = ("exact", "smaller", "stand-in")


def _state(row: Mapping[str, Any], known: Mapping[str, Table]) -> str:
    """Return the state of a row: what is said to be run has a record, or its tables are configured alone."""
    names = row.get("tables", [])
    recorded = not names or any(read_record(known[name].path) for name in names)
    return str(row["state"]) if row["state"] not in RUN or recorded else "configured"


def _item(row: Mapping[str, Any], known: Mapping[str, Table]) -> str:
    """Return a line of the page."""
    names = row.get("tables", [])
    places = [f"[{name}](reproduce.md#{name.replace('_', '-')})" for name in names]
    places += [f"`{path}`" for path in row.get("configs", [])]
    places += [f"[{row['page']}]({row['page']})"] if "page" in row else []
    state, words = _state(row, known), []
    for table in (known[name] for name in names if state in RUN):
        record = read_record(table.path)
        words += [line["verdict"] for line in record.values()]
        words += ["never run" for name in _names(table) if name not in record]
    notes = [row.get("why", ""), verdict_counts(words)]
    if state == "configured":
        minutes = sum(max(known[name].minutes.values()) for name in names)
        long = f"{minutes / 60:.0f} hours" if minutes >= 60 else f"{minutes:g} minutes"
        notes.append(f"about {long} of two cores" if minutes else "")
    told = ". ".join(_cell(note) for note in notes if note)
    return f"| {_cell(row['item'])} | {_cell(row.get('what', ''))} | {STATES[state]} | {', '.join(places)} | {told} |"


if __name__ == "__main__":
    every = find_tables([])
    for path, text in ((PAGE, page(every)), (SOURCES, sources_page(every))):
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(FOLDER.parents[1]))
