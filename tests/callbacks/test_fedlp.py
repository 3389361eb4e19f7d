"""FedLP: sheet entry 25."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlightning.callbacks import FedAdam, FedAvg, FedLP, FedPer
from fedlightning.layers import partition
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, federate, global_state, same, spied, toy_data

CASES = {"FedLP": Case(FedLP(q=0.5), neutral=FedLP(q=1.0))}
KEPT = {"FedLP": Kept("FedLP")}

SIZES = {"0": 24, "1": 40, "2": 16}


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_with_every_layer_sent_it_is_fedavg(make):
    module, data = make(), toy_data()
    same(*(global_state(federate(module, data, [cb], max_rounds=3)) for cb in (FedAvg(), FedLP(q=1.0))))


def test_with_no_layer_sent_the_server_stands_still():
    trainer, spy = spied(NormNet("adam"), toy_data(), [FedLP(q=0.0)], max_rounds=3)
    same(global_state(trainer), module_state(trainer.server.blueprint.build("server")))
    assert all(update.num_bytes == 0 and update.steps for update in spy.updates)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_layer_is_the_mean_of_those_who_sent_it(weighting):
    """Convex per layer, by hand; a layer that nobody sent is bit for bit what it was."""
    _, spy = spied(NormNet("momentum"), toy_data(SIZES), [FedLP(q=0.4, weighting=weighting)], max_rounds=12)
    weights = SIZES if weighting == "samples" else dict.fromkeys(SIZES, 1)
    empty = partly = 0
    for number in range(1, 12):
        old, new = spy.rounds[number - 1], spy.rounds[number]
        for name in new:
            sent = {c: u.state[name] for c, u in spy.of_round(number).items() if name in u.state}
            empty, partly = empty + (not sent), partly + (0 < len(sent) < 3)
            if not sent:
                assert torch.equal(new[name], old[name])
            elif new[name].is_floating_point():
                total = sum(weights[c] for c in sent)
                wanted = sum(weights[c] * value.double() for c, value in sent.items()) / total
                torch.testing.assert_close(new[name].double(), wanted, atol=1e-7, rtol=1e-6)
    assert empty and partly


class Tied(NormNet):
    """With a weight under two names, normalisation and a buffer of no layer."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(FEATURES, 8)
        self.again.weight = self.net[0].weight
        self.register_buffer("code", torch.arange(CLASSES))

    def logits(self, x):
        return super().logits(x) + 0 * self.again(x).sum()


def test_normalisation_and_tied_names_share_their_layers_draw():
    trainer, spy = spied(Tied(), toy_data(), [FedLP(q=0.5)], max_rounds=8)
    layers = list(partition(trainer.server.module).values())
    assert sorted(name for layer in layers for name in layer) == sorted(trainer.server.kinds)
    first = {"net.0.weight", "net.0.bias", "again.weight", *(n for n in trainer.server.kinds if n.startswith("net.1."))}
    assert first in map(set, layers) and {"code"} in map(set, layers)
    patterns = set()
    for update in spy.updates:
        kept = tuple(set(layer) <= set(update.state) for layer in layers)
        assert set(update.state) == {n for layer, k in zip(layers, kept, strict=True) if k for n in layer}
        patterns.add(kept)
    assert len(patterns) > 6


def test_the_traffic_is_a_share_of_q():
    _, spy = spied(Toy(), toy_data([8] * 10, batch_size=8), [FedLP(q=0.3)], max_rounds=30)
    layers = [("net.0.weight", "net.0.bias"), ("net.3.weight", "net.3.bias")]
    sent = [all(name in update.state for name in layer) for update in spy.updates for layer in layers]
    assert len(sent) == 600
    assert abs(sum(sent) / 600 - 0.3) < 0.06


def test_draws_are_addressed_and_do_not_disturb_training():
    """Round 1's local models are FedAvg's; another seed sends other layers; all clients draw on their own."""
    module, data = Toy("adam", dropout=0.3), toy_data()
    _, plain = spied(module, data, [], max_rounds=1)
    _, ours = spied(module, data, [FedLP(q=0.5)], max_rounds=6)
    _, again = spied(module, data, [FedLP(q=0.5)], max_rounds=6)
    _, other = spied(module, data, [FedLP(q=0.5)], max_rounds=6, seed=1)
    for update in ours.of_round(0).values():
        same(update.state, {name: plain.of_round(0)[update.client].state[name] for name in update.state})
    names = [[set(u.state) for u in run.updates] for run in (ours, again, other)]
    assert names[0] == names[1] != names[2]
    assert len({frozenset(sent) for sent in names[0]}) > 1


def test_clients_may_have_probabilities_of_their_own():
    _, spy = spied(Toy(), toy_data(), [FedLP(q={"0": 1.0, "1": 0.0, "2": 1.0})], max_rounds=2)
    assert all(bool(update.state) == (update.client != "1") for update in spy.updates)
    with pytest.raises(ValueError, match="no q for client '2'"):
        federate(Toy(), toy_data(), [FedLP(q={"0": 1.0, "1": 0.0})])


def test_composes_with_a_private_head_and_a_server_optimizer():
    trainer, spy = spied(NormNet(), toy_data(), [FedPer(), FedLP(q=0.5), FedAdam()], max_rounds=4)
    assert not any(name.startswith("net.3") for update in spy.updates for name in update.state)
    assert (global_state(trainer)["net.1.running_var"] > 0).all()


def test_the_default_trains():
    trainer = federate(Toy(lr=0.3), toy_data([60, 60, 60]), [FedLP()], max_rounds=15, evaluation=15)
    scores = [row.value for row in trainer.rows if (row.stage, row.metric, row.split) == ("G", "val_acc", "val")]
    assert sum(scores) / len(scores) > 0.8


def test_wrong_use_is_refused():
    for q in (-0.1, 1.1, {"0": 2.0}):
        with pytest.raises(ValueError, match=r"FedLP got q=.*\[0, 1\]"):
            FedLP(q=q)
