"""The engine `vectorized` against the bare loop: `python -m benchmarks.vectorized`.

    python -m benchmarks.vectorized [--works mlp,logistic] [--stacks 5,20,none] [--repeats 5] [--rounds 3]

Bare loop and engine take turns in one program. CPU time is compared, not wall time, since other programs on the machine
do not change it. Everything has one torch thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fedlightning  # noqa: F401  before lightning

# isort: split
from benchmarks.engines import train
from benchmarks.work import WORKS, BareLoop, Work
from fedlightning.client.requests import Evaluate
from fedlightning.contract import Job
from fedlightning.options import EngineOptions, Vectorized
from fedlightning.server.federation import Federation


def digits() -> nn.Module:
    """Return a logistic regression on 8x8 digits (64-10)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class SmallWork(Work):
    """A work whose samples have 64 pixels."""

    def data(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(x.flatten(1)[:, :64].contiguous(), y) for x, y in super().data()]


SMALL = {"digits": SmallWork(digits, (600,) * 100)}
ALL = WORKS | SMALL


def federation(work: Work, folder: str, engine: EngineOptions) -> Federation:
    """Return a federation of FedAvg that has trained its first round."""
    _, trainer = train(work, 1, engine=engine, default_root_dir=folder)
    assert trainer.federation is not None
    return trainer.federation


def visits(run: Federation) -> None:
    """Carry out the visits of a round: make messages, build and train clients, make updates. Nothing is aggregated."""
    server = run.server
    server.round += 1
    messages = (server.message(Job(client)) for client in server.participants())
    for update in run.engine.run(messages, Evaluate()):
        assert update.error is None


def seconds(act: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    started = time.process_time()
    act()
    return time.process_time() - started


def ratios(work: Work, engine: EngineOptions, rounds: int, repeats: int) -> list[float]:
    """Return the CPU time of the engine's visits as ratios to the bare loop's rounds, measured back to back.

    Args:
        work: Federation whose network is made by a function that can be imported.
        engine: Argument of the trainer.
        rounds: Number of rounds of a measurement.
        repeats: Number of measurements.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, loop = federation(work, folder, engine), BareLoop(work)
        visits(run)
        loop.round(0)
        found = []
        for _ in range(repeats):
            pairs = [(seconds(partial(loop.round, n)), seconds(partial(visits, run))) for n in range(rounds)]
            found.append(sum(pair[1] for pair in pairs) / sum(pair[0] for pair in pairs))
    return found


def sizes(text: str) -> list[int | None]:
    """Parse `"5,20,none"` as numbers."""
    return [None if part == "none" else int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--works", default="mlp,logistic,digits")
    parser.add_argument("--stacks", default="none", type=sizes)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, help="number of clients, all of the work's first size")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shown = Table(title="CPU time of a round's visits as a ratio to the bare loop", title_justify="left")
    for column in ("work", "clients in a stack", "median", "min - max"):
        shown.add_column(column)
    for name in options.works.split(","):
        work = ALL[name]
        if options.clients:
            work = replace(work, sizes=work.sizes[:1] * options.clients)
        for size in options.stacks:
            found = ratios(work, Vectorized(size), options.rounds, options.repeats)
            spread = f"{min(found):.2f} - {max(found):.2f}"
            shown.add_row(name, str(size or "default"), f"{statistics.median(found):.2f}", spread)
    Console(width=None if Console().is_terminal else 100).print(shown)


if __name__ == "__main__":
    main()
