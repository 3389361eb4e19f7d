"""PLayer-FL in stacks of clients: the same sensitivities, the same cut, the same models as one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlightning  # noqa: F401

# isort: split
from fedlightning.callbacks import FedProx, PLayerFL
from fedlightning.options import Vectorized
from tests.helpers import NormNet, Toy, federate, toy_data

SIZES = (24, 40, 18, 11)


class Tied(Toy):
    """Two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        self.net[2].weight = self.net[0].weight


class Backwards(Toy):
    """Registers its layers in another order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        last, first = nn.Linear(6, 3), nn.Linear(6, 6)
        self.net = nn.ModuleDict({"last": last, "first": first})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net["last"](self.net["first"](x).relu())
        return out


def run(module: Any, options: dict[str, Any], others: tuple[Any, ...], **engine: Any) -> Any:
    callbacks = [PLayerFL(**options), *others]
    return federate(module, toy_data(SIZES), callbacks, max_rounds=3, local_epochs=2, **engine)


@pytest.mark.parametrize(
    ("kind", "options", "others"),
    [
        (Toy, {"threshold": 1.05}, ()),
        (Toy, {"threshold": 1.05, "weights_only": True}, ()),
        (Toy, {"threshold": 1.2}, (FedProx(mu=0.5),)),
        (NormNet, {"threshold": 1.5}, ()),
        (Tied, {"threshold": 1.1}, ()),
        (Backwards, {"threshold": 1.1}, ()),
    ],
    ids=["plain", "weights only", "with a correction", "BatchNorm", "tied", "called backwards"],
)
@pytest.mark.parametrize("stack", [None, 2])
def test_as_one_after_another(kind: Any, options: dict[str, Any], others: tuple[Any, ...], stack: int | None) -> None:
    torch.manual_seed(0)  # near a kink of ReLU rounding makes a difference
    module = kind()
    alone = run(module, options, others)
    stacked = run(module, options, others, engine=Vectorized(clients_per_stack=stack))
    mine, theirs = (trainer.server.state["PLayerFL"] for trainer in (alone, stacked))
    assert torch.equal(mine["order"], theirs["order"])
    assert mine["personal"] == theirs["personal"]
    for client, expected in mine["clients"].items():
        assert bool((expected > 0).any())
        torch.testing.assert_close(theirs["clients"][client], expected, rtol=1e-4, atol=1e-12)
    for name, value in alone.server.model.items():
        torch.testing.assert_close(stacked.server.model[name], value, rtol=1e-4, atol=5e-5)
    for client in alone.server.clients:
        kept, theirs_kept = alone.store.get(client).personal, stacked.store.get(client).personal
        assert kept.keys() == theirs_kept.keys()
        for name, value in kept.items():
            torch.testing.assert_close(theirs_kept[name], value, rtol=1e-4, atol=5e-5)
