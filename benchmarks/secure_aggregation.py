"""A round with secure aggregation, as a ratio to a plain one, in time and bytes: `python -m benchmarks.secure_aggregation`.

    python -m benchmarks.secure_aggregation [--work cnn] [--clients 20] [--rounds 3] [--repeats 3]

Both runs take turns in one process with one torch thread. CPU time is measured, and the first round of each is not counted.
Targets at 20 clients: 1.5 times the time, twice the bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fedlightning  # noqa: F401  before lightning

# isort: split
from benchmarks.engines import Data, Module
from benchmarks.work import WORKS, Work
from fedlightning import FederatedCallback, FederatedTrainer
from fedlightning.callbacks import FedAvg, SecureAggregation


class Marks(FederatedCallback):
    """A callback that notes the CPU time at which rounds end."""

    times: list[float] = []  # of the class: the trainer copies the callback, and its copies share the list

    def on_round_end(self, server: Any) -> None:
        """Note it."""
        self.times.append(time.process_time())


def measure(work: Work, rounds: int, callbacks: list[FederatedCallback]) -> tuple[float, int]:
    """Return the CPU seconds of a round, and the bytes that clients have sent."""
    Marks.times.clear()
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        callbacks=[*callbacks, Marks()],
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
    spent = [after - before for before, after in zip(Marks.times, Marks.times[1:], strict=False)]
    return statistics.median(spent), trainer.server.costs.bytes_up


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", choices=WORKS, default="cnn")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = WORKS[options.work]
    sizes = tuple(work.sizes[number % len(work.sizes)] for number in range(options.clients))
    work = replace(work, sizes=sizes)
    contestants = {"plain": [FedAvg()], "secure aggregation": [FedAvg(), SecureAggregation()]}
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in contestants}
    for _ in range(options.repeats):
        for name, callbacks in contestants.items():
            taken[name].append(measure(work, options.rounds, callbacks))
    shown = Table("run", "s a round", "ratio", "MB up", "ratio", title=f"{options.work}, {options.clients} clients")
    of = {name: (statistics.median(cost for cost, _ in rows), rows[0][1]) for name, rows in taken.items()}
    for name, (seconds, sent) in of.items():
        ratios = f"{seconds / of['plain'][0]:.2f}", f"{sent / of['plain'][1]:.2f}"
        shown.add_row(name, f"{seconds:.2f}", ratios[0], f"{sent / 1e6:.1f}", ratios[1])
    Console().print(shown)


if __name__ == "__main__":
    main()
