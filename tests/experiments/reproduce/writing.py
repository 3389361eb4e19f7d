"""A small table on digits and a run's files, as tests write them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import yaml

from fedlightning.experiments.reproduce.measures import Runs
from fedlightning.scores.rows import COLUMNS
from fedlightning.study.finished_runs import load_run


def table(**changes: Any) -> dict[str, Any]:
    """The content of a table that can be read; its one run is a file `small.yaml` beside it."""
    return {
        "title": "Digits",
        "source": {"paper": "Nobody 2024", "table": "Table 1", "read": "source"},
        "claim": "FedAvg learns.",
        "setting": "Three clients.",
        "detects": ["nothing learnt"],
        "cannot_detect": ["wrong weights"],
        "sets": ["cpu"],
        "minutes": 0.1,
        "seeds": 2,
        "runs": {"fedavg": "small.yaml"},
        "measures": {"final": {"metric": "accuracy", "checkpoint": "latest", "stage": "G"}},
        "columns": {"accuracy": {"measure": "final", "tolerance": 0.3}},
        "rows": {"FedAvg": {"run": "fedavg", "published": {"accuracy": 0.5}}},
        **changes,
    }


def write(path: Path, content: Any) -> Path:
    """Write YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def write_run(folder: Path, rows: list[dict[str, Any]], summary: dict[str, Any] | None = None) -> Runs:
    """Write the files of a finished run and return it as the run `a`."""
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (folder / "summary.json").write_text(json.dumps({"seed": 0, "results": [], "num_samples": {}, **(summary or {})}))
    return {"a": load_run(folder, "a")}


def row(round: int, client: str, value: float, **changes: Any) -> dict[str, Any]:
    """A row of metrics.csv: accuracy of the global model on a client's validation data."""
    return {
        "round": round,
        "stage": "G",
        "model": "global",
        "checkpoint": "latest",
        "data": "local",
        "split": "val",
        "client": client,
        "metric": "val_accuracy",
        "value": value,
        "num_samples": 10,
        **changes,
    }
