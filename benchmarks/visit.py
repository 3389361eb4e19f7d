"""Local training alone, by visit and by step, as ratios to the bare loop: `python -m benchmarks.visit`.

    python -m benchmarks.visit [--works mlp,cnn] [--loops fast,trainer] [--repeats 9] [--rounds 2] [--minutes 2]

Contestants take turns in one process with one torch thread, so that a machine that slows down slows all of them. CPU time
is measured, so that other processes on the machine do not count. The first round of each contestant is not counted.
Visits are trained with one and with two epochs: what the second epoch adds is the cost of its steps. Large networks are
measured with fewer clients (`CLIENTS`), and turns end when the minutes are over; three are always counted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import fedlightning  # noqa: F401  before lightning

# isort: split
from rich.console import Console
from rich.table import Table

from benchmarks.engines import Data, Module
from benchmarks.work import WORKS, Work
from fedlightning.assemble import CLIENT_PARTS
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Evaluate, LocalSettings
from fedlightning.client.runtime import ClientRuntime
from fedlightning.client.visit import carry_out
from fedlightning.contract import CallbackList
from fedlightning.contract.messages import Message
from fedlightning.tensors import clone, module_state


@dataclass
class Cost:
    """CPU milliseconds.

    Attributes:
        visit: Cost of a visit of one epoch.
        step: Cost of one step.
    """

    visit: float
    step: float

    def fixed(self, steps: int) -> float:
        """Return the cost of a visit without its steps."""
        return self.visit - steps * self.step


def bare_visits(work: Work) -> Callable[[int], None]:
    """Return a function that visits every client by hand, for a number of epochs.

    It has one model, resident tensors and batches by index slices, and copies the state in and out.
    """
    model, data = work.make(), work.data()
    parameters = list(model.parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)

    def run(epochs: int) -> None:
        for x, y in data:
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(parameters, lr=work.lr)
            for _ in range(epochs):
                order = torch.randperm(len(y), generator=generator)
                for start in range(0, len(y), work.batch):
                    chosen = order[start : start + work.batch]
                    optimizer.zero_grad()
                    F.cross_entropy(model(x[chosen]), y[chosen]).backward()
                    optimizer.step()
            assert all(value.clone().isfinite().all() for value in model.state_dict().values())

    return run


def own_visits(work: Work, local_loop: str) -> Callable[[int], None]:
    """Return a function that visits every client through a `ClientRuntime`, as engines do."""
    data = Data(work)
    data.setup("fit")
    settings = LocalSettings(
        seed=0,
        max_rounds=1,
        trainer_arguments={"accelerator": "cpu", "devices": 1},
        local_loop=local_loop,  # type: ignore[arg-type]
    )
    blueprint = Blueprint(Module(work.make, work.lr), CallbackList([]), settings, parts=CLIENT_PARTS)
    runner = ClientRuntime(blueprint, data)
    state = clone(module_state(runner.blueprint.build("server")))
    names = tuple(state)
    record = ClientRecord()

    def run(epochs: int) -> None:
        for client in data.client_ids:
            message = Message(round=0, client=client, state=state, returns=names, work=epochs)
            update, _ = carry_out(runner, message, record, Evaluate())
            assert update.error is None, update.error

    return run


CLIENTS = {"cnn": 2, "cnn100": 2}
"""Work -> clients that are visited in a round, where a visit is long enough to be measured with few."""


def measure(
    runs: dict[str, Callable[[int], None]], work: Work, repeats: int, rounds: int, seconds: float = math.inf
) -> dict[str, Cost]:
    """Return the cost of each contestant: medians over at most `repeats` turns of `rounds` rounds each.

    Args:
        runs: Functions that visit every client for a number of epochs.
        work: Their work.
        repeats: Number of turns, beside one that is not counted.
        rounds: Rounds of a turn.
        seconds: Wall-clock time after which no turn begins, once three are counted.
    """
    visits = len(work.sizes) * rounds
    taken: dict[tuple[str, int], list[float]] = {}
    started = time.monotonic()
    for turn in range(repeats + 1):
        if turn > 3 and time.monotonic() - started > seconds:
            break
        for name, run in runs.items():
            for epochs in (1, 2):
                start = time.process_time()
                for _ in range(rounds):
                    run(epochs)
                if turn:
                    taken.setdefault((name, epochs), []).append(time.process_time() - start)
    costs = {}
    for name in runs:
        one, two = (1000 * statistics.median(taken[name, epochs]) / visits for epochs in (1, 2))
        costs[name] = Cost(one, (two - one) * len(work.sizes) / work.steps)
    return costs


def contestants(work: Work, loops: list[str]) -> dict[str, Callable[[int], None]]:
    """Return name -> function that visits every client: the bare loop, and each of the local loops."""
    return {"bare": bare_visits(work)} | {loop: own_visits(work, loop) for loop in loops}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default="mlp,cnn", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--loops", default="fast,trainer")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=2, help="for all works together")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("work", "loop", "visit [ms]", "ratio", "step [ms]", "ratio", "beside steps [ms]", "above bare [ms]")
    works = given.works.split(",")
    for name in works:
        work = replace(WORKS[name], sizes=WORKS[name].sizes[: CLIENTS.get(name)])
        steps = work.steps // len(work.sizes)
        costs = measure(
            contestants(work, given.loops.split(",")),
            work,
            given.repeats,
            given.rounds,
            60 * given.minutes / len(works),
        )
        bare = costs["bare"]
        for loop, cost in costs.items():
            table.add_row(
                name, loop, f"{cost.visit:.3f}", f"{cost.visit / bare.visit:.3f}", f"{cost.step:.4f}",
                f"{cost.step / bare.step:.3f}", f"{cost.fixed(steps):.3f}",
                f"{cost.fixed(steps) - bare.fixed(steps):+.3f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
