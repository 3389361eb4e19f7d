"""Several calls of the head in one step: the twin follows the step call by call, as a DualExtractor would."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import FENDA, PerFCL
from fedlightning.wrappers import DualExtractor, dual_by_head, feature_taps
from tests.helpers import Toy, close, make_trainer, toy_data

WIDTH = 8


def extractor() -> nn.Module:
    return nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Views(Toy):
    """Two views of a batch; the second one depends on the prediction for the first."""

    def make(self, hidden, dropout):
        return nn.Sequential(extractor(), nn.Linear(WIDTH, 3))

    calls = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.calls += 1
        first = self.net(x)
        with torch.no_grad():
            target = self.net(x.flip(0)).softmax(-1)
        last = self.net(x + first.softmax(-1).mean(1, keepdim=True))
        return F.cross_entropy(last, y) + F.mse_loss(first, target)

    def test_step(self, batch, batch_idx):
        self.log("test_twice", (self.net(batch[0]) - self.net(batch[0])).abs().sum())


def pair():
    """The same model twice: by its head, and built from a DualExtractor."""
    torch.manual_seed(0)
    by_head = dual_by_head(Views(), "net.1")
    built = Views()
    built.net = DualExtractor(
        copy.deepcopy(by_head.net[0]), copy.deepcopy(by_head.local_extractor.net[0]), nn.Linear(2 * WIDTH, 3)
    )
    built.net.head.load_state_dict(by_head.net[1].state_dict())
    return by_head, built


def parts(module, value):
    if isinstance(module.net, DualExtractor):
        return [value(part) for part in (module.net.global_extractor, module.net.local_extractor, module.net.head)]
    return [value(part) for part in (module.net[0], module.local_extractor.net[0], module.net[1])]


def test_every_call_gets_its_own_local_features():
    by_head, built = pair()
    batch = torch.randn(10, 6), torch.randint(3, (10,))
    losses = []
    for module in (by_head, built):
        losses.append(module.training_step(batch, 0))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    for one, other in zip(parts(by_head, gradients), parts(built, gradients), strict=True):
        close(one, other)
    for one, other in zip(parts(by_head, buffers), parts(built, buffers), strict=True):
        close(one, other)  # running statistics: each call is counted once
    assert by_head.calls == by_head.local_extractor.calls == 1
    assert not any(module._forward_hooks for module in by_head.modules())


def gradients(part):
    return {name: value.grad for name, value in part.named_parameters()}


def buffers(part):
    return {name: value.float() for name, value in part.named_buffers()}


def test_the_step_draws_what_it_draws_alone():
    module = dual_by_head(Toy(dropout=0.5), "net.3")
    x = torch.randn(10, 6)
    states = []
    for step in (lambda: module(x), lambda: (module.net, module(x))):
        torch.manual_seed(3)
        step()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_taps_give_the_features_of_all_calls():
    module, _ = pair()
    taps = feature_taps(module)
    with taps[0], taps[1]:
        module.training_step((torch.randn(10, 6), torch.randint(3, (10,))), 0)
        assert [tap.features.shape for tap in taps] == [(30, WIDTH), (30, WIDTH)]


@pytest.mark.parametrize("algorithm", [FENDA(head="net.1"), PerFCL(head="net.1")])
def test_it_can_be_federated(algorithm):
    trainer = make_trainer(None, [algorithm], max_rounds=2, evaluation=1)
    trainer.fit(Views(), toy_data([16, 16]))
    assert {row.value for row in trainer.rows if row.metric == "test_twice"} == {0.0}


class Manual(Toy):
    """Two optimizer steps a batch, as a GAN takes them."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for x in (batch[0], batch[0] * 0.5):
            loss = F.cross_entropy(self(x), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def test_the_twin_takes_no_optimizer_step():
    trainer = make_trainer(None, [FENDA(head="net.3")], max_rounds=1)
    trainer.fit(Manual(), toy_data([16]))  # 2 batches of 8
    assert trainer.federation.server.costs.steps == 4


def test_a_dual_model_can_be_exported():
    module = dual_by_head(Toy(), "net.3").eval()
    x = torch.randn(5, 6)
    before = module(x)
    exported = torch.export.export(module, (x,)).module()
    assert torch.equal(exported(x), before) and torch.equal(module(x), before)
