"""Engines on the same work, as ratios to the bare loop: `python -m benchmarks.engines`.

    python -m benchmarks.engines [--works mlp,cnn] [--workers 1,2,4] [--ray] [--repeats 5] [--rounds 3]

Bare loop and engines take turns in one program, so that a machine that slows down slows all of them. In each turn an
engine is started, trains one round that is not counted, then the counted ones. Everything has one torch thread.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedlightning  # noqa: F401  before lightning

# isort: split
from lightning.pytorch import LightningModule
from rich.console import Console
from rich.table import Table

from benchmarks.work import WORKS, BareLoop, Work
from fedlightning import FederatedCallback, FederatedTrainer
from fedlightning.callbacks import FedAvg
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.options import Processes, Ray
from fedlightning.parallel.pool import usable_cores


class Module(LightningModule):
    """The network of the work, trained by plain SGD. It can be imported, so it can be sent to worker processes."""

    def __init__(self, make: Callable[[], nn.Module], lr: float) -> None:
        super().__init__()
        self.net, self.lr = make(), lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(IndexedFederatedDataModule):
    """The clients of the work, as views of shared arrays."""

    def __init__(self, work: Work) -> None:
        super().__init__(batch_size=work.batch)
        self.work = work

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        x, y = max(self.work.data(), key=lambda pair: len(pair[1]))
        indices = [torch.arange(size).numpy() for size in self.work.sizes]
        return [str(index) for index in range(len(indices))], {"train": Split(ArrayDataset(x, y), indices)}


class Clock(FederatedCallback):
    """A callback that records when rounds end."""

    times: list[float] = []  # of the class: the trainer keeps the callback, its copies share the list

    def on_round_end(self, server: Any) -> None:
        self.times.append(time.perf_counter())


def plain_loaders(work: Work) -> dict[str, DataLoader[Any]]:
    """Return the clients of the work as somebody would write them down: a loader over tensors for each."""
    return {
        str(index): DataLoader(TensorDataset(x, y), batch_size=work.batch, shuffle=True)
        for index, (x, y) in enumerate(work.data())
    }


def train(work: Work, rounds: int, loaders: bool = False, **options: Any) -> tuple[list[float], FederatedTrainer]:
    """Train with FedAvg, without evaluation, files or a progress bar.

    Args:
        work: Federation whose network is made by a function that can be imported.
        rounds: Number of rounds.
        loaders: Whether the data come as one plain loader a client, not as a data module.
        options: Arguments of the trainer, such as `engine`.

    Returns:
        Wall-clock seconds at the start and after every round, and the trainer.
    """
    torch.manual_seed(0)
    Clock.times[:] = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=rounds,
            participation=1.0 if work.participants is None else work.participants,
            callbacks=[FedAvg(), Clock()],
            evaluation=0,
            save_state=0,
            logger=False,
            enable_progress_bar=False,
            **{"default_root_dir": folder, "accelerator": "cpu"} | options,
        )
        if loaders:
            trainer.fit(Module(work.make, work.lr), train_dataloaders=plain_loaders(work))
        else:
            trainer.fit(Module(work.make, work.lr), Data(work))
    return list(Clock.times), trainer


def engine_rounds(work: Work, rounds: int, **options: Any) -> list[float]:
    """Return the seconds of each of `rounds` rounds, after one that warms up; see :func:`train`."""
    times, _ = train(work, rounds + 1, **options)
    return [after - before for before, after in itertools.pairwise(times[1:])]


def bare_rounds(work: Work, rounds: int) -> list[float]:
    """Return the same for the hand-written loop."""
    loop = BareLoop(work)
    loop.round(0)
    seconds = []
    for number in range(rounds):
        started = time.perf_counter()
        loop.round(number + 1)
        seconds.append(time.perf_counter() - started)
    return seconds


def compare(work: Work, engines: Mapping[str, Mapping[str, Any]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return engine -> ratio of a round's median wall time to that of the bare loop, for each of `repeats` turns."""
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        bare = statistics.median(bare_rounds(work, rounds))
        for name, options in engines.items():
            ratios[name].append(statistics.median(engine_rounds(work, rounds, **options)) / bare)
    return ratios


def engines_of(workers: Sequence[int], kinds: Sequence[str] = ("processes",)) -> dict[str, dict[str, Any]]:
    """Return name -> arguments of the trainer: one process, and each number of worker processes of each kind."""
    return {"sequential": {"engine": "sequential"}} | {
        f"{kind}, {count} workers": {"engine": {"processes": Processes, "ray": Ray}[kind](count)}
        for count in workers
        for kind in kinds
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--works", default="mlp,cnn,unequal")
    parser.add_argument("--workers", default=str(usable_cores()))
    parser.add_argument("--ray", action="store_true", help="engine='ray', too")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shown = Table(title="Wall time of a round as a ratio to the bare loop (median of turns)", title_justify="left")
    for column in ("work", "engine", "ratio", "min - max"):
        shown.add_column(column)
    for work in options.works.split(","):
        kinds = ("processes", "ray") if options.ray else ("processes",)
        engines = engines_of([int(count) for count in options.workers.split(",")], kinds)
        for name, ratios in compare(WORKS[work], engines, options.rounds, options.repeats).items():
            shown.add_row(work, name, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} - {max(ratios):.2f}")
    Console(width=None if Console().is_terminal else 100).print(shown)


if __name__ == "__main__":
    main()
