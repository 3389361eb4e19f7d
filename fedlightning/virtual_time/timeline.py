"""What happened when on a virtual clock: `timeline.csv`, written a row for each job that has come back, and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING

from fedlightning.contract.messages import JobTrace, Update
from fedlightning.run.job_timeline import TIMELINE_FILE, read_trips, timeline_figure
from fedlightning.scores.rows import Row
from fedlightning.server.parts import Part
from fedlightning.storage.files import add_round, writing

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation

COLUMNS = tuple(entry.name for entry in fields(JobTrace))


class Timeline(Part):
    """Writes and draws what happened when, where the loop has a clock."""

    def on_round_scored(self, federation: Federation, rows: Sequence[Row], updates: Sequence[Update]) -> None:
        folder, trips = federation.server.run_dir, federation.loop.trips
        if folder is not None and federation.recorder.writes and trips:
            append_job_traces(folder, trips)

    def on_end(self, federation: Federation) -> None:
        folder, loop = federation.server.run_dir, federation.loop
        if folder is not None and federation.recorder.writes and loop.clock is not None:
            draw_timeline(folder, {int(entry["round"]): entry["time"] for entry in federation.history})


def append_job_traces(folder: Path, trips: Sequence[JobTrace]) -> None:
    """Add a round to the timeline. Rows of this round and later ones, left by a run that was resumed, go."""
    if not trips:
        return
    add_round(folder / TIMELINE_FILE, COLUMNS, trips[0].round, [astuple(trip) for trip in trips])


def draw_timeline(folder: Path, rounds: Mapping[int, float]) -> None:
    """Draw a run's timeline to `figures/timeline.png`, if it has one."""
    rows, path = read_trips(folder), folder / "figures" / "timeline.png"
    if rows:
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            timeline_figure(rows, rounds).savefig(path, dpi=150)
