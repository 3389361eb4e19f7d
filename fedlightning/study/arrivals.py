"""What happened when, in runs with a virtual clock: arrivals, staleness, how busy clients were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlightning.run.job_timeline import read_trips
from fedlightning.study.data import StudyData, Table
from fedlightning.study.finished_runs import Run
from fedlightning.study.run_scores import mean_of


def timeline(study: StudyData) -> Table:
    """Return one line a method whose runs have a virtual clock, means over seeds.

    - `time`: virtual seconds of the run; `round_time`: of a round, on average.
    - `arrivals`: jobs that came back; `left_out`: percent of them that came too late, too stale, or failed.
    - `staleness`, `most_stale`: mean and largest staleness of what was taken in.
    - `busy`: percent of the run in which a client was at work, mean over clients that ever were.
    - `n_seeds`: runs with a clock.
    """
    lines = []
    for method in study.methods:
        runs = [study.finished[method, seed].run for seed in study.seeds_of(method)]
        each = [measures(run, rows) for run in runs if (rows := trips_of(run)) and steps_of(run)]
        if each:
            line: dict[str, Any] = {"method": method} | {
                name: mean_of([measured[name] for measured in each]) for name in each[0]
            }
            lines.append(line | {"n_seeds": len(each), "seeds": len(study.seeds)})
    return lines


def trips_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows of a run's `timeline.csv`; none without a readable one."""
    if run.path is None:
        return []
    try:
        return read_trips(run.path)
    except (OSError, ValueError, KeyError):
        return []


def steps_of(run: Run) -> dict[int, float]:
    """Return round -> virtual time at its end; empty for a run without a clock."""
    rounds = run.summary.get("per_round", [])
    return {int(entry["round"]): float(entry["time"]) for entry in rounds if entry.get("time") is not None}


def measures(run: Run, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return what :func:`timeline` tells of one run."""
    end = max(steps_of(run).values())
    taken = [row["staleness"] for row in rows if row["outcome"] == "taken"]
    busy: dict[str, float] = {}
    for row in rows:
        stop = min(row["arrived"], end)
        busy[row["client"]] = busy.get(row["client"], 0.0) + max(stop - row["began"], 0.0)
    return {
        "time": end,
        "round_time": end / len(steps_of(run)),
        "arrivals": float(len(rows)),
        "left_out": 100 * (1 - len(taken) / len(rows)),
        "staleness": sum(taken) / len(taken) if taken else None,
        "most_stale": float(max(taken)) if taken else None,
        "busy": 100 * sum(busy.values()) / len(busy) / end if end else None,
    }
