"""Gradients of single records: those of a loop over the records, whatever options a layer has."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

pytest.importorskip("opacus", reason="SampleDP counts with Opacus: pip install opacus cryptography")

from opacus.grad_sample import GradSampleHooks

from fedlightning.callbacks.shared.poisson_batches import PoissonBatches
from fedlightning.callbacks.shared.record_gradients import (
    RecordGradients,
    Samples,
    _factors,
    _samples_of,
    hooks_on,
    refuse_mixed_records,
)

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


def twice():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer)


def only_bias():
    layer = nn.Linear(6, 4)
    layer.weight.requires_grad_(False)
    return layer


LAYERS = {
    "an embedding": (lambda: nn.Embedding(6, 4), tokens),
    "padding_idx": (lambda: nn.Embedding(6, 4, padding_idx=2), tokens),
    "padding_idx from the end": (lambda: nn.Embedding(6, 4, padding_idx=-1), tokens),
    "padding_idx, sparse": (lambda: nn.Embedding(6, 4, padding_idx=0, sparse=True), tokens),
    "circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), lambda: torch.randn(RECORDS, 2, 6)),
    "reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), lambda: torch.randn(RECORDS, 2, 4, 4)),
    "a linear layer": (lambda: nn.Linear(6, 4), lambda: torch.randn(RECORDS, 6)),
    "linear, over sequences": (lambda: nn.Linear(6, 4), lambda: torch.randn(RECORDS, 5, 6)),
    "linear, no bias, over images": (lambda: nn.Linear(6, 4, bias=False), lambda: torch.randn(RECORDS, 2, 3, 6)),
    "linear, called twice": (twice, lambda: torch.randn(RECORDS, 6)),
    "linear, only its bias": (only_bias, lambda: torch.randn(RECORDS, 6)),
    "no bias": (lambda: nn.LayerNorm(6, bias=False), lambda: torch.randn(RECORDS, 2, 6)),
}


def by_loop(module, batch, records=RECORDS):
    """Return the sum of the clipped gradients of records, each by a backward pass of its own."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for place in range(records):
        module.zero_grad()
        module.training_step([values[place : place + 1] for values in batch], 0).backward()
        gradient = [parameter.grad.to_dense() for parameter in parameters]
        norm = float(torch.cat([part.flatten() for part in gradient]).norm())
        assert norm > CLIP
        total = [before + part * CLIP / norm for before, part in zip(total, gradient, strict=True)]
    module.zero_grad()
    return total


def private_gradients(module, batch):
    """Return what a private step without noise puts into the place of the gradients, as a sum over the records."""
    batches = PoissonBatches(RECORDS, 1, "seed 3", "batches")  # one batch, which everybody is in
    assert len(next(iter(batches))) == RECORDS
    gradients = RecordGradients(module, batches, CLIP, TINY, "seed 3", "noise", room=1)
    gradients.begin()
    module.training_step(batch, 0).backward()
    gradients.privatise(torch.optim.SGD(module.parameters(), lr=0.1))
    gradients.close()
    return [parameter.grad * RECORDS for parameter in module.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("name", [*LAYERS, "tied"])
def test_private_gradients_are_those_of_a_loop_over_records(name):
    torch.manual_seed(0)
    make, draw = LAYERS.get(name, (None, tokens))
    inputs = draw()
    module = Classifier(make(), inputs) if make else Tied()
    batch = [inputs, torch.randint(0, 3, (RECORDS,))]
    refuse_mixed_records(module, batch, "SampleDP")
    for found, total in zip(private_gradients(module, batch), by_loop(module, batch), strict=True):
        assert torch.allclose(found, total, atol=1e-6)
    assert not any(name.startswith("ft_") for layer in module.modules() for name in vars(layer))


def wide_classifier():
    torch.manual_seed(0)
    inputs = torch.randn(RECORDS, 30)
    module = Classifier(nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 20, bias=False), nn.ReLU()), inputs)
    return module, [inputs, torch.randint(0, 3, (RECORDS,))]


def test_outer_products_are_not_multiplied_out(monkeypatch):
    module, batch = wide_classifier()
    monkeypatch.setattr(Samples, "dense", lambda self: pytest.fail("a gradient of each record was made"))
    for found, total in zip(private_gradients(module, batch), by_loop(module, batch), strict=True):
        assert torch.allclose(found, total, atol=1e-6)


def test_lengths_and_sums_of_factors_are_those_of_opacus_hooks():
    module, batch = wide_classifier()
    hooks = GradSampleHooks(module)
    module.training_step(batch, 0).backward()
    wanted = {name: Samples(parameter.grad_sample) for name, parameter in module.named_parameters()}
    hooks.cleanup()
    module.zero_grad()
    hooks = hooks_on(module)
    module.training_step(batch, 0).backward()
    factor = torch.rand(RECORDS)
    for name, parameter in module.named_parameters():
        found = _samples_of(hooks, parameter, RECORDS)
        assert (found.right is None) == name.endswith("bias")
        assert torch.allclose(found.lengths(), wanted[name].lengths(), rtol=1e-6)
        assert torch.allclose(found.total(factor), wanted[name].total(factor), atol=1e-6)
        assert torch.allclose(found.dense(), wanted[name].left, atol=1e-6)
    hooks.cleanup()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25])
def test_a_record_without_a_finite_gradient_has_no_part(value):
    """Also one whose gradient single precision holds only in factors, not cut to the bound."""
    module, batch = wide_classifier()
    batch[0][0, 0] = value
    module.layer[0].weight.data[:, 0] = 0.0  # so that the others of its activations are what they are
    rest = by_loop(module, [values[1:] for values in batch], RECORDS - 1)
    for found, total in zip(private_gradients(module, batch), rest, strict=True):
        assert torch.allclose(found, total, atol=1e-6)


@pytest.mark.parametrize("clip", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize(
    "samples",
    [
        Samples(
            torch.full((2, 4_000_000), 0.1)
        ),  # so many squares, added up one by one in single precision, are too few
        Samples(torch.full((2, 100), 1e-12)),
        Samples(
            torch.full((2, 100), 1e-24), torch.full((2, 100), 1e14)
        ),  # whose squares single precision does not hold
        Samples(torch.full((2, 20_000), 0.1), torch.full((2, 20_000), 0.1)),
    ],
    ids=["many", "small", "a small factor", "long factors"],
)
def test_nothing_is_longer_than_the_clip(samples, clip):
    factor = float(_factors(samples.lengths(), clip, 2)[0])
    sides = [side[0].double().norm() for side in (samples.left, samples.right) if side is not None]
    assert factor * math.prod(map(float, sides)) <= clip * (1 + 1e-7)


class Frozen(LightningModule):
    """A body that is not trained and stays in eval mode, as when a pretrained one is kept, and a head."""

    def __init__(self):
        super().__init__()
        body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.body, self.head = body.requires_grad_(False).eval(), nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        assert not any(part.training for part in self.body.modules())
        return F.cross_entropy(self.head(self.body(batch[0])), batch[1])


def test_parts_that_are_not_trained_stay_in_eval_mode():
    """Their dropout acted, and their running statistics moved, from the moment at which hooks were attached."""
    torch.manual_seed(0)
    module, batch = Frozen(), [torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))]
    refuse_mixed_records(module, batch, "SampleDP")
    for found, total in zip(private_gradients(module, batch), by_loop(module, batch), strict=True):
        assert torch.allclose(found, total, atol=1e-6)
    assert not any(part.training for part in module.body.modules())


def test_a_layer_that_is_trained_in_eval_mode_is_covered():
    module, batch = wide_classifier()
    module.layer.eval()
    for found, total in zip(private_gradients(module, batch), by_loop(module, batch), strict=True):
        assert torch.allclose(found, total, atol=1e-6)


def test_what_steps_have_released_is_not_named_by_the_data_alone():
    """In a plain Trainer the name was a hash of the exact sums: it told which of two data sets they are of."""
    names = set()
    for secret in "ab":
        torch.manual_seed(0)
        net, batch = Classifier(nn.Linear(6, 4), torch.ones(1, 6)), (torch.ones(RECORDS, 6), torch.arange(RECORDS) % 3)
        sampler = PoissonBatches(RECORDS, 1, "s", "a")
        fit = RecordGradients(net, sampler, CLIP, 1.0, secret, address="", room=1)
        assert len(list(sampler)) == 1
        fit.begin()
        net.training_step(batch, 0).backward()
        fit.privatise(torch.optim.SGD(net.parameters(), 0.1))
        fit.close()
        names.add(fit.released)
    assert len(names) == 2
