"""Verdicts in files: `recorded/NAME.json` beside a table, which later ones are held to, and `reproduce.json` of a call."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fedlightning
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.reproduce.published_tables import Table
from fedlightning.experiments.reproduce.results import (
    BAD,
    GOOD,
    INCONCLUSIVE,
    NOT_RUN,
    Line,
    TableRun,
    expected_by_chance,
)
from fedlightning.run.folder import versions
from fedlightning.storage.files import UnreadableError, read_json, write_text_atomically

FORMAT = 1


def record_file(table: Path) -> Path:
    """Return the file with the recorded verdicts of a table."""
    return table.parent / "recorded" / f"{table.stem}.json"


def read_record(table: Path) -> dict[str, dict[str, Any]]:
    """Return name of a cell or order -> what was recorded of it; empty if nothing was.

    Raises:
        InputError: If the file is none that this command has written.
    """
    fault = "holds no verdicts that `reproduce --record` wrote. Take it from the repository again."
    return read_lines(record_file(table), "lines", "name", fault)


def read_lines(path: Path, key: str, name: str, fault: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a file of records by their names; none, if there is no such file.

    Args:
        path: The file.
        key: Key of the entries.
        name: Key of an entry's name.
        fault: What to say of a file that is none of records.

    Raises:
        InputError: If it is none.
    """
    if not path.exists():
        return {}
    try:
        content = read_json(path)
        if content["format"] == FORMAT:
            return {line[name]: line for line in content[key]}
    except (UnreadableError, KeyError, TypeError):
        pass
    raise InputError(f"{path} {fault}")


def write_lines(path: Path, head: Mapping[str, Any], key: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of records, one a line, so that a change of one shows as such."""
    above = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in {"format": FORMAT, **head}.items())
    rows = ",\n  ".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, f'{{\n{above} "{key}": [\n  {rows}\n ]\n}}\n')


def check_look(table: Table, seeds: Sequence[int]) -> None:
    """Refuse to record verdicts of other seeds than the plan has: whoever looks often enough sees what they want.

    Raises:
        InputError: If it is none of the planned looks.
    """
    planned = [list(table.seeds)[:number] for number in table.looks]
    if list(seeds) not in planned:
        looks = " or ".join(", ".join(map(str, look)) for look in planned)
        raise InputError(
            f"--record: {table.name} is judged with the seeds {looks}, not with {', '.join(map(str, seeds))}. Leave out "
            "--record, or write the looks that you want into the table's file before its first run (looks: [5, 10])."
        )


def write_record(table: Table, lines: Sequence[Line]) -> Path:
    """Write the verdicts of a table.

    What was not run keeps what was recorded of it. Nothing that was seen is lost: tolerances and plans keep their history,
    verdicts of other seeds stay as looks, and the verdict of a line that is not in the table any more stays with its name.
    """
    path = record_file(table.path)
    before, kept, now = read_record(table.path), [], commit()
    head = read_json(path) if path.exists() else {}
    versions_by_commit = head.get("versions", {})
    for line in lines:
        old = before.get(line.name)
        if line.verdict.word == NOT_RUN:
            kept += [] if old is None else [old]
            continue
        new = {
            key: value for key, value in line.plain().items() if key not in ("why", "failed", "row", "column", "asked")
        }
        earlier = old.get("earlier", []) if old else []
        if old and _judged_by(old) != _judged_by(new):
            earlier = [*earlier, _judged_by(old)]
        looks = [look for look in _looks(old) if not _has_seeds(look, line)] if old else []
        more = {name: entries for name, entries in (("earlier", earlier), ("looks", looks)) if entries}
        kept.append({**new, "commit": now, **more})
    all_versions = {str(line["commit"]): versions_by_commit.get(str(line["commit"]), versions()) for line in kept} | {
        str(now): versions()
    }
    used = {
        name: packages for name, packages in all_versions.items() if any(str(line["commit"]) == name for line in kept)
    }
    plan, plans = list(table.looks), _plans(head)
    names = {line.name for line in lines}
    gone = {name: old["verdict"] for name, old in before.items() if name not in names}
    history = {
        "earlier_plans": plans if plans[-1:] != [plan] else plans[:-1],
        "taken_out": {**head.get("taken_out", {}), **gone},
    }
    more = {name: entries for name, entries in history.items() if entries}
    write_lines(path, {"table": table.name, "plan": plan, **more, "versions": used}, "lines", kept)
    return path


def _plans(head: Mapping[str, Any]) -> list[list[int]]:
    """Return all plans that lines were recorded by, the last one last."""
    return [*head.get("earlier_plans", []), *([head["plan"]] if "plan" in head else [])]


def _looks(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all looks at a line, the recorded one last."""
    values = line["values"]
    look = {
        "seeds": len(values),
        "which": list(values),
        **{key: line[key] for key in ("verdict", "mean", "low", "high")},
    }
    return [*line.get("looks", []), look]


def _has_seeds(look: Mapping[str, Any], line: Line) -> bool:
    """Return whether a look was at the seeds that a line has now."""
    which = look.get("which")
    return look["seeds"] == len(line.values) if which is None else which == [str(seed) for seed in line.values]


def _judged_by(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"published": line["published"], "tolerance": line["tolerance"]}


def moved_goals(table: Table) -> list[str]:
    """Return a sentence for every tolerance, published value, plan or line that was changed since a verdict was recorded.

    So does one for verdicts that rest on another number of seeds than the plan has.
    """
    now: dict[str, tuple[float | None, float]] = {cell.name: (cell.published, cell.tolerance) for cell in table.cells}
    now |= {order.name: (None, order.margin) for order in table.orders}
    changes = []
    file = record_file(table.path)
    head, record = read_json(file) if file.exists() else {}, read_record(table.path)
    for plan in (plan for plan in _plans(head) if plan != list(table.looks)):
        changes.append(f"the plan was changed from looks at {plan} seeds to looks at {list(table.looks)}")
    gone = {name: verdict for name, verdict in head.get("taken_out", {}).items() if name not in now}
    changes += [f"{name} ({verdict}) was taken out of the table" for name, verdict in gone.items()]
    for name, recorded in record.items():
        for old in [*recorded.get("earlier", []), recorded] if name in now else []:
            published, tolerance = now[name]
            if old["tolerance"] != tolerance:
                how = "widened" if tolerance > old["tolerance"] else "narrowed"
                changes.append(f"the tolerance of {name} was {how} from {old['tolerance']:g} to {tolerance:g}")
            if old["published"] != published:
                changes.append(f"the published value of {name} was changed from {old['published']:g} to {published:g}")
    numbers = Counter(len(line["values"]) for line in record.values() if line["low"] != line["high"])
    off = {number: lines for number, lines in sorted(numbers.items()) if number not in table.looks}
    unplanned = [
        f"{table.name}: verdicts were recorded with {number} seeds, which is none of the planned looks (lines: {lines})."
        for number, lines in off.items()
    ]
    return [f"{table.name}: {text} after a run." for text in dict.fromkeys(changes)] + unplanned


def lost(table: Table, lines: Sequence[Line], seeds: Sequence[int]) -> list[str]:
    """Return a sentence for every cell and order that once agreed and does not now.

    What is not run because data, a package or a set are missing is not a loss; a run that failed is one. With fewer seeds
    than were recorded an inconclusive cell is not a loss either.
    """
    now, sentences = {line.name: line for line in lines}, []
    for name, old in read_record(table.path).items():
        line = now.get(name)
        if old["verdict"] not in GOOD or (line is not None and line.verdict.word in GOOD):
            continue
        if line is None:
            sentences.append(f"{table.name}: {name} once agreed and is not in the table any more.")
            continue
        word = line.verdict.word
        if (word == NOT_RUN and not line.failed) or (word == INCONCLUSIVE and len(seeds) < len(old["values"])):
            continue
        sentences.append(
            f"{table.name}: {name} once agreed, now: {word}{f' ({line.verdict.why})' if line.verdict.why else ''}."
        )
    return sentences


def find_new_disagreements(table: Table, lines: Sequence[Line]) -> list[str]:
    """Return a sentence for every cell and order that disagrees now, and neither did so nor agreed when it was recorded."""
    before = read_record(table.path)
    return [
        f"{table.name}: {line.name} {line.verdict.word}, which no record has."
        for line in lines
        if line.verdict.word in BAD and before.get(line.name, {}).get("verdict") not in (*BAD, *GOOD)
    ]


def commit(root: Path = Path(fedlightning.__file__).parents[1]) -> str | None:
    """Return the commit of this package's repository, with a plus if files were changed since; `None` outside of one.

    Recorded verdicts are no such files: they are written one after another, and compute nothing.
    """
    if not (root / ".git").exists():
        return None
    try:
        head, changed = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=20
            ).stdout
            for words in (
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", "-uno", "--", ".", ":!*/recorded/*.json"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("+" if changed.strip() else "")


# -- all of a call -----------------------------------------------------------------------------------------------------
FILE = "reproduce.json"


def as_json(tables: Sequence[TableRun], lost: Sequence[str], moved: Sequence[str]) -> dict[str, Any]:
    """Return the content of the file.

    Args:
        tables: The tables with what was found.
        lost: Sentences on cells that once agreed and do not now.
        moved: Sentences on tolerances and published values that were changed after a run.
    """
    return {
        "format": 1,
        "commit": commit(),
        "versions": versions(),
        "chance": asdict(expected_by_chance(line for run in tables for line in run.lines)),
        "lost": list(lost),
        "moved": list(moved),
        "tables": [_table(run.table, run.lines, run.seeds) for run in tables],
    }


def _table(table: Table, lines: Sequence[Line], seeds: Sequence[int]) -> dict[str, Any]:
    plain = [line.plain() for line in lines]
    return {
        "name": table.name,
        "title": table.title,
        "source": {"paper": table.source.paper, "table": table.source.table, "link": table.source.link},
        "read": table.source.read,
        "tuned_on_test": table.tuned_on_test,
        "seeds": list(seeds),
        "looks": list(table.looks),
        "confidence": table.confidence,
        "counts": dict(Counter(line.verdict.word for line in lines)),
        "cells": [line for line in plain if line["published"] is not None],
        "orders": [line for line in plain if line["published"] is None],
    }


def write_json(out: Path, content: dict[str, Any]) -> Path:
    """Write the file into a folder."""
    path = out / FILE
    write_text_atomically(path, json.dumps(content, indent=1, default=str) + "\n")
    return path
