"""Tiny data of three modalities and networks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fedlightning  # noqa: F401  before lightning
from fedlightning.datamodules import IIDPartitioner, ModalityDataset, MultimodalDataModule
from fedlightning.models import MLP, Classifier, MultimodalNet
from fedlightning.seeding import generator

SIZES = {"A": 4, "D": 3, "R": 2}
CLASSES = 3


class TinySenses(MultimodalDataModule):
    """Three modalities that each know something of the class."""

    def load(self) -> tuple[ModalityDataset, ModalityDataset]:
        parts = []
        for split, count in (("train", 72), ("test", 24)):
            y = torch.arange(count) % CLASSES
            inputs = {}
            for name, size in SIZES.items():
                centres = 2 * torch.randn(CLASSES, size, generator=generator("senses", name))
                inputs[name] = centres[y] + torch.randn(count, size, generator=generator("senses", name, split))
            parts.append(ModalityDataset(inputs, y))
        return parts[0], parts[1]


def senses(clients: int = 3, **options: Any) -> TinySenses:
    """Return data of `clients` clients."""
    return TinySenses(IIDPartitioner(clients), **{"batch_size": 8, **options})


class NormEncoder(nn.Module):
    """An encoder with batch normalisation."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def network(names: str = "ADR", norm: bool = False, **options: Any) -> Classifier:
    """Return a classifier of these modalities."""
    encoders = {name: NormEncoder(SIZES[name]) if norm else MLP(SIZES[name], [], 8) for name in names}
    return Classifier(MultimodalNet(encoders, CLASSES, width=8, **options), CLASSES, lr=0.1)


def of_encoder(name: str, state: Any) -> dict[str, torch.Tensor]:
    """Return the entries of an encoder."""
    return {key: value for key, value in state.items() if key.startswith(f"net.encoders.{name}.")}
