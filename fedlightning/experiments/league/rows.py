"""Rows of the league: what a finished run gave, and the files that keep the row of every method on a task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlightning.config.errors import InputError
from fedlightning.experiments.reproduce.record import commit
from fedlightning.run.folder import versions
from fedlightning.storage.files import UnreadableError, read_json, write_text_atomically
from fedlightning.study.columns import LOCAL

FORMAT = 1
Row = dict[str, Any]


def measure(folder: Path, metric: str) -> dict[str, Any]:
    """Return what the league keeps of a run.

    That is the deployed models' score on test data (mean over clients, worst client), what was sent and computed, and the
    validation score of the models as received (L1) by round, with the steps and megabytes until then. The steps
    of a client's own models are spread evenly over the rounds. Fine-tuning after the last round is not in there.
    """
    from fedlightning.study.curves import cumulative_costs, round_means
    from fedlightning.study.measures import RunScores
    from fedlightning.study.runs import load_run

    run = load_run(folder)
    score = RunScores(run).find(metric)
    if score is None:
        raise InputError(f"{folder} has no score '{metric}' on test data.")
    costs, means = cumulative_costs(run), round_means(run, metric)
    last, own = (
        run.config["trainer"]["max_rounds"],
        run.summary["terms"]["own_steps"],
    )  # those of no round in particular
    curve = [
        [
            number,
            int(cost["local_steps"] + own * number / last),
            _mb(cost["bytes_up"] + cost["bytes_down"]),
            _short(value),
        ]
        for number, cost in costs.items()
        if number <= last and (value := means.get(("L1", LOCAL, number))) is not None
    ]
    summary, clients = run.summary, run.summary["data"]["clients"].values()
    return {
        "score": _short(score.mean),
        "worst": _short(None if score.spread is None else score.spread.worst),
        "mb": _mb(summary["bytes_up"] + summary["bytes_down"]),
        "steps": summary["local_steps_total"] + own,
        "train": sum(held["train"] + held["val"] for held in clients),
        "test": sum(held["test"] for held in clients),
        "curve": curve,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _mb(size: float) -> float:
    return float(f"{size / 1e6:.6g}")


def read_rows(path: Path) -> dict[str, Row]:
    """Return method -> its row; empty if there is no such file.

    Raises:
        InputError: If the file is none that this module has written.
    """
    if not path.exists():
        return {}
    try:
        found = read_json(path)
        if found["format"] == FORMAT:
            return {row["method"]: row for row in found["rows"]}
    except (UnreadableError, KeyError, TypeError):
        pass
    raise InputError(f"{path} holds no rows of the league. Take it from the repository again, or delete it.")


def write_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a file, or replace the method's old one. It keeps the commit and the versions that made it."""
    made = {**row, "commit": commit(), "versions": versions()}
    rows = {**read_rows(path), made["method"]: made}
    lines = ",\n  ".join(json.dumps(rows[name], ensure_ascii=False) for name in sorted(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, f'{{\n "format": {FORMAT},\n "task": "{path.stem}",\n "rows": [\n  {lines}\n ]\n}}\n')
