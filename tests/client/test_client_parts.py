"""What attaches to clients from outside (`ClientParts`): none of it changes a bit, and it is wherever clients are."""

from __future__ import annotations

import threading

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from fedlightning.assemble import CLIENT_PARTS
from fedlightning.callbacks import SCAFFOLD
from fedlightning.client.blueprint import Blueprint, ClientParts
from fedlightning.client.fit import FitterChoice, LightningFitter
from fedlightning.client.requests import LocalSettings
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract import CallbackList
from fedlightning.errors import ConfigurationError
from fedlightning.parallel.worker import Switches, parts_of, take_over
from tests.helpers import NormNet, Toy, federate, same, toy_data


def test_without_any_models_and_scores_are_the_same(monkeypatch):
    def fitted():
        torch.manual_seed(0)
        trainer = federate(NormNet(), toy_data([22, 40], val=9), [SCAFFOLD()], max_rounds=2, evaluation=1)
        return trainer, [row.cells for row in trainer.rows]

    whole, rows = fitted()
    monkeypatch.setattr("fedlightning.assemble.CLIENT_PARTS", ClientParts())
    bare, bare_rows = fitted()
    assert (whole.summary["local_loop"], bare.summary["local_loop"]) == ("fast", "trainer")
    same(bare.server.model, whole.server.model)
    assert rows and bare_rows == rows


def test_a_loop_that_is_not_attached_is_refused(monkeypatch):
    monkeypatch.setattr("fedlightning.assemble.CLIENT_PARTS", ClientParts())
    with pytest.raises(ValueError, match="local_loop='fast' cannot be used: no such loop is attached, only trainer"):
        federate(Toy(), toy_data([22]), local_loop="fast")


@pytest.mark.parametrize("parts", [CLIENT_PARTS, ClientParts()], ids=["attached", "core alone"])
def test_a_template_that_cannot_be_copied_is_refused_by_either_copier(parts):
    module = Toy()
    module.guard = threading.Lock()
    blueprint = Blueprint(module, CallbackList([]), LocalSettings(seed=0, max_rounds=1), parts=parts)
    with pytest.raises(ConfigurationError, match="Toy cannot be copied for each client: 'guard' is a lock"):
        blueprint.build("0")


def test_they_are_in_workers_beside_and_in_smaller_runs_too():
    data = toy_data([24])
    data.setup("fit")
    blueprint = Blueprint(Toy(), CallbackList([]), LocalSettings(seed=0, max_rounds=1), parts=CLIENT_PARTS)
    runner = ClientRuntime(blueprint, data)
    worker = take_over(Switches.of_this_process(), parts_of(runner))
    for other in (worker, runner.beside(blueprint), runner.beside(blueprint.without_callbacks([]))):
        assert other.blueprint.parts == CLIENT_PARTS and other.loop.used == "fast"


class Picky:
    """A fitter that refuses everything but its own kind of module."""

    def __init__(self, name, kind):
        self.name, self.kind = name, kind

    def refusal(self, module, loader):
        return None if isinstance(module, self.kind) else f"it is not for a {type(module).__name__}"


def test_fitters_are_asked_in_their_order():
    first, second, last = Picky("first", NormNet), Picky("second", Toy), LightningFitter()
    choice = FitterChoice("auto", [first, second, last])
    assert choice.choose(NormNet(), None) is first and choice.used == "first"
    assert choice.choose(Toy(), None) is second and choice.used == "first"
    assert choice.choose(BoringModel(), None) is last and choice.used == "trainer (it is not for a BoringModel)"
    choice.give_up("it met a thing")
    assert choice.choose(NormNet(), None) is last
    demanding = FitterChoice("second", [first, second, last])
    assert demanding.choose(Toy(), None) is second and demanding.used == "second"
    with pytest.raises(ValueError, match=r"local_loop='second' cannot be used: it met.*Use local_loop='auto' or 'tr"):
        demanding.give_up("it met")
