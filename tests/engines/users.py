"""What worker processes import in tests: callbacks that die, fail and wait, modules, tasks."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fedlightning  # noqa: F401  before lightning
from fedlightning.algorithm import Facts

# isort: split
from lightning.pytorch import Callback

from fedlightning import FederatedCallback
from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract import Job
from tests.helpers import Toy


class TwoArguments(Exception):
    """Can be pickled but not unpickled: its ``__init__`` wants more than it keeps."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because of {why}")


class Trouble(FederatedCallback):
    """Makes the visits of one client fail: by an exception, or by the death of the process.

    Args:
        victim: whose visits; how: ``"raise"`` or ``"kill"``; round: only in this one.
        once: a file; where it is there already, nothing happens any more.
    """

    def __init__(self, victim: str, how: str, round: int | None = None, once: str | None = None) -> None:
        self.victim, self.how, self.round, self.once = victim, how, round, once

    def on_train_batch_end(self, *args: Any) -> None:
        if self.client.id != self.victim or self.round not in (None, self.client.round):
            return
        if self.once is not None and Path(self.once).exists():
            return
        if self.once is not None:
            Path(self.once).touch()
        if self.how == "raise":
            raise TwoArguments("stopped", "the test")
        os.kill(os.getpid(), signal.SIGKILL)


class Interrupt(FederatedCallback):
    """The user's Ctrl-C, while updates come in."""

    facts = Facts(takes_part=False)

    def on_update(self, server: Any, update: Any) -> None:
        raise KeyboardInterrupt


class Lose(FederatedCallback):
    """Does something while the updates of round 2 come in, such as losing a machine."""

    facts = Facts(takes_part=False)
    then: list[Any] = []  # of the module, which is there for the driver alone

    def on_update(self, server: Any, update: Any) -> None:
        if server.round == 1 and self.then:
            self.then.pop()()


class TwoVisits(FederatedCallback):
    """Every participant is visited twice in one list of jobs, and counts its visits."""

    def plan_round(self, server: Any) -> Any:
        yield [Job(client) for client in server.participants() for _ in range(2)]

    def on_send(self, client: Any, update: Any) -> None:
        client.state[self.key] = {"visits": client.state.get(self.key, {}).get("visits", 0) + 1}


class Noise(Callback):
    """Warns in every visit."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        import warnings

        warnings.warn("what a client has to say", UserWarning, stacklevel=1)


class Holding(Toy):
    """Holds a function that cannot be sent anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda x: x


class ReadsTrainer(Toy):
    """Reads a part of the Trainer that the fast loop does not have, so that Lightning's own trains it."""

    def on_train_epoch_end(self) -> None:
        self.batches = self.trainer.fit_loop.total_batch_idx


@dataclass
class Work:
    """A task that waits and tells what it saw."""

    name: int
    client: str | None = None
    seconds: float = 0.0
    error: str | None = None
    num_bytes: int = 1
    value: Any = None

    @property
    def address(self) -> tuple[int, str, str]:
        return 1, "work", self.client or str(self.name)

    def cost(self, runner: ClientRuntime) -> float:
        return self.seconds

    def failure(self, answer: Any) -> tuple[str, str] | None:
        return None

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[tuple[int, int, int], ClientRecord | None]:
        time.sleep(self.seconds)
        if self.error is not None:
            raise ValueError(self.error)
        after = record.copy()
        after.visits += 1
        return (self.name, record.visits, torch.get_num_threads()), after

    def lost(self, reason: str) -> tuple[int, int, int]:
        raise RuntimeError(reason)


@dataclass
class Unsendable(Work):
    """A task that holds a lambda."""

    def __post_init__(self) -> None:
        self.value = lambda: None


class Sleep(Callback):
    """Long visits: a process that is to be ended in the middle of one."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (Path(self.folder) / str(os.getpid())).touch()
        time.sleep(600)
