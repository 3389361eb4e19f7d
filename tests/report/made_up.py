"""Folders of finished runs with made-up scores: what `compare` would leave, in a moment."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedlightning.callbacks.diagnostics.layer_values import LayerRow, write_layers
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import Row, write_rows

CALLBACKS = {"siloed": "Local", "fedavg": "FedAvg", "central": "Central"}


def make_study(
    out: Path,
    methods: Sequence[str] = ("fedavg", "apfl", "siloed"),
    seeds: Sequence[int] = (0, 1, 2),
    clients: int = 4,
    rounds: int = 3,
    classes: int = 3,
    nan: tuple[str, int, str] | None = None,
    without: Sequence[tuple[str, int]] = (),
    other_split: tuple[str, int] | None = None,
    failed: Mapping[tuple[str, int], str] | None = None,
    matrix: bool = True,
    shift: float = 0.0,
    offset: float = 0.01,
) -> Path:
    """Write a study: ``nan`` = (method, seed, client) that diverged; ``without`` = runs that are not there.

    Each method is ``shift`` better than the one before; ``offset`` sets neighbours apart, up and down in turn.
    """
    failed = failed or {}
    entries = []
    for place, method in enumerate(methods):
        for seed in seeds:
            if (method, seed) in without:
                continue
            folder = f"runs/run_{place}/seed_{seed}"
            error = failed.get((method, seed))
            state = "failed" if error else "done"
            entries.append(
                {"run": method, "seed": seed, "folder": folder, "state": state, "error": error, "seconds": 1.0}
            )
            if not error:
                broken = nan[2] if nan is not None and nan[:2] == (method, seed) else None
                split = "other" if other_split == (method, seed) else "usual"
                _write_run(
                    out / folder, method, place, seed, clients, rounds, classes, broken, split, matrix, shift, offset
                )
    study = {
        "format": 1,
        "command": "fedlightning compare configs/*.yaml --seeds 3 --out study",
        "metric": "accuracy",
        "checkpoint": "deployed",
        "seeds": list(seeds),
        "vary": ["trainer.seed", "data.val_seed"],
        "methods": [{"name": m, "configs": [], "baseline": m in ("siloed", "central")} for m in methods],
        "runs": entries,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "study.json").write_text(json.dumps(study, indent=1))
    return out


def add_layers(folder: Path) -> None:
    """A ``layers.csv`` for a run: three layers of two clients, sensitivity twice as high in each next layer."""
    rows = [
        LayerRow(number, "L2", client, layer, f"net.{layer}", quantity, factor * 2.0**layer * number)
        for number in (1, 3)
        for client in ("0", "1", "all")
        for layer in (1, 2, 3)
        for quantity, factor in (("sensitivity_online", 1.0), ("hessian_trace_per_parameter", 5.0))
    ]
    write_layers(folder / "layers.csv", rows)


def _write_run(
    folder: Path, method: str, place: int, seed: int, clients: int, rounds: int, classes: int, broken: str | None,
    split_hash: str, matrix: bool, shift: float, offset: float,
) -> None:  # fmt: skip
    folder.mkdir(parents=True)
    rng = np.random.default_rng([place, seed, clients])
    ids = [str(i) for i in range(clients)]
    hard = np.random.default_rng(clients).uniform(0.5, 0.9, clients)  # clients differ, alike for every method
    rows: list[Row] = []

    def score(number: int, stage: str, checkpoint: str, data: str, split: str, client: str, level: float) -> None:
        model = "global" if stage == "G" else "personal"
        accuracy = float(np.clip(level + offset * place * (-1) ** place + shift * place + rng.normal(0, 0.01), 0, 1))
        gone = client == broken
        for name, value in (("accuracy", accuracy), ("loss", 2 - accuracy)):
            shown = float("nan") if gone else value
            rows.append(
                Row(number, stage, model, checkpoint, data, split, client, f"{split}_{name}", shown, 10 + len(rows) % 7)
            )

    shared = method != "siloed"
    for number in range(1, rounds + 1):
        for i, client in enumerate(ids):
            level = hard[i] * number / rounds
            for stage, better in (("G", -0.05), ("L1", 0.0), ("L2", 0.03)) if shared else (("L1", 0.0), ("L2", 0.02)):
                score(number, stage, "latest", "local", "val", client, level + better)
    for i, client in enumerate(ids):
        for stage, better in (("G", -0.05), ("L1", 0.0), ("L2", 0.03)) if shared else (("L1", 0.0), ("L2", 0.02)):
            score(rounds, stage, "latest", "local", "test", client, hard[i] + better)
        score(rounds, "L1", "best_local", "local", "test", client, hard[i] + 0.01)
        score(rounds, "L1", "best_local", "pooled", "test", client, hard[i] - 0.2)
        score(rounds, "L1", "latest", "pooled", "test", client, hard[i] - 0.2)
        for j, other in enumerate(ids) if matrix else ():
            score(rounds, "L1", "best_local", f"client:{other}", "test", client, hard[j] - 0.1 * (i != j))
    write_rows(folder / "metrics.csv", rows)
    last = [row for row in rows if row.round == rounds]
    per_round = [
        {"round": r + 1, "bytes_up": 1000 * place, "bytes_down": 1000 * place, "steps": 20, "seconds": 0.1}
        for r in range(rounds)
    ]
    counts = np.random.default_rng(clients).integers(0, 30, (clients, classes))
    summary = {
        "results": summarise(last),
        "rounds": rounds,
        "num_clients": clients,
        "num_samples": {c: int(counts[i].sum()) for i, c in enumerate(ids)},
        "data": {
            "module": "MadeUpDataModule",
            "partition": f"Made({clients})",
            "splits": {"train": "a", "val": f"b{seed}", "test": split_hash},
            "clients": {
                c: {"train": int(counts[i].sum()), "val": 5, "test": 10, "classes": counts[i].tolist()}
                for i, c in enumerate(ids)
            },
        },
        "callbacks": {CALLBACKS.get(method, "APFL"): {"alpha": 0.5} if method not in CALLBACKS else {}},
        "model": "Toy",
        "seed": seed,
        "bytes_up": 1000 * place * rounds,
        "bytes_down": 1000 * place * rounds,
        "local_steps_total": 20 * rounds,
        "seconds": 0.3,
        "per_round": per_round,
        "peak_memory_mb": 100.0,
        "versions": {"python": "3", "fedlightning": "0"},
        "config_hash": "0",
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def add_clusters(folder: Path, last: Sequence[str], change: int = 2, groups: Sequence[int] | None = None) -> None:
    """A ``clusters.csv``: all clients in cluster 1 until round ``change``, then where ``last`` says; planted ``groups``."""
    rows = [
        (number, client, cluster, 1.0 if number == 1 else 0.75)
        for number in (1, 2, 3)
        for client, cluster in enumerate(last if number >= change else ["cluster 1"] * len(last))
    ]
    rows += [(number, client, "cluster 9", 0.25) for number, client, _, share in rows if share < 1]
    write_table(folder / "clusters.csv", ("round", "client", "cluster", "share"), rows)
    if groups is not None:
        path = folder / "summary.json"
        summary = json.loads(path.read_text())
        summary["data"]["groups"] = {str(client): group for client, group in enumerate(groups)}
        path.write_text(json.dumps(summary))


LEDGER = ("round", "cluster", "client", "paid", "refunded", "rewarded", "contribution", "error")


def add_ledger(folder: Path, lost: float = 0.0) -> None:
    """A ``ledger.csv``: clients 0 to 2 pay 1 in two rounds, get 0.1 back each, and 0.9 goes to the last of them each time;
    client 2 fails in round 2. Client 3 is never chosen."""
    rows = [
        (1, "cluster 1", 0, 1.0, 0.1, 0.0, -0.02, 0.0),
        (1, "cluster 1", 1, 1.0, 0.1, 0.9, 0.01, 0.0),
        (1, "cluster 1", 2, 1.0, 0.1, 1.8 - lost, 0.04, 0.0),
        (2, "cluster 1", 0, 1.0, 0.1, 0.6, -0.04, 0.003),
        (2, "cluster 1", 1, 1.0, 0.1, 1.2, 0.03, 0.003),
        (2, "cluster 1", 2, 1.0, 1.0, 0.0, "", ""),
    ]
    write_table(folder / "ledger.csv", LEDGER, rows)


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
