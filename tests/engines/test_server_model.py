"""A model of the server in another process is the very model: from its state and its owner, or else whole."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torchmetrics.classification import BinaryAccuracy

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.callbacks import FML, FedAvg
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.requests import LocalSettings
from fedlightning.contract import CallbackList
from fedlightning.engines.score_tasks import ServerModel
from fedlightning.models import ClientModels
from fedlightning.tensors import module_state
from fedlightning.wrappers.pair import shared_of
from tests.helpers import NormNet, Toy, same


def blueprint(template=None, callback=None):
    return Blueprint(template or NormNet(), CallbackList([callback or FedAvg()]), LocalSettings(seed=0, max_rounds=1))


class Scale:
    def __init__(self):
        self.scale, self.of = 1.0, self


def plus_one(value):
    return value + 1


def made_by(number):
    return plus_one if number == 1 else lambda value: value + number


class Holding(NormNet):
    """Has attributes of all kinds that are not entries of its state."""

    def __init__(self):
        super().__init__()
        self.act = torch.tanh
        self.held = [Scale(), torch.nn.Linear(1, 1, bias=False), random.Random(0), made_by(1)]
        self.metric = BinaryAccuracy(threshold=0.5)


def changed(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    return module


def there(model, made):
    """The module as another process builds it."""
    return pickle.loads(pickle.dumps(model)).built(blueprint(made.template, made.callbacks.callbacks[0]))


@pytest.mark.parametrize(
    ("made", "part", "owner"),
    [
        (blueprint(), lambda module: module, ("", "")),
        (blueprint(Toy(), FML(Toy(hidden=4))), shared_of, ("", "shared_model")),
        (blueprint(ClientModels({"a": Toy(), "b": Toy(hidden=4)})), lambda module: module, ("b", "")),
    ],
    ids=["all of it", "a part", "another architecture"],
)
def test_state_and_owner_make_the_model(made, part, owner):
    module = changed(part(made.build("server", made.architectures[-1])))
    model = ServerModel(module, made)
    assert model.owner == owner and model.built(made) is module
    same(module_state(there(model, made)), module_state(module))
    assert type(there(model, made)) is type(module) is model.kind(made)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "share", 0.3),
        lambda module: setattr(module.net[2][1], "p", 0.9),
        lambda module: setattr(module, "mask", torch.ones(2)),
        lambda module: module.register_buffer("kept", torch.ones(2), persistent=False),
        lambda module: setattr(module, "__class__", type("Other", (Holding,), {})) or None,
        lambda module: module.net.append(torch.nn.Identity()),
        lambda module: setattr(module.held[0], "scale", 2.0),
        lambda module: setattr(module.held[1].weight, "data", torch.ones(1, 1)),
        lambda module: module.held[2].random(),
        lambda module: setattr(module, "act", torch.relu),
        lambda module: module.held.__setitem__(3, made_by(2)),
        lambda module: setattr(module.metric, "threshold", 0.9),
    ],
    ids=lambda change: change.__code__.co_firstlineno,
)
def test_what_no_architecture_gives_travels_whole(change):
    made = blueprint(Holding())
    module = changed(made.build("server"))
    assert ServerModel(module, made).owner == ("", "")
    change(module)
    assert ServerModel(module, made).owner is None
    if type(module) is Holding and module.held[3](1) == 2:  # a function of a function cannot be pickled
        found = there(ServerModel(module, made), made)
        assert found.net[2][1].p == module.net[2][1].p and len(found.net) == len(module.net)
        same(module_state(found), module_state(module))
