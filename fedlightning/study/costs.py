"""Costs of reaching a target score: rounds, steps, megabytes, seconds."""

from __future__ import annotations

from typing import Any

from fedlightning.study.columns import LOCAL
from fedlightning.study.curves import curves
from fedlightning.study.data import StudyData, Table

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
    found = []
    for value, share, of in _targets(study, tracks, target):
        for method, track in tracks.items():
            first = next((line for line in track if _reaches(study, line["mean"], value)), None)
            found.append(
                {"method": method, "target": value, "share": share, "of": of, "reached": first is not None}
                | _spent(first)
                | ({"time": None if first is None else first["time"]} if track and "time" in track[0] else {})
            )
    return found


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
    of = study.baselines.get("fedavg")
    of = of if of in best else worst
    return [(best[of] * share if good else best[of] / share, share, of) for share in SHARES]


def _reaches(study: StudyData, value: float, target: float) -> bool:
    return value >= target if study.higher_is_better else value <= target


def _spent(line: dict[str, Any] | None) -> dict[str, Any]:
    names = ("rounds", "local_steps", "mb_up", "mb_down", "mb", "seconds")
    if line is None:
        return dict.fromkeys(names)
    up, down = (None if line[name] is None else line[name] / 1e6 for name in ("bytes_up", "bytes_down"))
    return dict(zip(names, (line["round"], line["local_steps"], up, down, line["mb"], line["seconds"]), strict=True))
