"""Gradients of single records: those of a loop over the records, whatever options a layer has."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

pytest.importorskip("opacus", reason="SampleDP counts with Opacus: pip install opacus cryptography")

from fedlightning.callbacks.shared.poisson_batches import PoissonBatches
from fedlightning.callbacks.shared.record_gradients import RecordGradients, refuse_mixed_records

TINY, RECORDS, CLIP = 1e-9, 8, 0.05


class Classifier(LightningModule):
    """A layer, and a linear one that makes classes of what it gives."""

    def __init__(self, layer, inputs):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer(inputs).flatten(1).shape[1], 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.layer(batch[0]).flatten(1)), batch[1])


class Tied(LightningModule):
    """Rows that are looked up are also the weights of the last layer, which does give the padding row a gradient."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(6, 4, padding_idx=2), nn.Linear(4, 6, bias=False)
        self.head.weight = self.rows.weight

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(torch.tanh(self.rows(batch[0]).mean(1))), batch[1])


def tokens():
    return torch.randint(0, 6, (RECORDS, 5))  # each of six rows is looked up, the padding row too


LAYERS = {
    "an embedding": (lambda: nn.Embedding(6, 4), tokens),
    "padding_idx": (lambda: nn.Embedding(6, 4, padding_idx=2), tokens),
    "padding_idx from the end": (lambda: nn.Embedding(6, 4, padding_idx=-1), tokens),
    "padding_idx, sparse": (lambda: nn.Embedding(6, 4, padding_idx=0, sparse=True), tokens),
    "circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), lambda: torch.randn(RECORDS, 2, 6)),
    "reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), lambda: torch.randn(RECORDS, 2, 4, 4)),
    "no bias": (lambda: nn.LayerNorm(6, bias=False), lambda: torch.randn(RECORDS, 2, 6)),
}


def by_loop(module, batch):
    """Return the sum of the clipped gradients of records, each by a backward pass of its own."""
    parameters = list(module.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for place in range(RECORDS):
        module.zero_grad()
        module.training_step([values[place : place + 1] for values in batch], 0).backward()
        gradient = [parameter.grad.to_dense() for parameter in parameters]
        norm = float(torch.cat([part.flatten() for part in gradient]).norm())
        assert norm > CLIP
        total = [before + part * CLIP / norm for before, part in zip(total, gradient, strict=True)]
    module.zero_grad()
    return total


@pytest.mark.parametrize("name", [*LAYERS, "tied"])
def test_private_gradients_are_those_of_a_loop_over_records(name):
    torch.manual_seed(0)
    make, draw = LAYERS.get(name, (None, tokens))
    inputs = draw()
    module = Classifier(make(), inputs) if make else Tied()
    batch = [inputs, torch.randint(0, 3, (RECORDS,))]
    refuse_mixed_records(module, batch, "SampleDP")
    wanted = by_loop(module, batch)
    batches = PoissonBatches(RECORDS, 1, "seed 3", "batches")  # one batch, which everybody is in
    assert len(next(iter(batches))) == RECORDS
    gradients = RecordGradients(module, batches, CLIP, TINY, "seed 3", "noise", room=1)
    gradients.begin()
    module.training_step(batch, 0).backward()
    gradients.privatise(torch.optim.SGD(module.parameters(), lr=0.1))
    gradients.close()
    for parameter, total in zip(module.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad * RECORDS, total, atol=1e-6)
    assert not any(name.startswith("ft_") for layer in module.modules() for name in vars(layer))
