"""The common samples and what a model's layers give for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlightning import FederatedCallback
from fedlightning.callbacks.diagnostics.layer_diagnostics import common_samples, layer_grams
from fedlightning.layers import ordered_layers
from fedlightning.tensors import clone, module_state
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, ToyData, federate, same, samples

VALIDATION = {"0": 30, "1": 10, "2": 20}


class Look(FederatedCallback):
    """Does ``look`` with every client before it trains."""

    def __init__(self, look):
        self.look, self.found = look, {}

    def on_receive(self, client, message):
        self.found[client.id] = self.look(client)


def unequal(**sizes):
    """Data whose clients have as many validation samples as ``sizes`` say."""
    counts = {client: {"train": 8, "val": size, "test": 4} for client, size in (sizes or VALIDATION).items()}
    return ToyData({c: {split: samples(c, split, n) for split, n in of.items()} for c, of in counts.items()})


def looked(module, look, data=None):
    callback = Look(look)
    federate(module, data or unequal(), [callback], max_rounds=1)
    return callback.found


def test_every_client_gets_the_same_samples_and_gives_in_proportion():
    data = unequal()
    found = looked(Toy(), lambda client: common_samples(client, 12), data)
    (x, y), count = found["0"]
    assert count == len(x) == len(y) == 12
    for (others, labels), _ in found.values():
        assert torch.equal(others, x) and torch.equal(labels, y)
    owner = {tuple(row.tolist()): client for client, of in data.tensors.items() for row in of["val"][0]}
    taken = [owner[tuple(row.tolist())] for row in x]
    assert {client: taken.count(client) for client in VALIDATION} == {"0": 6, "1": 2, "2": 4}
    assert len({tuple(row.tolist()) for row in x}) == 12


def test_there_are_no_more_samples_than_there_are():
    (found,) = {count for _, count in looked(Toy(), lambda client: common_samples(client, 1000)).values()}
    assert found == sum(VALIDATION.values())


def test_without_validation_data_there_is_nothing_common():
    seen = []

    def look(client):
        with pytest.raises(ValueError, match="pooled validation data, and there is none"):
            common_samples(client, 4)
        seen.append(client.id)

    looked(Toy(), look, unequal(**dict.fromkeys(VALIDATION, 0)))
    assert sorted(seen) == sorted(VALIDATION)


class Forked(Toy):
    """A layer that no batch meets, one whose output has another first dimension, and one that is met twice."""

    def make(self, hidden, dropout):
        parts = {"body": (FEATURES, hidden), "again": (hidden, hidden), "head": (hidden, CLASSES), "unused": (2, 2)}
        return nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in parts.items()} | {"mean": nn.Linear(1, 1)})

    def logits(self, x):
        self.net["mean"](x.mean().view(1, 1))
        return self.net["head"](self.net["again"](self.net["again"](self.net["body"](x)).relu_()))


def gram(features):
    """Centred, with norm 1: by the definition."""
    centred = (features - features.mean(0)).double()
    product = centred @ centred.T
    return (product / product.norm()).float()


def grams_of(client, module):
    batch, count = common_samples(client, 12)
    layers = ordered_layers(module)
    found = layer_grams(module, batch, count, layers, client.precision, "address")
    return {layer.name: one for layer, one in zip(layers, found, strict=True)}, batch[0]


def test_grams_are_of_the_first_call_before_what_works_in_place():
    def look(client):
        module = client.module
        found, x = grams_of(client, module)
        with torch.no_grad():
            body = module.net["body"](x)
            once = module.net["again"](body)
            head = module.logits(x)
        for name, expected in (("net.body", body), ("net.again", once), ("net.head", head)):
            torch.testing.assert_close(found[name], gram(expected), atol=1e-6, rtol=0)
        for name in ("net.unused", "net.mean"):
            assert found[name].isnan().all()

    assert len(looked(Forked(), look)) == 3


def test_looking_leaves_no_trace():
    def look(client):
        module = client.module.train()
        before, random = clone(module_state(module)), torch.get_rng_state()
        grams_of(client, module)
        same(module_state(module), before)
        assert torch.equal(torch.get_rng_state(), random)
        assert module.training and not any(child._forward_hooks for child in module.modules())

    assert len(looked(NormNet(dropout=0.5), look)) == 3
