"""A client in a stack: its batches, how far it has come, and the optimizer that says what its settings are."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from fedlightning.engines.stacked.step import Place
from fedlightning.visit.client import Client


@dataclass
class Recipe:
    """A client's optimizer and schedulers: never stepped themselves, they say what the settings are at each moment.

    Attributes:
        optimizer: as `configure_optimizers` gave it; schedules: (scheduler, "epoch" or "step", frequency).
    """

    optimizer: torch.optim.Optimizer
    schedules: list[tuple[Any, str, int]] = field(default_factory=list)

    def tick(self, unit: str, number: int) -> None:
        """The end of batch or epoch `number`, counted from 1."""
        for scheduler, interval, frequency in self.schedules:
            if interval == unit and number % frequency == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that the optimizer itself has not been stepped
                    scheduler.step()


@dataclass
class Trainee:
    """One client of a stack in a phase.

    Attributes:
        source: its batches; batches: how many an epoch has.
        max_epochs, max_steps: how much it trains; one of them.
        steps, attempts, lr_sums, metrics: what came of it; error: why it failed.
    """

    client: Client
    source: Any
    batches: int
    recipe: Recipe
    max_epochs: int | None = None
    max_steps: int | None = None
    epoch: int = 0
    batch: int = 0
    steps: int = 0
    attempts: int = 0
    lr_sums: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None
    done: bool = False

    @property
    def expected(self) -> int:
        """Batches it is going to train on."""
        return self.max_steps if self.max_steps is not None else self.batches * (self.max_epochs or 0)

    def place(self, turn: int = 0) -> Place:
        """Where it stands, or is going to stand some turns later in the epoch."""
        return Place(self.batch + turn, self.epoch, self.attempts + turn)

    @property
    def ahead(self) -> int:
        """Batches that are going to be like the next one."""
        return min(self.source.ahead(), self.batches - self.batch, self.expected - self.attempts)

    def start_epoch(self) -> None:
        """Begin the next epoch, unless the work is done."""
        self.batch = 0
        self.done = self.attempts >= self.expected
        if not self.done:
            self.source.start_epoch(self.epoch)
