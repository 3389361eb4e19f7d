"""How well each method serves clients that took no part in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlightning.study.columns import UNSEEN
from fedlightning.study.data import StudyData, Table
from fedlightning.study.measures import SeedScore, mean_of
from fedlightning.study.scores import statistic


def unseen(study: StudyData) -> Table:
    """Return one line a method: the scores of held-out clients on their own test data, means over clients, then seeds.

    - `mean`: the model that an unseen client deploys after one message and no training (stage L1), with `ci95` and
      `ci95_radius`; `worst` and `std` over these clients; `per_client`.
    - `global`: the global model as it stands (stage G); `best_global`: the one selected on the trained clients'
      validation data. Both with `..._ci95` and `..._radius`.
    - `trained`: the deployed models of the clients that trained, as in the overview; `gap`: `mean` minus `trained`, over
      the seeds that have both, with `gap_ci95` and `gap_radius`. They are means over different clients with different
      data: how hard the held-out clients are is part of the gap.
    - `clients`: held-out clients by seed; `n_seeds` that have a score; `refused`: why a method has none.
    """
    return [line for method in study.methods if (line := _line(study, method)) is not None]


def _line(study: StudyData, method: str) -> dict[str, Any] | None:
    summaries = [study.finished[method, seed].run.summary for seed in study.seeds_of(method)]
    held_out = [summary["held_out"] for summary in summaries if summary.get("held_out")]
    if not held_out:
        return None
    own = _scores(study, method, "latest", "L1")
    trained = study.deployed(method)
    gaps = [
        None if own[seed].mean is None or trained[seed].mean is None else own[seed].mean - trained[seed].mean  # type: ignore[operator]
        for seed in own
        if seed in trained
    ]
    found = {
        "mean": [score.mean for score in own.values()],
        "global": [score.mean for score in _scores(study, method, "latest", "G").values()],
        "best_global": [score.mean for score in _scores(study, method, "best_global", "G").values()],
        "gap": gaps,
    }
    line: dict[str, Any] = {"method": method}
    for name, values in found.items():
        line |= study.estimate(values, None if name == "gap" else study.metric).columns(name)
    return line | {
        "worst": statistic(own.values(), "worst"),
        "std": statistic(own.values(), "std"),
        "trained": mean_of([score.mean for score in trained.values()]) if trained else None,
        "per_client": _per_client(list(own.values())),
        "clients": [", ".join(one.get("clients", {})) for one in held_out],
        "n_seeds": sum(score.mean is not None for score in own.values()),
        "seeds": len(study.seeds),
        "refused": next((one["refused"] for one in held_out if one.get("refused")), None),
    }


def _per_client(scores: Sequence[SeedScore]) -> dict[str, float | None]:
    """Return each client's mean over the seeds that held it out; `None` where one of them has no value."""
    clients = dict.fromkeys(client for score in scores for client in score.per_client)
    return {c: mean_of([score.per_client[c] for score in scores if c in score.per_client]) for c in clients}


def _scores(study: StudyData, method: str, checkpoint: str, stage: str) -> dict[int, SeedScore]:
    return study.find(method, model=UNSEEN, checkpoint=checkpoint, stage=stage)
