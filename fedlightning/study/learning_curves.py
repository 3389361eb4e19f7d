"""Learning curves on validation data, against rounds, steps, bytes and seconds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedlightning.scores.metric_names import bare, higher_is_better
from fedlightning.study.columns import LOCAL, STAGES, UNSEEN
from fedlightning.study.data import StudyData, Table
from fedlightning.study.finished_runs import Run
from fedlightning.study.run_scores import mean_of

SHARES = (0.90, 0.95, 1.0)
"""Default targets, as shares of FedAvg's best validation score."""
STAGE, DATA = "L1", LOCAL
"""The curve that must reach the target: models as received after aggregation, on each client's own validation data."""


def costs(study: StudyData, target: float | None = None) -> Table:
    """Return what each method spends until the mean over its seeds first reaches a target.

    The curve that must reach it is each client's model as received (L1) on its own validation data, so no test data are
    used.
    """
    tracks: dict[str, list[dict[str, Any]]] = {method: [] for method in study.methods}
    for line in curves(study):
        if line["stage"] == STAGE and line["data"] == DATA and line["mean"] is not None:
            tracks[line["method"]].append(line)
    lines = []
    for value, share, of in _targets(study, tracks, target):
        for method, track in tracks.items():
            first = next((line for line in track if _reaches(study, line["mean"], value)), None)
            lines.append(
                {"method": method, "target": value, "share": share, "of": of, "reached": first is not None}
                | _spent(first)
                | ({"time": None if first is None else first["time"]} if track and "time" in track[0] else {})
            )
    return lines


def _targets(
    study: StudyData, tracks: dict[str, list[dict[str, Any]]], target: float | None
) -> list[tuple[float, float | None, str | None]]:
    if target is not None:
        return [(target, None, None)]
    good = study.higher_is_better
    best = {name: (max if good else min)(line["mean"] for line in track) for name, track in tracks.items() if track}
    if not best:
        return []
    worst = (min if good else max)(best, key=lambda name: best[name])
    reference = study.baselines.get("fedavg")
    reference = reference if reference in best else worst
    return [(best[reference] * share if good else best[reference] / share, share, reference) for share in SHARES]


def _reaches(study: StudyData, value: float, target: float) -> bool:
    return value >= target if study.higher_is_better else value <= target


def _spent(line: dict[str, Any] | None) -> dict[str, Any]:
    names = ("rounds", "local_steps", "mb_up", "mb_down", "mb", "seconds")
    if line is None:
        return dict.fromkeys(names)
    up, down = (None if line[name] is None else line[name] / 1e6 for name in ("bytes_up", "bytes_down"))
    return dict(zip(names, (line["round"], line["local_steps"], up, down, line["mb"], line["seconds"]), strict=True))


COSTS = {"bytes_up": "bytes_up", "bytes_down": "bytes_down", "local_steps": "steps", "seconds": "seconds"}
"""Column -> key in `per_round` of `summary.json`."""


def curves(study: StudyData, metric: str | None = None) -> Table:
    """Return the validation scores of the latest models over rounds.

    Rounds that not every seed was scored at are left out.
    """
    metric = bare(metric or study.metric)
    lines = []
    for method in study.methods:
        seeds = study.seeds_of(method)
        runs = [study.finished[method, seed].run for seed in seeds]
        means = [round_means(run, metric) for run in runs]
        spent = [cumulative_costs(run) for run in runs]
        shared = set.intersection(*(set(means_of_seed) for means_of_seed in means)) if means else set()
        for stage, data, number in sorted(shared, key=_order):
            overall = study.estimate([means_of_seed[stage, data, number] for means_of_seed in means], metric)
            line: dict[str, Any] = {"method": method, "stage": stage, "data": data, "round": number}
            line |= overall.columns() | {"n_seeds": overall.n}
            cost = {name: mean_of([s.get(number, {}).get(name) for s in spent]) for name in COSTS}
            up, down = cost["bytes_up"], cost["bytes_down"]
            times = [s.get(number, {}).get("time") for s in spent]
            clock = {} if all(time is None for time in times) else {"time": mean_of(times)}
            lines.append(line | cost | clock | {"mb": None if up is None or down is None else (up + down) / 1e6})
    return lines


def seed_curves(study: StudyData) -> dict[tuple[str, str, str], list[list[tuple[int, float | None]]]]:
    """Return (method, stage, data) -> the points of each seed's run: round and mean over clients on validation data."""
    metric = bare(study.metric)
    tracks: dict[tuple[str, str, str], list[list[tuple[int, float | None]]]] = {}
    for method in study.methods:
        for seed in study.seeds_of(method):
            lines: dict[tuple[str, str, str], list[tuple[int, float | None]]] = {}
            for (stage, data, number), value in sorted(round_means(study.finished[method, seed].run, metric).items()):
                lines.setdefault((method, stage, data), []).append((number, value))
            for key, points in lines.items():
                tracks.setdefault(key, []).append(points)
    return tracks


def round_means(run: Run, metric: str) -> dict[tuple[str, str, int], float | None]:
    """Return (stage, data, round) -> mean over clients on validation data, `None` if a client's model has diverged.

    A metric that is not defined on a client's data is left out of the mean, as in tables.
    """
    groups: dict[tuple[str, str, int], dict[str, float]] = {}
    diverged: set[tuple[str, str, int, str]] = set()
    for row in run.rows:
        if row.split == "val" and row.checkpoint == "latest" and row.model != UNSEEN:
            if bare(row.metric) == metric:
                groups.setdefault((row.stage, row.data, row.round), {})[row.client] = row.value
            if not (math.isfinite(row.value) or higher_is_better(row.metric)):
                diverged.add((row.stage, row.data, row.round, row.client))
    means: dict[tuple[str, str, int], float | None] = {}
    for key, values in groups.items():
        defined = [value for value in values.values() if math.isfinite(value)]
        broken = any((*key, client) in diverged for client in values)
        means[key] = None if broken or not defined else float(np.mean(defined))
    return means


def cumulative_costs(run: Run) -> dict[int, dict[str, float]]:
    """Return round -> costs of the run until the end of that round; empty if the run did not record them by round."""
    total = dict.fromkeys(COSTS, 0.0)
    costs_by_round = {}
    for entry in run.summary.get("per_round", []):
        total = {name: total[name] + float(entry.get(key, 0)) for name, key in COSTS.items()}
        time = entry.get("time")  # of the virtual clock, from the run's begin
        costs_by_round[int(entry["round"])] = total if time is None else total | {"time": float(time)}
    return costs_by_round


def _order(key: tuple[str, str, int]) -> tuple[int, str, int]:
    stage, data, number = key
    return STAGES.index(stage), data, number
