"""Tables of clients: scores of each client, between clients, and the samples they hold."""

from __future__ import annotations

from typing import Any

from fedlightning.study.data import StudyData, Table
from fedlightning.study.measures import mean_of
from fedlightning.study.runs import natural


def clients(study: StudyData) -> Table:
    """Return the score of each client with each method: one line for each (client, method).

    `score` is that of the model the client would use, averaged over seeds, with `ci95` and `ci95_radius`. `siloed` is
    that of its own siloed model. `gain` is the mean of their differences at the seeds both have, with `gain_ci95`; it is
    positive if the method is better for the client (for a loss, if it is lower). `train` and `test` count its samples.
    """
    silo = study.siloed_scores()
    sizes = _sizes(study)
    sign = 1.0 if study.higher_is_better else -1.0
    lines = []
    for client in _clients(study):
        for method in study.methods:
            scores = {seed: score.per_client.get(client) for seed, score in study.deployed(method).items()}
            own = {seed: score.per_client.get(client) for seed, score in silo.items()}
            gains: list[float | None] = []
            for seed in sorted(set(scores) & set(own)) if study.comparable(method) else []:
                score, base = scores[seed], own[seed]
                gains.append(None if score is None or base is None else sign * (score - base))
            found, gain = study.estimate(list(scores.values()), study.metric), study.estimate(gains)
            lines.append(
                {
                    "client": client,
                    "method": method,
                    "score": found.mean,
                    "ci95": found.ci95,
                    "ci95_radius": found.radius,
                    "siloed": mean_of(list(own.values())),
                    **gain.columns("gain"),
                    "n_seeds": found.n,
                    "train": sizes.get(client, {}).get("train"),
                    "test": sizes.get(client, {}).get("test"),
                }
            )
    return lines


def matrix(study: StudyData, method: str) -> dict[str, Any]:
    """Return the score of each client's deployed model (row) on each client's data (column), averaged over seeds."""
    names = _clients(study, method)
    columns = {}
    for source in names:
        columns[source] = list(study.deployed(method, data=f"client:{source}").values())
    own = list(study.deployed(method).values())
    values = [
        [
            mean_of([score.per_client.get(row) for score in (own if row == column else columns[column])])
            for column in names
        ]
        for row in names
    ]
    return {
        "clients": names,
        "values": values,
        "row_means": [mean_of(row) for row in values],
        "diagonal_mean": mean_of([values[i][i] for i in range(len(names))]),
        "n_seeds": len(own),
    }


def partition(study: StudyData) -> Table:
    """Return the samples of each client at the first seed: one line for each (client, split).

    `samples` counts them. `classes` counts them by class, for training data only, and is `None` if the run did not write
    it.
    """
    lines = []
    for client, held in _sizes(study).items():
        for split in ("train", "val", "test"):
            if held.get(split) is not None:
                classes = held.get("classes") if split == "train" else None
                lines.append({"client": client, "split": split, "samples": held[split], "classes": classes})
    return lines


def _sizes(study: StudyData) -> dict[str, dict[str, Any]]:
    """Return the samples of each client by split, from the first run on the usual test data."""
    first = next((scores.run.summary for key, scores in study.finished.items() if key not in study.odd), {})
    known: dict[str, dict[str, Any]] = first.get("data", {}).get("clients", {})
    known = known or {client: {"train": n} for client, n in first.get("num_samples", {}).items()}
    return {client: known[client] for client in sorted(known, key=natural)}


def _clients(study: StudyData, method: str | None = None) -> list[str]:
    """Return the clients of all runs, or of those of one method; of runs on the usual test data if there are any."""
    keys = [key for key in study.finished if method in (None, key[0]) and key not in study.odd]
    keys = keys or [key for key in study.finished if method in (None, key[0])]
    return list(dict.fromkeys(client for key in keys for client in study.finished[key].run.clients))
