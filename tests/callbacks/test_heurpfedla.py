"""HeurpFedLA: sheet entry 27, second part."""

from __future__ import annotations

import pytest

from fedlightning.callbacks import HeurpFedLA, pFedLA
from fedlightning.tensors import module_state, select
from tests.callbacks.common import SIZES
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Toy, differs, federate, same, spied, toy_data

CASES = {"HeurpFedLA": Case(HeurpFedLA())}
KEPT = {"HeurpFedLA": Kept("HeurpFedLA", server=("models", "psi"), client=("theta",))}

LAYERS = (("net.0.weight", "net.0.bias"), ("net.3.weight", "net.3.bias"))


@pytest.mark.parametrize("make", [lambda: Toy("sgd"), lambda: NormNet("sgd")])
def test_kept_layers_are_not_sent_and_stay_as_trained(make):
    callback = HeurpFedLA(keep_layers=1, keep_by="weight")
    trainer, spy = spied(make(), toy_data(), [callback], max_rounds=3)
    whole = set(trainer.server.kinds)
    for message in spy.messages:
        left_out = whole - set(message.state)
        assert len({name.split(".")[1] == "3" for name in left_out}) == (message.round > 0)
    for client in SIZES:
        kept = callback.choose_layers(trainer.server, client)
        itself = callback.weights(trainer.server, client)[:, int(client)]
        assert kept == [int(itself.argmax())]
        deployed, own = module_state(trainer.module(client)), spy.of_round(2)[client].state
        stays = {name for name in whole if (name.split(".")[1] == "3") == (kept == [1])}
        same(select(deployed, stays), select(own, stays))
        assert differs(select(deployed, whole - stays), select(own, whole - stays))
        assert set(own) == whole  # all of it goes up: others mix it
        mixture = callback.personalised(trainer.server, client, callback.models(trainer.server))
        same(select(mixture, whole), select(deployed, whole))  # what the server learns from is what the client holds


def test_keeping_no_layer_is_pfedla():
    module, data = Toy("sgd"), toy_data()
    runs = [federate(module, data, [callback], max_rounds=1) for callback in (pFedLA(), HeurpFedLA(keep_layers=0))]
    for run, key in zip(runs, ("PFedLA", "HeurpFedLA"), strict=True):
        same(run.server.state[key]["models"]["1"], runs[0].server.state["PFedLA"]["models"]["1"])
    thbar = module_state(runs[1].module("0"))
    assert differs(thbar, runs[1].server.state["HeurpFedLA"]["models"]["0"])


def test_no_gradient_flows_through_kept_layers():
    callback = HeurpFedLA(keep_layers=1, keep_by="weight")
    trainer = federate(Toy("sgd"), toy_data(), [callback], max_rounds=2)
    server = trainer.server
    models = callback.models(server)
    kept = callback.choose_layers(server, "0")[0]
    thbar = callback.personalised(server, "0", models)
    for layer, names in enumerate(LAYERS):
        trained = {name: value + (name in names) for name, value in thbar.items()}
        slope = callback.gradient(server, "0", models, trained)
        assert any(bool(value.any()) for value in slope.values()) == (layer != kept)


def test_layers_stay_by_what_was_learned_not_by_the_initial_noise():
    callback = HeurpFedLA(keep_layers=1, hn_lr=0.0)
    trainer, spy = spied(Toy("sgd"), toy_data(), [callback], max_rounds=3)
    whole = set(trainer.server.kinds)
    assert all(set(message.state) == whole for message in spy.messages)  # nothing learned: nothing stays
    server, first = trainer.server, callback.network(trainer.server, "0")()[:, 0]
    for layer in (0, 1):  # the bias of the weight on itself in one layer: it grows there and only there
        psi = dict(callback.psi(server, "0"))
        bias = psi["heads.bias"].clone()
        bias[layer * len(SIZES)] += 0.5
        server.state["HeurpFedLA"]["psi"] = {"0": {**psi, "heads.bias": bias}}
        assert callback.weights(server, "0")[layer, 0] > first[layer]
        assert callback.choose_layers(server, "0") == [layer]
        bias[layer * len(SIZES)] -= 1.0
        assert callback.choose_layers(server, "0") == []


@pytest.mark.parametrize("count", [2, -1])
def test_keeping_everything_is_refused(count):
    with pytest.raises(ValueError, match=f"HeurpFedLA got keep_layers={count}; Toy has 2 layers"):
        federate(Toy(), toy_data(), [HeurpFedLA(keep_layers=count)])
