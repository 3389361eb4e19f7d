"""Recorded verdicts: `recorded/NAME.json` beside a table. Later verdicts and tolerances are held to them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fedlightning
from fedlightning.config.errors import InputError
from fedlightning.experiments.reproduce.results import Line
from fedlightning.experiments.reproduce.tables import Table
from fedlightning.experiments.reproduce.verdicts import GOOD, INCONCLUSIVE, NOT_RUN
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
    path = record_file(table)
    if not path.exists():
        return {}
    try:
        found = read_json(path)
        if found["format"] == FORMAT:
            return {line["name"]: line for line in found["lines"]}
    except (UnreadableError, KeyError, TypeError):
        pass
    raise InputError(f"{path} holds no verdicts that `reproduce --record` wrote. Take it from the repository again.")


def write_record(table: Table, lines: Sequence[Line]) -> Path:
    """Write the verdicts of a table. What was not run keeps what was recorded of it; tolerances keep their history."""
    path = record_file(table.path)
    before, kept, now = read_record(table.path), [], commit()
    known = read_json(path)["versions"] if path.exists() else {}
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
        kept.append({**new, "commit": now, **({"earlier": earlier} if earlier else {})})
    made = {str(line["commit"]): known.get(str(line["commit"]), versions()) for line in kept} | {str(now): versions()}
    rows = ",\n  ".join(json.dumps(line, ensure_ascii=False) for line in kept)
    used = {name: given for name, given in made.items() if any(str(line["commit"]) == name for line in kept)}
    path.parent.mkdir(exist_ok=True)
    head = f'"format": {FORMAT},\n "table": {json.dumps(table.name)},\n "versions": {json.dumps(used)}'
    write_text_atomically(path, f'{{\n {head},\n "lines": [\n  {rows}\n ]\n}}\n')
    return path


def _judged_by(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"published": line["published"], "tolerance": line["tolerance"]}


def moved_goals(table: Table) -> list[str]:
    """Return a sentence for every tolerance or published value that was changed since a verdict was recorded."""
    now: dict[str, tuple[float | None, float]] = {cell.name: (cell.published, cell.tolerance) for cell in table.cells}
    now |= {order.name: (None, order.margin) for order in table.orders}
    said = []
    for name, recorded in read_record(table.path).items():
        for old in [*recorded.get("earlier", []), recorded] if name in now else []:
            published, tolerance = now[name]
            if old["tolerance"] != tolerance:
                how = "widened" if tolerance > old["tolerance"] else "narrowed"
                said.append(f"the tolerance of {name} was {how} from {old['tolerance']:g} to {tolerance:g}")
            if old["published"] != published:
                said.append(f"the published value of {name} was changed from {old['published']:g} to {published:g}")
    return [f"{table.name}: {text} after a run." for text in dict.fromkeys(said)]


def lost(table: Table, lines: Sequence[Line], seeds: Sequence[int]) -> list[str]:
    """Return a sentence for every cell and order that once agreed and does not now.

    What is not run because data, a package or a set are missing is no loss; a run that failed is one. With fewer seeds than
    were recorded an inconclusive cell is no loss either.
    """
    now, said = {line.name: line for line in lines}, []
    for name, old in read_record(table.path).items():
        line = now.get(name)
        if old["verdict"] not in GOOD or (line is not None and line.verdict.word in GOOD):
            continue
        if line is None:
            said.append(f"{table.name}: {name} once agreed and is not in the table any more.")
            continue
        word = line.verdict.word
        if (word == NOT_RUN and not line.failed) or (word == INCONCLUSIVE and len(seeds) < len(old["values"])):
            continue
        said.append(
            f"{table.name}: {name} once agreed, now: {word}{f' ({line.verdict.why})' if line.verdict.why else ''}."
        )
    return said


def counts(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return verdict -> number of lines, in the order in which they come."""
    found: dict[str, int] = {}
    for line in lines:
        found[line["verdict"]] = found.get(line["verdict"], 0) + 1
    return found


def commit(root: Path = Path(fedlightning.__file__).parents[1]) -> str | None:
    """Return the commit of this package's repository, with a plus if files were changed since; `None` outside of one.

    Recorded verdicts are no such files: they are written one after another, and compute nothing.
    """
    if not (root / ".git").exists():
        return None
    try:
        found, changed = (
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
    return found.strip() + ("+" if changed.strip() else "")
