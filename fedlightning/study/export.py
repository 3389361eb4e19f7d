"""A study as files: ``comparison.json`` and ``comparison.csv``."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlightning.run.files import write_text_atomically
from fedlightning.study.ranks import ranks

if TYPE_CHECKING:
    from fedlightning.study.study import Study

TABLES = ("results", "overview", "problems")


def write_comparison(study: Study | Mapping[str, Study], out: str | Path) -> dict[str, Any]:
    """Write ``comparison.json`` and ``comparison.csv`` into a folder.

    The JSON has the lines of ``results``, ``overview`` and ``problems``, and what they are of: ``methods``, ``seeds``,
    ``metric`` ... There is ``null`` where there is no number, never NaN. Of several studies every line begins with its
    ``dataset``, what they are of is listed under ``datasets``, and ``ranks`` holds
    :func:`fedlightning.study.ranks.ranks` (``null`` where there can be none).

    The CSV has ``results`` without nested columns: ``ci95`` as ``ci95_low`` and ``ci95_high``, ``undefined`` and
    ``diverged`` as text; values by seed and by client are in the JSON alone.

    Args:
        study: one study, or data set -> study.
        out: the folder; made if it is not there.

    Returns:
        What the JSON holds.
    """
    found = comparison(study)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / "comparison.json", json.dumps(found, indent=1, allow_nan=False))
    write_text_atomically(folder / "comparison.csv", as_csv([flat(line) for line in found["results"]]))
    return found


def comparison(study: Study | Mapping[str, Study]) -> dict[str, Any]:
    """What ``comparison.json`` holds; see :func:`write_comparison`."""
    if not isinstance(study, Mapping):
        found: dict[str, Any] = plain(
            {
                "results": study.results(),
                "overview": study.overview(),
                "problems": [problem.as_dict() for problem in study.problems],
                "methods": study.methods,
                "seeds": study.seeds,
                "seed_text": study.seed_text,
                "metric": study.metric,
                "split": study.split,
                "checkpoint": study.checkpoint,
                "confidence": study.confidence,
                "interval": study.interval,
                "baselines": study.baselines,
            }
        )
        return found
    each = {name: comparison(one) for name, one in study.items()}
    tables: dict[str, Any] = {
        table: [{"dataset": name} | line for name, one in each.items() for line in one[table]] for table in TABLES
    }
    about = {name: {key: one[key] for key in one if key not in TABLES} for name, one in each.items()}
    methods = list(dict.fromkeys(method for one in each.values() for method in one["methods"]))
    seeds = sorted({seed for one in each.values() for seed in one["seeds"]})
    try:
        ranked = plain(ranks(study))
    except ValueError:
        ranked = None  # fewer than 3 methods that all have; the report says why
    return tables | {"methods": methods, "seeds": seeds, "datasets": about, "ranks": ranked}


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line without nested values."""
    found: dict[str, Any] = {}
    for name, value in line.items():
        if name.endswith("ci95"):
            low, high = value if value is not None else (None, None)
            found |= {f"{name}_low": low, f"{name}_high": high}
        elif isinstance(value, list):
            found[name] = "; ".join(map(str, value))
        elif not isinstance(value, dict):
            found[name] = value
    return found


def as_csv(lines: list[dict[str, Any]]) -> str:
    """Lines of a table as CSV text; an empty cell is no number."""
    if not lines:
        return ""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def plain(value: Any) -> Any:
    """The same with text keys, and ``None`` for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
