"""What happened when on a virtual clock: the rows of `timeline.csv`, and their picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlightning.compat import sheets

TIMELINE_FILE = "timeline.csv"
MAX_CLIENTS_SHOWN = 40
"""Clients that a picture shows."""
NUMBERS = {"round": int, "began": float, "computed": float, "arrived": float, "version": int, "staleness": int}


def read_trips(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the timeline, numbers as numbers; none if there is no such file."""
    path = folder / TIMELINE_FILE
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in sheets.read_table(file) if row["outcome"]]  # not one that was cut off
    return [row | {name: kind(row[name]) for name, kind in NUMBERS.items()} for row in rows]


def timeline_figure(rows: Sequence[Mapping[str, Any]], rounds: Mapping[int, float] | None = None) -> Any:
    """Return a picture of who was busy when: above the clients, below the staleness of what arrived.

    Example:
        >>> row = {"client": "a", "began": 0.0, "computed": 2.0, "arrived": 2.5, "staleness": 0, "outcome": "taken"}
        >>> timeline_figure([row], {1: 2.5}).axes[0].get_ylabel()
        'client'
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    end = _horizon(rows)
    rows = [row for row in rows if row["began"] < end]
    clients = sorted({row["client"] for row in rows}, key=lambda name: (len(name), name))[:MAX_CLIENTS_SHOWN]
    height = 0.22 * len(clients) + 2.2
    figure = Figure(figsize=(5.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(0.22 * len(clients), 0.6), 1.0])
    colours = {"taken": "#0072B2", "late": "#D55E00", "stale": "#CC79A7", "failed": "#555555"}
    begins = {client: [row["began"] for row in rows if row["client"] == client] for client in clients}
    for row in rows:
        if row["client"] not in clients:
            continue
        line, colour = clients.index(row["client"]), colours[row["outcome"]]
        later = min((other for other in begins[row["client"]] if other > row["began"]), default=row["arrived"])
        computed, arrived = min(row["computed"], later), min(row["arrived"], later)  # it may be called away
        for start, stop, strength in ((row["began"], computed, 0.85), (computed, arrived, 0.35)):
            above.barh(line, stop - start, left=start, height=0.7, color=colour, alpha=strength, lw=0)
        # of a short one two lines would leave nothing to see: its end is a notch
        long = arrived - row["began"] > end / 60
        above.plot(
            [row["began"]] * 2, [line - 0.35, line + (0.35 if long else -0.1)], color="white", lw=1 if long else 0.6
        )
    shown = [time for number, time in sorted((rounds or {}).items()) if time <= end]
    for axis in (above, below):
        axis.vlines(shown, 0, 1, transform=axis.get_xaxis_transform(), color="#999999", lw=0.6, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
    above.set_ylabel("client")
    above.set_yticks(range(len(clients)), clients, fontsize=7, parse_math=False)  # a client may be called "$x"
    above.invert_yaxis()
    for outcome in colours:
        points = [(row["arrived"], row["staleness"]) for row in rows if row["outcome"] == outcome]
        if points:
            below.scatter(*zip(*points, strict=True), s=9, color=colours[outcome])
    below.set_ylabel("staleness")
    below.set_ylim(-0.5, max([1, *(row["staleness"] for row in rows)]) + 0.5)
    below.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    below.set_xlabel("virtual seconds")
    below.set_xlim(0, 1.01 * end)
    outcomes = [outcome for outcome in colours if any(row["outcome"] == outcome for row in rows)]
    handles: list[Any] = [Patch(color=colours[outcome], label=outcome) for outcome in outcomes]
    handles += [Line2D([], [], color="#999999", lw=0.8, label="end of a round")] if shown else []
    figure.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    return figure


def _horizon(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the time up to which a picture shows: the whole run, or as much of it as can be told apart."""
    arrivals = sorted(row["arrived"] for row in rows)
    return float(arrivals[min(len(arrivals), 300) - 1]) if arrivals else 1.0
