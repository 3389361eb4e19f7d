"""A learning rate of its own for the parameters that stay with a client."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import FedAvg, FedPer, FedRep, Local, PLayerFL, PrivateLR
from fedlightning.tensors import module_state
from tests.callbacks.common import batches, deployed
from tests.helpers import Toy, close, differs, federate, global_state, same, toy_data

OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.1),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "adam": lambda p, lr: torch.optim.Adam(p, lr),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.3),
}
SIZES = {"0": 24, "1": 40}


class Choice(Toy):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.kind](self.parameters(), 0.05)
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


@pytest.mark.parametrize("loop", ["fast", "trainer"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_private_layers_train_with_their_own_rate(kind, loop):
    """Against plain torch with two parameter groups, under a schedule."""
    module, data = Choice(kind), toy_data(SIZES)
    trainer = federate(module, data, [FedPer(personal="net.3"), PrivateLR(0.2)], max_rounds=1, local_loop=loop)
    ends = {}
    for client in SIZES:
        model = copy.deepcopy(module)
        groups = [{"params": model.net[0].parameters()}, {"params": model.net[3].parameters(), "lr": 0.05 * 0.2}]
        optimizer = OPTIMIZERS[kind](groups, 0.05)
        clock = schedule(optimizer)
        for x, y in batches(data, client):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            clock.step()
        ends[client] = module_state(model)
        heads = {name: value for name, value in ends[client].items() if name.startswith("net.3")}
        close({name: deployed(trainer, client)[name] for name in heads}, heads, atol=2e-6)
    body = [name for name in ends["0"] if name.startswith("net.0")]
    close(
        {name: global_state(trainer)[name] for name in body},
        {name: sum(SIZES[c] * ends[c][name].double() for c in SIZES) / sum(SIZES.values()) for name in body},
        atol=2e-6,
    )


def test_one_changes_nothing_and_zero_freezes():
    module, data = Toy("momentum"), toy_data(SIZES)
    plain, one, zero = (
        federate(module, data, [FedPer(personal="net.3"), *more], max_rounds=2)
        for more in ([], [PrivateLR(1.0)], [PrivateLR(0.0)])
    )
    same(deployed(plain, "0"), deployed(one, "0"))
    assert torch.equal(deployed(zero, "0")["net.3.weight"], module.net[3].weight)


@pytest.mark.parametrize("method", [FedRep(head_epochs=1), PLayerFL(split=1), Local()], ids=lambda c: c.key)
def test_beside_other_methods(method):
    module, data = Toy(), toy_data(SIZES)
    plain, slow = (federate(module, data, [method, *more], max_rounds=2) for more in ([], [PrivateLR(0.01)]))
    assert differs(deployed(plain, "0"), deployed(slow, "0"))


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="factor=-1"):
        PrivateLR(-1)
    with pytest.raises(ValueError, match="no callback keeps a part"):
        federate(Toy(), toy_data(SIZES), [FedAvg(), PrivateLR(0.1)])
    module = Toy()
    module.configure_optimizers = lambda: torch.optim.Rprop(module.parameters())
    with pytest.raises(ValueError, match="those of Rprop may not be proportional"):
        federate(module, toy_data(SIZES), [FedPer(), PrivateLR(0.1)])
    with pytest.raises(ValueError, match="PrivateLR"):
        federate(Toy(), toy_data(SIZES), [FedPer(), PrivateLR(0.1)], engine="vectorized")
