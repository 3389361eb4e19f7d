"""Toy federations with tasks that are not a classification, and clients that few methods were written for."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.testing.toys import CLASSES, WIDTH, ToyData, ToyModule

Task = Literal[
    "regression", "regression of one number", "multi-label", "one class at a client", "one sample at a client"
]


OTHER: tuple[Task, ...] = ("regression", "regression of one number", "multi-label")
"""Tasks without a class for each sample."""


class Regression(ToyModule):
    """Three numbers a sample, by their squared error."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))


class MultiLabel(ToyModule):
    """Three labels a sample, each of which is there or not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.binary_cross_entropy_with_logits(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.binary_cross_entropy_with_logits(self(batch[0]), batch[1]))


class TaskData(ToyData):
    """Toy data with the targets of a task, public samples too."""

    def __init__(self, task: Task) -> None:
        super().__init__((12, 1, 10, 15) if task == "one sample at a client" else (12, 7, 10, 15))
        self.task = task
        self.data = {key: self._with_targets(held, key[0]) for key, held in self.data.items()}

    def _with_targets(self, held: TensorDataset, client: str = "") -> TensorDataset:
        x, y = held.tensors
        if self.task == "regression":
            y = x[:, :CLASSES] - 0.5 * x[:, CLASSES:]
        elif self.task == "regression of one number":
            y = x.mean(1, keepdim=True)
        elif self.task == "multi-label":
            y = (x[:, :CLASSES] > 0).float()
        elif self.task == "one class at a client" and client == "site1":
            y = torch.ones_like(y)
        return TensorDataset(x, y)

    def class_counts(self, client: str, split: str = "train") -> list[int] | None:
        return None if self.task in OTHER else super().class_counts(client, split)

    def public_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._with_targets(super().public_dataloader().dataset), batch_size=self.batch_size)  # type: ignore[arg-type]


def module_for(task: Task, full: bool = False) -> LightningModule:
    kinds: dict[str, type[ToyModule]] = {"regression": Regression, "multi-label": MultiLabel}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = kinds.get(task.partition(" of ")[0], ToyModule)(full=full)
        if task == "regression of one number":
            module.head = nn.Linear(WIDTH, 1)
        return module
