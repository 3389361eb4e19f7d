"""Every contestant on the same work, in turn, as ratios to the bare loop: `make bench`.

    python -m benchmarks.run [--works mlp,cnn] [--contestants "bare loop,pfl"] [--repeats 5] [--rounds 3] [--minutes 9]
        [--python pfl=PATH] [--out FILE]

Each measurement is a process of its own with one torch thread. The contestants take turns, so that a machine that
slows down slows all of them. Turns end early when the minutes are over; two are always made. Ratios are taken within a
turn, and their median over turns is shown: of a round after the first, and of everything from the setting-up to the end.
Steps and samples are counted by each. Frameworks that are not installed are left out (`pip install pfl "flwr[simulation]"`);
`--python` names the interpreter of an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import CONTESTANTS
from benchmarks.work import WORKS

BARE = "bare loop"
TARGETS = {
    ("cnn", "fedlightning"): 1.03,
    ("cnn", "fedlightning (2 processes)"): 0.56,
    ("mlp", "fedlightning"): 1.05,
    ("mlp", "fedlightning (vectorized)"): 0.40,
    ("mlp", "fedlightning (from loaders)"): 1.15,
    ("logistic", "fedlightning (vectorized)"): 0.12,
}
"""Target ratios; `docs/results/performance.md` says what limits those that are not reached."""
ROOT = Path(__file__).resolve().parents[1]


def measure(contestant: str, work: str, rounds: int, python: str = sys.executable) -> dict[str, Any]:
    """Make one measurement in a process of its own.

    Returns:
        `first`: seconds of the first round; `rounds`: seconds of the others; `all`: seconds of everything; `steps`,
        `samples`; `peak_mb`: peak memory. Or `error`.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    command = [python, "-m", "benchmarks.measure", contestant, work, str(rounds + 1)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def compare(
    work: str,
    contestants: list[str],
    rounds: int,
    repeats: int,
    show: Console,
    seconds: float = math.inf,
    pythons: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Return one row a contestant: medians over the turns, which end when another one would take more than `seconds`."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    started = time.monotonic()
    for turn in range(repeats):
        if turn >= 2 and (time.monotonic() - started) * (turn + 1) / turn > seconds:
            break
        for name in contestants:
            known = turns[name]
            if known and ("missing" in known[0] or "error" in known[0]):
                continue
            python = next((path for key, path in (pythons or {}).items() if name.startswith(key)), sys.executable)
            known.append(measure(name, work, rounds, python))
            show.print(f"{work}: {name}, turn {turn + 1} of {repeats}", style="dim", highlight=False)
    reference = [statistics.median(found["rounds"]) for found in turns[BARE]]
    whole = [found["all"] for found in turns[BARE]]
    rows = []
    for name in contestants:
        row: dict[str, Any] = {"work": work, "contestant": name}
        first = turns[name][0]
        if "missing" in first or "error" in first:
            rows.append(row | {"note": first.get("error") or f"{first['missing']} is not installed"})
            continue
        seconds = [statistics.median(found["rounds"]) for found in turns[name]]
        ratios = [own / bare for own, bare in zip(seconds, reference, strict=True)]
        peak = statistics.median(found["peak_mb"] for found in turns[name])
        visits = WORKS[work].participants or len(WORKS[work].sizes)
        rows.append(
            row
            | {
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "all": statistics.median(found["all"] for found in turns[name]),
                "ratio_all": statistics.median(
                    found["all"] / bare for found, bare in zip(turns[name], whole, strict=True)
                ),
                "steps": first["steps"],
                "samples": first["samples"],
                "seconds": statistics.median(seconds),
                "extra_ms_per_visit": 1000
                * statistics.median(own - bare for own, bare in zip(seconds, reference, strict=True))
                / visits,
                "first_round": statistics.median(found["first"] for found in turns[name]),
                "peak_mb": peak,
                "extra_mb": peak - statistics.median(found["peak_mb"] for found in turns[BARE]),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table for the terminal."""
    shown = Table(title="Wall time of a round as a ratio to the bare loop (median of turns)", title_justify="left")
    numbers = ("ratio", "target", "min - max", "s", "+ms/visit", "first round s", "all s", "all: ratio", "steps", "+MB")
    for column in ("work", "contestant", *numbers):
        shown.add_column(column, justify="left" if column in ("work", "contestant") else "right")
    for row in rows:
        if "ratio" not in row:
            shown.add_row(row["work"], row["contestant"], "-", "", row["note"][:40])
            continue
        shown.add_row(
            row["work"],
            row["contestant"],
            f"{row['ratio']:.2f}",
            f"{TARGETS[key]:.2f}" if (key := (row["work"], row["contestant"])) in TARGETS else "",
            f"{row['ratio_min']:.2f} - {row['ratio_max']:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['extra_ms_per_visit']:.2f}",
            f"{row['first_round']:.2f}",
            f"{row['all']:.2f}",
            f"{row['ratio_all']:.2f}",
            f"{row['steps']}",
            f"{row['extra_mb']:.0f}",
        )
    return shown


def main() -> None:
    """Measure and print, and write JSON if `--out` is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default="mlp,cnn,logistic", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--minutes", type=float, default=9, help="for all works together")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="interpreter; repeatable")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [name for name in CONTESTANTS if name in options.contestants.split(",") or name == BARE]
    console = Console(width=None if Console().is_terminal else 120)
    rows: list[dict[str, Any]] = []
    works, pythons = options.works.split(","), dict(one.split("=", 1) for one in options.python)
    for work in works:
        minutes = options.minutes / len(works)
        rows += compare(work, names, options.rounds, options.repeats, console, 60 * minutes, pythons)
    console.print(table(rows))
    if options.out is not None:
        options.out.write_text(json.dumps({"results": rows}, indent=1))


if __name__ == "__main__":
    main()
