"""Attacks on labels: bad clients that train honestly on wrong data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.algorithm import Client, TrainingData
from fedlightning.callbacks.attacks.base import FACTS, BadClients, bad_loader
from fedlightning.ranges import Range


class LabelFlip(TrainingData, BadClients):
    """Bad clients train on wrong labels: class ``y`` as class ``classes - 1 - y``; all else they do as everybody does.

    Fang, Cao, Jia, Gong, "Local model poisoning attacks to Byzantine-robust federated learning", USENIX Security 2020
    (arXiv:1911.11815), section 6. Their own scores are on their true labels.

    Args:
        clients: The bad clients' ids.
        classes: Number of classes.

    Example:
        >>> import torch
        >>> LabelFlip(clients=[3], classes=10).flipped((torch.zeros(2, 4), torch.tensor([0, 7])))[1]
        tensor([9, 2])
    """

    facts = FACTS

    def __init__(self, clients: Sequence[str | int], classes: Annotated[int, Range("[2, inf)")]) -> None:
        super().__init__(clients)
        self.classes = classes

    def flipped(self, batch: Any) -> Any:
        """Return a batch ``(x, y, ...)`` with other labels.

        Raises:
            ValueError: If it has no labels, or others than the classes.
        """
        labels = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not bool((labels < self.classes).all()):
            raise ValueError(
                f"LabelFlip(classes={self.classes}) needs batches (x, y) with y from 0 to {self.classes - 1}."
            )
        return [batch[0], self.classes - 1 - labels, *batch[2:]]

    def training_batches(self, client: Client, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader of a bad client with other labels, in the same order."""
        return bad_loader(loader, self.flipped) if client.id in self.clients else loader
