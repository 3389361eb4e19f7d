"""How a case of tools/bits.py runs: a small federation, also cut and resumed, and what is looked at when it has ended.

What is read of a finished run is in `parts_of`, the one place that knows the product's attributes.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlightning import FederatedTrainer
from fedlightning.testing.runs import StopAfter, Stopped
from fedlightning.testing.toys import ToyData, ToyModule

Run = Callable[[Path, dict[str, Any]], None]
"""A case: function of a scratch folder and of the dict of parts that it fills."""


def parts_of(trainer: FederatedTrainer) -> dict[str, Any]:
    """Return all that must not change of a run."""
    server = trainer.server
    assert server is not None
    records = {client: trainer.store.get(client) for client in server.clients}
    kept = ("personal", "state", "checkpoints", "num_samples", "steps", "lr_sum", "visits", "last_round")
    deployed = {}
    for client in server.clients:
        with contextlib.suppress(RuntimeError, ValueError):  # a client that never had a model
            deployed[client] = dict(trainer.module(client).state_dict())
    return {
        "models": server.models,
        "deployed": deployed,
        "records": {client: {name: getattr(record, name) for name in kept} for client, record in records.items()},
        "optimizers": {client: _tensors(record.lightning) for client, record in records.items()},
        "state": [server.state, server.checkpoints],
        "counts": [
            server.costs.bytes_up,
            server.costs.bytes_down,
            server.costs.steps,
            server.costs.extra_work,
            server.costs.virtual_time,
            trainer.rounds_done,
        ],
        "failures": [(failure["round"], failure["client"]) for failure in server.failures],
        "rows": sorted([str(cell) for cell in row.cells] for row in trainer.rows),
    }


def _tensors(tree: Any) -> list[Any]:
    """The tensors of what Lightning keeps, in order: its keys may hold names of classes."""
    if isinstance(tree, dict):
        return [found for value in tree.values() for found in _tensors(value)]
    if isinstance(tree, list | tuple):
        return [found for value in tree for found in _tensors(value)]
    return [tree] if isinstance(tree, torch.Tensor) else []


class Moments(ToyModule):
    """With AdamW, a schedule over steps and dropout, which show every difference in training."""

    def __init__(self, full: bool = False, lr: float = 0.02) -> None:
        super().__init__(full, lr)
        self.body.append(nn.Dropout(0.2))

    def configure_optimizers(self) -> Any:
        """Return AdamW and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Deep(ToyModule):
    """One layer more than the toy module."""

    def __init__(self, full: bool = False, lr: float = 0.1) -> None:
        super().__init__(full, lr)
        self.middle = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8))


def seeded(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what `make` makes from the random numbers of seed 0."""
    torch.manual_seed(0)
    return make(*args, **options)


def fit(
    callbacks: Sequence[Any],
    root: Path,
    *,
    module: Any = None,
    data: Any = None,
    full: bool = False,
    batch_size: int = 5,
    resume: str | None = None,
    **arguments: Any,
) -> FederatedTrainer:
    """Run a small federation and return its trainer."""
    data = ToyData() if data is None else data
    data.batch_size = batch_size
    defaults = {"max_rounds": 3, "evaluation": 1, "save_state": 0, "local_steps": 3, "accelerator": "cpu"}
    if "local_epochs" in arguments:
        del defaults["local_steps"]
    quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": root}
    trainer = FederatedTrainer(callbacks=copy.deepcopy(list(callbacks)), **defaults | quiet | arguments)
    trainer.fit(seeded(ToyModule, full=full) if module is None else module(), data, resume=resume)
    return trainer


def plain(callbacks: Sequence[Any], **arguments: Any) -> Run:
    """Return a case that runs once."""

    def run(folder: Path, parts: dict[str, Any]) -> None:
        given = copy.deepcopy(arguments)
        made = {name: given.pop(name)() for name in ("loop_of", "data_of") if name in given}
        given |= {name.removesuffix("_of"): value for name, value in made.items()}
        parts |= parts_of(fit(callbacks, folder, **given))

    return run


def resumed(callbacks: Sequence[Any], cut: Callable[[Callable[[], Any]], None], **arguments: Any) -> Run:
    """Return a case that is cut in its third round and resumed by another trainer."""

    def run(folder: Path, parts: dict[str, Any]) -> None:
        stop = KillAfter(2) if cut is in_a_fork else StopAfter(2)
        given = {"max_rounds": 4, "save_state": 1} | arguments
        cut(lambda: fit([*callbacks, stop], folder, **copy.deepcopy(given)))
        trainer = fit(callbacks, folder, resume="last", **copy.deepcopy(given))
        parts |= parts_of(trainer)

    return run


class KillAfter(StopAfter):
    """Kills the process of a run in the round after `rounds`."""

    def on_round_start(self, server: Any) -> None:
        """Kill this process."""
        if server.round == self.rounds:
            os.kill(os.getpid(), signal.SIGKILL)


def in_place(run: Callable[[], Any]) -> None:
    """Run until the run is stopped."""
    with contextlib.suppress(Stopped):
        run()


def in_a_fork(run: Callable[[], Any]) -> None:
    """Run in a process that is killed."""
    process = os.fork()
    if process == 0:
        try:
            run()
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "The run was not killed."


def onboarded(callbacks: Sequence[Any], **arguments: Any) -> Run:
    """Return a case in which one client is held out, scored, and then taken in."""

    def run(folder: Path, parts: dict[str, Any]) -> None:
        trainer = fit(callbacks, folder, held_out=["site3"], **copy.deepcopy(arguments))
        parts |= parts_of(trainer)
        try:
            rows = trainer.onboard(verbose=False)
            told = [[(k, str(v)) for k, v in row.items() if k != "clients"] for row in rows]
            parts["onboarding"] = sorted(map(sorted, told))
        except ValueError as error:
            parts["sentence"] = str(error)

    return run


def warm_up(root: Path) -> None:
    """Run each loop of a visit once: what it imports when it is first used is then there in all forks."""
    for given in ({"local_loop": "fast"}, {"local_loop": "trainer"}, {"engine": "vectorized"}):
        for module in (ToyModule, Moments):
            fit([], root, max_rounds=1, module=module, **given)
