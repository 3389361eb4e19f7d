"""Clients that fail in every way and place, importable by worker processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedlightning  # noqa: F401  before lightning
from fedlightning import FederatedCallback
from fedlightning.algorithm import ModelSelection
from tests.helpers import Toy, ToyData, toy_data


class Odd(BaseException):
    """No `Exception`, and cannot be unpickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because of {why}")


class Speechless(Exception):
    """Has no message, and an error instead of one."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


RAISED = {
    "ValueError": lambda: ValueError("the site's scanner"),
    "StopIteration": lambda: StopIteration("no more"),
    "MemoryError": MemoryError,
    "SystemExit": lambda: SystemExit(0),
    "Odd": lambda: Odd("stopped", "the test"),
    "Speechless": Speechless,
    "KeyboardInterrupt": KeyboardInterrupt,
}


class Fault:
    """Fails for one client, as often as it is told to; counts in a folder that all processes see.

    Args:
        folder: Where tries are counted.
        how: A key of :data:`RAISED`, or `exit`, `kill`, `hang`.
        times: Tries that fail.
        round: Only in this round (from 0).
        victim: The client.
    """

    def __init__(self, folder: Any, how: str, times: int = 10**6, round: int | None = None, victim: str = "1") -> None:
        self.folder, self.how, self.times, self.round, self.victim = str(folder), how, times, round, victim

    def __call__(self, client: str, round: int | None = None) -> None:
        if client != self.victim or (self.round is not None and round is not None and round != self.round):
            return
        tries = Path(self.folder) / "tries"
        before = len(tries.read_text()) if tries.exists() else 0
        if before >= self.times:
            return
        tries.write_text("x" * (before + 1))
        if self.how == "exit":
            os._exit(1)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            (Path(self.folder) / "hanging").touch()
            threading.Event().wait()
        if self.how == "quit":
            sys.exit("I am off")
        raise RAISED[self.how]()


def late(folder: Any) -> Any:
    """Return a clock that stands still until a client hangs; then it is late."""
    hanging = Path(str(folder)) / "hanging"
    return lambda: 1e9 if hanging.exists() else 0.0


class FailingHook(ModelSelection):
    """Fails in one of the federated hooks on the client."""

    def __init__(self, fault: Fault, where: str) -> None:
        self.fault, self.where = fault, where

    def claims(self, role: str) -> bool:
        return super().claims(role) and (
            role not in ("on_receive", "on_visit_start", "on_send", "on_client_evaluated") or role == self.where
        )

    def on_receive(self, client: Any, message: Any) -> None:
        if not client.evaluating:
            self._fail("on_receive", client)

    def on_visit_start(self, client: Any) -> None:
        self._fail("on_visit_start", client)

    def on_send(self, client: Any, update: Any) -> None:
        self._fail("on_send", client)
        if self.where == "wrong_shape" and client.id == self.fault.victim:
            update.state["net.0.bias"] = torch.zeros(3)

    def on_client_evaluated(self, client: Any, stage: Any, split: Any, scores: Any, module: Any) -> None:
        if stage == "L1":
            self._fail("on_client_evaluated", client)

    def _fail(self, where: str, client: Any) -> None:
        if where == self.where:
            self.fault(client.id, client.round)


class FailingModule(Toy):
    """Fails in one of the module's own hooks, when it meets the victim's data or is asked to be the victim."""

    def __init__(self, fault: Fault, where: str) -> None:
        torch.manual_seed(0)
        super().__init__("sgd")
        self.fault, self.where = fault, where
        data = toy_data()
        data.setup("fit")
        rows = [data.tensors[fault.victim][split][0] for split in ("train", "val", "test")]
        self.marks = [float(value) for value in torch.cat(rows)[:, 0]]
        self.mine = ""

    def _look(self, where: str, batch: Any) -> None:
        if where == self.where and float(batch[0][0, 0]) in self.marks:
            self.fault(self.fault.victim)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._look("training_step", batch)
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.where == "nan" and float(batch[0][0, 0]) in self.marks else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._look("validation_step", batch)
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.where == "configure_optimizers":
            self.fault(self.mine)
        return super().configure_optimizers()

    def setup(self, stage: str) -> None:
        if self.where == "setup" and stage == "fit":
            self.fault(self.mine)


class Names(FederatedCallback):
    """Tells modules whose they are."""

    def on_receive(self, client: Any, message: Any) -> None:
        client.module.mine = client.id


class FailingData(ToyData):
    """Fails when a loader is asked for."""

    def __init__(self, fault: Fault | None = None, split: str = "train") -> None:
        super().__init__(toy_data().tensors)
        self.fault, self.split = fault, split

    def client_dataloader(self, client: str, split: str) -> Any:
        if self.fault is not None and split == self.split and self.armed:
            self.fault(client)
        return super().client_dataloader(client, split)

    armed = False
