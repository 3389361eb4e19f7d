"""Clients whose data are elsewhere: a data module that may not be touched in the server's process, and an engine for it."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.client.data_summary import DataSummary
from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import ClientRuntime
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.held_out import exclude_clients
from fedlightning.engines.contract import ClientRecords
from fedlightning.parallel.scheduling import ProcessesEngine
from tests.helpers import Toy


class TouchedError(AssertionError):
    """The server's process has asked for data."""


class Sealed(FederatedDataModule):
    """Data that are there in other processes only: whatever is asked of them in the process that made them raises.

    Args:
        inner: The data; in another process this object is these, set up, without those that are held out.
    """

    def __init__(self, inner: FederatedDataModule) -> None:
        super().__init__()
        self.inner, self.home = inner, os.getpid()
        self.stage: str | None = None
        self.gone: list[str] = []

    def __reduce__(self) -> Any:
        return opened, (self.home, self.inner, self.stage, self.gone)

    def _touched(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TouchedError("the server touches data")

    client_ids = property(_touched)
    num_classes = partition_name = planted_groups = batch_size = seed = property(_touched)  # type: ignore[assignment]
    client_dataloader = pooled_dataloader = public_dataloader = public_report = _touched
    num_samples = class_counts = fingerprint = prepare_data = setup = _touched
    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _touched


def opened(home: int, inner: FederatedDataModule, stage: str | None, gone: list[str]) -> FederatedDataModule:
    assert os.getpid() != home
    inner.setup(stage)
    return exclude_clients(inner, gone)


@dataclass(frozen=True)
class Describe:
    """Describes the data, as a task."""

    leave_out: tuple[str, ...]
    details: tuple[Any, ...]
    client: None = None
    num_bytes: int = 0

    @property
    def address(self) -> tuple[int, str, str]:
        return 0, "description", ""

    def cost(self, runner: ClientRuntime) -> float:
        return 1.0

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[DataSummary, None]:
        return runner.describe(self.leave_out, self.details), None

    def lost(self, reason: str) -> NoReturn:
        raise AssertionError(reason)

    def failure(self, answer: Any) -> None:
        return None


class AwayEngine(ProcessesEngine):
    """One worker has the data, and the server's process does not. As at a site, it does not have those of everybody."""

    data_here = False

    def __init__(self, runner: ClientRuntime, store: ClientRecords, *ignored: Any) -> None:
        super().__init__(runner, store, 1)
        runner.together = False

    @property
    def width(self) -> int:
        return 1

    def set_up(self, stage: str) -> None:
        self.runner.data.stage = stage

    def leave_out(self, clients: Collection[str]) -> None:
        self.runner.know(self.runner.described.exclude(clients))
        self.runner.data.gone += clients
        self.runner.left_out += clients
        self.close()  # workers were sent another federation

    def describe(self, leave_out: Collection[str] = (), details: Collection[Any] = ()) -> DataSummary:
        found: DataSummary = self.ask(Describe(tuple(leave_out), tuple(details)))
        if not leave_out:
            self.runner.know(found)
        return replace(found, together=False)

    def public(self) -> tuple[Any, str]:
        return None, "Sealed"

    def ask(self, task: Any) -> Any:
        return next(iter([*self.map([task])]))

    def beside(self, runner: ClientRuntime) -> AwayEngine:
        return AwayEngine(runner, ClientRecords())


class Failing(Toy):
    """Its training step fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError("age")
