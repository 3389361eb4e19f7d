"""Run folders with made-up scores: what a run leaves behind, without training anything."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import Row, write_rows
from fedlightning.study.finished_runs import Run, load_run

CLIENTS = ("a", "b", "c", "d")
TEST_SIZES = dict(zip(CLIENTS, (40, 10, 25, 60), strict=True))
ROUNDS = 3
METHODS: dict[str, list[str]] = {
    "fedavg": ["FedAvg", "LocalCheckpoint", "GlobalCheckpoint"],
    "fenda": ["FENDA", "LocalCheckpoint"],
    "fliu": ["FLIU", "LocalCheckpoint"],
    "silo": ["Local", "LocalCheckpoint"],
}
PLACES = {"local": "own", "pooled": "union"}

Edit = Callable[[str, int, list[Row], dict[str, Any]], "list[Row] | None"]
"""(method, seed, rows, summary) -> other rows, or None; may change the summary in place."""


def write_study(
    root: Path,
    methods: Mapping[str, Sequence[str]] = METHODS,
    seeds: Sequence[int] = (0, 1, 2),
    edit: Edit | None = None,
    shift: Mapping[str, float] | None = None,
) -> list[Run]:
    """Write a run folder for every method and seed, and read them back.

    Args:
        root: where; methods: name -> callbacks; seeds: of the runs; edit: applied before writing.
        shift: added to a method's accuracies, so that methods differ.
    """
    runs = []
    for method, callbacks in methods.items():
        for seed in seeds:
            rows = made_up_rows(method, seed, "GlobalCheckpoint" in callbacks, (shift or {}).get(method, 0.0))
            summary = made_up_summary(callbacks, seed)
            rows = (edit(method, seed, rows, summary) if edit is not None else None) or rows
            latest = [row for row in rows if row.checkpoint != "latest" or row.round == ROUNDS]
            folder = root / method / f"seed_{seed}"
            folder.mkdir(parents=True)
            write_rows(folder / "metrics.csv", rows)
            summary["results"] = summarise(row for row in latest if row.split != "train")
            (folder / "summary.json").write_text(json.dumps(summary))
            runs.append(load_run(folder))
    return runs


def made_up_rows(method: str, seed: int, has_global: bool, shift: float) -> list[Row]:
    """Validation scores of every round; test scores of the last, of every stage, checkpoint and kind of data."""
    random = np.random.default_rng([seed, *method.encode()])
    rows: list[Row] = []

    def add(
        number: int, stage: str, model: str, checkpoint: str, data: str, split: str, client: str, size: int
    ) -> None:
        accuracy = float(random.integers(30, 80) / 100 + shift)
        for metric, value in (("accuracy", accuracy), ("loss", float(1 - accuracy + random.uniform(0, 0.2)))):
            rows.append(Row(number, stage, model, checkpoint, data, split, client, f"{split}_{metric}", value, size))

    models = [("L1", "personal", "latest"), ("L2", "personal", "latest"), ("L1", "personal", "best_local")]
    if has_global:
        models += [("G", "global", "latest"), ("G", "global", "best_global")]
    for stage, model, checkpoint in models:
        for client in CLIENTS:
            for number in range(1, ROUNDS + 1) if checkpoint == "latest" else ():
                add(number, stage, model, checkpoint, "local", "val", client, 8)
            add(ROUNDS, stage, model, checkpoint, "local", "test", client, TEST_SIZES[client])
            if model == "personal":
                add(ROUNDS, stage, model, checkpoint, "pooled", "test", client, sum(TEST_SIZES.values()))
            if checkpoint == "best_local":
                for other in CLIENTS:
                    if other != client:
                        add(ROUNDS, stage, model, checkpoint, f"client:{other}", "test", client, TEST_SIZES[other])
        if model == "global":
            add(ROUNDS, stage, model, checkpoint, "pooled", "test", "all", sum(TEST_SIZES.values()))
    return rows


def made_up_summary(callbacks: Sequence[str], seed: int) -> dict[str, Any]:
    """What ``summary.json`` says beside the results."""
    rounds = [
        {"round": number, "bytes_up": 1000 * number, "bytes_down": 500, "steps": 40, "seconds": 0.5 + seed}
        for number in range(1, ROUNDS + 1)
    ]
    return {
        "rounds": ROUNDS,
        "num_samples": dict.fromkeys(CLIENTS, 32),
        "data": {
            "module": "Made", "partition": "up",
            "splits": {"train": f"train{seed}", "val": f"val{seed}", "test": "test"},
            "clients": {c: {"train": 32, "val": 8, "test": TEST_SIZES[c], "classes": [4] * 8} for c in CLIENTS},
        },
        "callbacks": {key: {} for key in callbacks},
        "seed": seed,
        "bytes_up": 6000, "bytes_down": 1500, "local_steps_total": 120, "seconds": 3 * (0.5 + seed), "peak_memory_mb": 100.0,
        "per_round": rounds,
    }  # fmt: skip


def raw(root: Path, method: str, seed: int, **wanted: str | int) -> dict[str, float]:
    """Client -> value, straight from the text of ``metrics.csv``."""
    with (root / method / f"seed_{seed}" / "metrics.csv").open(newline="") as file:
        found = [line for line in csv.DictReader(file) if all(line[key] == str(v) for key, v in wanted.items())]
    return {line["client"]: float(line["value"]) for line in found}


def deployed(root: Path, method: str, seed: int, **other: str | int) -> dict[str, float]:
    """Client -> test accuracy of each client's own best model."""
    wanted = {"checkpoint": "best_local", "data": "local", "split": "test", "metric": "test_accuracy"} | other
    return raw(root, method, seed, **wanted)
