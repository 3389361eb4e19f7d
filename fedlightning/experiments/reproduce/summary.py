"""`reproduce.json`: the results of a call of `fedlightning reproduce` for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlightning.experiments.reproduce.record import commit, counts
from fedlightning.experiments.reproduce.results import Line
from fedlightning.experiments.reproduce.tables import Table
from fedlightning.experiments.reproduce.verdicts import expected_by_chance
from fedlightning.run.folder import versions
from fedlightning.storage.files import write_text_atomically

FILE = "reproduce.json"
Told = tuple[Table, Sequence[Line], Sequence[int]]
"""A table, what was found, and the seeds."""


def as_json(tables: Sequence[Told], lost: Sequence[str], moved: Sequence[str]) -> dict[str, Any]:
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
        "chance": expected_by_chance(line.verdict for _, lines, _ in tables for line in lines),
        "lost": list(lost),
        "moved": list(moved),
        "tables": [_table(table, lines, seeds) for table, lines, seeds in tables],
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
        "counts": counts(plain),
        "cells": [line for line in plain if line["published"] is not None],
        "orders": [line for line in plain if line["published"] is None],
    }


def write_json(out: Path, content: dict[str, Any]) -> Path:
    """Write the file into a folder."""
    path = out / FILE
    write_text_atomically(path, json.dumps(content, indent=1, default=str) + "\n")
    return path
