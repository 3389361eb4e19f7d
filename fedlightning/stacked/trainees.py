"""A client in a stack: its batches, its progress, and the optimizer that holds its settings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from fedlightning.client.client import Client
from fedlightning.stacked.step import Place


@dataclass
class Recipe:
    """A client's optimizer and schedulers. The optimizer is never stepped; it holds the settings of each moment.

    Attributes:
        optimizer: Optimizer that `configure_optimizers` made.
        schedules: Schedulers, as (scheduler, `"epoch"` or `"step"`, frequency).
    """

    optimizer: torch.optim.Optimizer
    schedules: list[tuple[Any, str, int]] = field(default_factory=list)

    def tick(self, unit: str, number: int) -> None:
        """Note the end of a batch or an epoch."""
        for scheduler, interval, frequency in self.schedules:
            if interval == unit and number % frequency == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns that the optimizer has not been stepped
                    scheduler.step()


@dataclass
class Trainee:
    """One client of a stack in a phase.

    Attributes:
        client: The client.
        source: Its batches.
        batches: Batches in an epoch.
        recipe: Its optimizer and schedulers.
        max_epochs: Epochs to train, or
        max_steps: Optimizer steps to train. One of the two is `None`.
        epoch: Present epoch.
        batch: Next batch of the epoch.
        steps: Optimizer steps taken, when it is done.
        attempts: Optimizer steps attempted: batches used.
        lr_sums: By parameter name, the sum of its learning rate over the steps, when it is done.
        gradient_weights: By parameter name, the sum of the weights of its gradients in SGD's movement, when it is done.
        metrics: Values that the module logged, when it is done.
        error: Exception that ended its training, if any.
        done: Whether it is done.
        unseen: Empty: all steps of a stack are seen.
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
    gradient_weights: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    error: BaseException | None = None
    done: bool = False
    unseen: str = ""

    @property
    def contributed(self) -> bool:
        """Whether its optimizer has stepped: in a stack nothing else moves entries."""
        return self.steps > 0

    @property
    def expected(self) -> int:
        """Number of batches it trains on."""
        return self.max_steps if self.max_steps is not None else self.batches * (self.max_epochs or 0)

    def place(self, turn: int = 0) -> Place:
        """Return its position, now or some turns later in the epoch."""
        return Place(self.batch + turn, self.epoch, self.attempts + turn)

    @property
    def ahead(self) -> int:
        """Number of batches to come that have the shape of the next one."""
        return min(self.source.ahead(), self.batches - self.batch, self.expected - self.attempts)

    def start_epoch(self) -> None:
        """Begin the next epoch, unless the work is done."""
        self.batch = 0
        self.done = self.attempts >= self.expected
        if not self.done:
            self.source.start_epoch(self.epoch)
