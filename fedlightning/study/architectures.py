"""Who gains where clients have models of different architectures: the clients with small ones, or with large ones?"""

from __future__ import annotations

from typing import Any

from fedlightning.study.data import StudyData, Table
from fedlightning.study.measures import Estimate, SeedScore, mean_of


def architectures(study: StudyData) -> Table:
    """Return one line for each method and architecture: test scores of the clients that have it, means over them and seeds.

    - `architecture`, `parameters` of its model, `clients` that have it (of the first seed).
    - `mean`: the deployed models, with `ci95` and `ci95_radius`; `worst`: the worst-served of these clients, mean over seeds.
    - `gain`: `mean` minus that of training alone (Local), paired by seed over the same clients, with `gain_ci95` and
      `gain_radius`; `None` without that baseline.
    - `n_seeds` that have a score.
    """
    local = study.baselines.get("siloed")
    alone = study.deployed(local) if local is not None else {}
    lines = []
    for method in study.methods:
        runs = {seed: study.finished[method, seed].run.summary for seed in study.seeds_of(method)}
        known = {seed: summary["architectures"] for seed, summary in runs.items() if summary.get("architectures")}
        own = study.deployed(method)
        first: dict[str, Any] = next(iter(known.values()), {})
        for name, about in first.items():
            members = {seed: found[name]["clients"] for seed, found in known.items() if name in found}
            if not any(members.values()):
                continue  # the server's own
            means = {seed: _mean(own[seed], clients) for seed, clients in members.items() if seed in own}
            others = {seed: _mean(alone[seed], members[seed]) for seed in means if seed in alone}
            gains = [
                None if value is None or others.get(seed) is None else value - others[seed]  # type: ignore[operator]
                for seed, value in means.items()
            ]
            gain = Estimate() if method == local else study.estimate(gains)
            lines.append(
                {
                    "method": method,
                    "architecture": name,
                    "parameters": about["parameters"],
                    "clients": about["clients"],
                    **study.estimate(list(means.values()), study.metric).columns(),
                    "worst": mean_of([_worst(study, own[seed], members[seed]) for seed in means]),
                    **gain.columns("gain"),
                    "n_seeds": sum(value is not None for value in means.values()),
                }
            )
    return lines


def _values(score: SeedScore, clients: list[str]) -> list[float]:
    return [score.defined[client] for client in clients if client in score.defined] if score.sound else []


def _mean(score: SeedScore, clients: list[str]) -> float | None:
    values = _values(score, clients)
    return sum(values) / len(values) if values else None


def _worst(study: StudyData, score: SeedScore, clients: list[str]) -> float | None:
    values = _values(score, clients)
    return (min if study.higher_is_better else max)(values) if values else None
