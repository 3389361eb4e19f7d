"""LG-FedAvg: sheet entry 18."""

from __future__ import annotations

import pytest

from fedlightning.callbacks import FedAvg, FedPer, FedProx, LGFedAvg, Local
from fedlightning.tensors import module_state, select
from tests.callbacks.common import SIZES, absent_clients_rest, cut_and_resumed
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Toy,
    differs,
    federate,
    global_state,
    mean_of,
    same,
    spied,
    toy_data,
)

CASES = {"LGFedAvg": Case(LGFedAvg(shared=["head"]))}
KEPT = {"LGFedAvg": Kept("LGFedAvg", options={"num_layers": 1})}

HEAD = {"net.3.weight", "net.3.bias"}
NORM = {f"net.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
ENCODER = {"net.0.weight", "net.0.bias"} | NORM


@pytest.mark.parametrize("callback", [LGFedAvg(num_layers=1), LGFedAvg(shared=["net.3"]), LGFedAvg(sorted(HEAD))])
def test_only_the_top_travels(callback):
    module, data = NormNet("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [callback], max_rounds=2)
    for item in (*spy.messages, *spy.updates):
        assert set(item.state) == HEAD
    assert trainer.server.global_module() is None
    same(select(global_state(trainer), HEAD), mean_of(spy.of_round(1), SIZES))
    same(select(global_state(trainer), ENCODER), select(module_state(module), ENCODER))
    clients = {client: module_state(trainer.module(client)) for client in SIZES}
    for client, state in clients.items():
        same(select(state, HEAD), select(global_state(trainer), HEAD))
        assert set(spy.records[-1][client].personal) == ENCODER
    assert differs(select(clients["0"], ENCODER), select(clients["1"], ENCODER))


@pytest.mark.parametrize("names", [["net.0", "net.1"], ["net.3"]])
def test_the_complement_of_fedper(names):
    """What one shares the other keeps: swapping the two sets of names turns one into the other."""
    module, data = NormNet("momentum"), toy_data(SIZES)
    others = [name for name in ("net.0", "net.1", "net.3") if name not in names]
    lg, per = (federate(module, data, [cb], max_rounds=2) for cb in (LGFedAvg(shared=names), FedPer(personal=others)))
    same(global_state(lg), global_state(per))
    for client in SIZES:
        same(module_state(lg.module(client)), module_state(per.module(client)))


def test_nothing_shared_is_training_alone_and_nothing_local_is_fedavg():
    module, data = NormNet("adam"), toy_data(SIZES)
    with pytest.warns(UserWarning, match=r"LGFedAvg\(shared=\[\].*shares nothing of NormNet.*which is Local\(\)"):
        alone = federate(module, data, [LGFedAvg(shared=[])], max_rounds=2, optimizer_state="keep")
    local = federate(module, data, [Local()], max_rounds=2)
    for client in SIZES:
        same(module_state(alone.module(client)), module_state(local.module(client)))
    with pytest.warns(UserWarning, match=r"num_layers=2\) shares everything of NormNet \(net.0, net.3\).*FedAvg\(\)"):
        everything = federate(module, data, [LGFedAvg()], max_rounds=2)
    same(global_state(everything), global_state(federate(module, data, [FedAvg()], max_rounds=2)))


def test_absent_clients_keep_their_encoders():
    _, spy = spied(Toy("adam"), toy_data(SIZES), [LGFedAvg(num_layers=1)], max_rounds=3, participation=1)
    absent_clients_rest(spy)


@pytest.mark.slow
def test_resumed_is_uninterrupted(tmp_path):
    module, data = NormNet("adam"), toy_data(SIZES)
    whole, _, again = cut_and_resumed(tmp_path, module, data, lambda: [LGFedAvg(num_layers=1)], max_rounds=3)
    for client in SIZES:
        same(module_state(again.module(client)), module_state(whole.module(client)))


def test_a_pull_acts_on_the_top_only():
    module, data = NormNet("sgd", lr=0.01), toy_data(SIZES)
    free, held = (
        spied(module, data, [LGFedAvg(num_layers=1), *cb], max_rounds=1, local_epochs=3) for cb in ([], [FedProx(99.0)])
    )
    start = module_state(module)["net.3.weight"]
    moved = [(spy.of_round(0)["1"].state["net.3.weight"] - start).norm() for _, spy in (free, held)]
    assert moved[1] < 0.7 * moved[0]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"'head' is neither a name"):
        federate(Toy(), toy_data(SIZES), [LGFedAvg(shared=["head"])])
