"""Rounds with each private callback, as ratios to FedAvg on equal work, in CPU time and bytes.

    python -m benchmarks.private [--only SampleDP,masked] [--clients 20] [--batch 64] [--rounds 4] [--repeats 5] [--out FILE]

Each client takes one step on one batch with the network of 1.66 million parameters, the hardest case: what privacy adds to a
visit does not grow with its steps, but for `SampleDP`, whose every step is dearer. The runs take turns in one process with
one torch thread; the first round of each is not counted. Ratios are taken within a turn; their median over turns is shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fedlightning  # noqa: F401  before lightning

# isort: split
from benchmarks.engines import Data, Module
from benchmarks.work import CNN, Work
from fedlightning import FederatedCallback, FederatedTrainer
from fedlightning.callbacks import ClientDP, FedAvg, SampleDP, SecureAggregation

PLAIN = "FedAvg"
TARGETS = {"ClientDP": 1.1, "SecureAggregation": 1.5, "masked": 2.5, "SampleDP": 4.0}
"""Target ratios."""
NOISE = {"delta": 1e-3, "noise_multiplier": 1.0, "clip": 1.0}


class Marks(FederatedCallback):
    """A callback that notes the CPU time at which rounds end."""

    times: list[float] = []  # of the class: the trainer copies the callback, and its copies share the list

    def on_round_end(self, server: Any) -> None:
        """Note it."""
        self.times.append(time.process_time())


def contestants(clients: int) -> dict[str, Callable[[], list[FederatedCallback]]]:
    """Return what makes the callbacks of each run."""
    return {
        PLAIN: list,
        "ClientDP": lambda: [ClientDP(**NOISE)],
        "SecureAggregation": lambda: [SecureAggregation()],
        "masked": lambda: [SecureAggregation(), ClientDP(**NOISE, where="masked", shares=2 * clients // 3 + 1)],
        "SampleDP": lambda: [SampleDP(**NOISE)],
    }


def measure(work: Work, rounds: int, callbacks: list[FederatedCallback]) -> tuple[float, int]:
    """Return the CPU seconds of a round, and the bytes that clients have sent."""
    Marks.times.clear()
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        callbacks=[FedAvg(weighting="uniform"), *callbacks, Marks()],
        max_rounds=rounds + 1,
        local_epochs=1,
        evaluation=0,
        save_state=0,
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
        sanity_check=False,
        default_root_dir="runs/benchmarks",
    )
    trainer.fit(Module(work.make, work.lr), datamodule=Data(work))
    assert trainer.server is not None
    spent = [after - before for before, after in itertools.pairwise(Marks.times)]
    return statistics.median(spent), trainer.server.costs.bytes_up


def compare(work: Work, names: list[str], rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each run: seconds and megabytes with their ratios to FedAvg's."""
    makers = contestants(len(work.sizes))
    turns = [{name: measure(work, rounds, makers[name]()) for name in names} for _ in range(repeats)]
    rows = []
    for name in names:
        ratios = [turn[name][0] / turn[PLAIN][0] for turn in turns]
        sent = turns[0][name][1]
        rows.append(
            {
                "run": name,
                "seconds": statistics.median(turn[name][0] for turn in turns),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "mb_up": sent / 1e6,
                "mb_ratio": sent / turns[0][PLAIN][1],
            }
        )
    return rows


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Return the rows as a table for the terminal."""
    shown = Table(title=title, title_justify="left")
    for column in ("run", "CPU s a round", "ratio", "min - max", "target", "MB up", "ratio"):
        shown.add_column(column, justify="left" if column == "run" else "right")
    for row in rows:
        shown.add_row(
            row["run"],
            f"{row['seconds']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_min']:.2f} - {row['ratio_max']:.2f}",
            f"{TARGETS[row['run']]:.1f}" if row["run"] in TARGETS else "",
            f"{row['mb_up']:.1f}",
            f"{row['mb_ratio']:.2f}",
        )
    return shown


def main() -> None:
    """Measure and print, and write JSON if `--out` is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds, after one that warms up")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = Work(CNN, (options.batch,) * options.clients, batch=options.batch)
    rows = compare(work, [PLAIN, *options.only.split(",")], options.rounds, options.repeats)
    title = f"{options.clients} clients with one batch of {options.batch} each, 1.66 million parameters"
    Console(width=None if Console().is_terminal else 100).print(table(rows, title))
    if options.out is not None:
        options.out.write_text(json.dumps({"results": rows}, indent=1))


if __name__ == "__main__":
    main()
