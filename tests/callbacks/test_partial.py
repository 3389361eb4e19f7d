"""FedPer, FedBN and Local: sheet entries 3, 15 and 19."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlightning.callbacks import (
    FD,
    FLIU,
    IFCA,
    FedAdam,
    FedAvg,
    FedBABU,
    FedBN,
    FedIT,
    FedLP,
    FedPer,
    FedProto,
    FedProx,
    FedRep,
    LGFedAvg,
    Local,
    LocalAdaptation,
)
from fedlightning.callbacks.partial import batch_norm_names
from fedlightning.tensors import module_state, select
from tests.callbacks.common import SIZES, batches, descend
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    PiecesStyle,
    Toy,
    differs,
    federate,
    global_state,
    make_trainer,
    mean_of,
    mostly_slow,
    plain_fit,
    same,
    spied,
    toy_data,
)

CASES = {
    "FedPer": Case(FedPer(personal=["head"])),
    "FedBN": Case(FedBN(), arguments={"full": True}),
    "Local": Case(Local(), skip={"one_client": "its optimizers go on from round to round"}),
}
KEPT = {"FedBN": Kept("FedBN"), "FedPer": Kept("FedPer"), "Local": Kept("Local")}

HEAD = {"net.3.weight", "net.3.bias"}
BODY = {"net.0.weight", "net.0.bias"}
NORM = {f"net.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


# -- FedPer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [FedPer(), FedPer(personal=["net.3"]), FedPer(personal=sorted(HEAD))])
def test_only_the_body_travels(callback):
    module, data = Toy("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [callback], max_rounds=2)
    for item in (*spy.messages, *spy.updates):
        assert set(item.state) == BODY
    body_bytes = 4 * sum(p.numel() for name, p in module.named_parameters() if name in BODY)
    assert trainer.server.costs.bytes_up == trainer.server.costs.bytes_down == 6 * body_bytes
    assert trainer.server.global_module() is None


def test_bases_are_equal_and_heads_differ():
    module, data = Toy("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [FedPer()], max_rounds=3)
    clients = [module_state(trainer.module(client)) for client in SIZES]
    for client in clients:
        same(select(client, BODY), select(global_state(trainer), BODY))
    assert differs(select(clients[0], HEAD), select(clients[1], HEAD))
    same(select(global_state(trainer), BODY), mean_of(spy.of_round(2), SIZES))
    same(select(global_state(trainer), HEAD), select(module_state(module), HEAD))  # the server never sees a head


def test_a_client_trains_its_own_head_on_the_common_body():
    """Round 2 of a client by hand: its head of round 1 on the mean body."""
    module, data = Toy("adam"), toy_data(SIZES)
    _trainer, spy = spied(module, data, [FedPer()], max_rounds=2)
    start = Toy("adam")
    start.load_state_dict({**spy.rounds[0], **spy.records[0]["1"].personal})
    descend(start, start.configure_optimizers(), batches(data, "1", round=1))
    same(select(module_state(start), BODY), spy.of_round(1)["1"].state)
    same(select(module_state(start), HEAD), spy.records[1]["1"].personal)


def test_nothing_personal_is_fedavg():
    module, data = NormNet("adam"), toy_data(SIZES)
    same(*(global_state(federate(module, data, [cb])) for cb in (FedAvg(), FedPer(personal=[]))))


def test_one_client_is_plain_training():
    module, data = Toy("adam"), toy_data([22])
    trainer = federate(module, data, [FedPer()], max_rounds=3, optimizer_state="keep")
    same(module_state(trainer.module("0")), plain_fit(module, data, "0", max_epochs=3))


def test_absent_clients_keep_their_heads():
    _trainer, spy = spied(Toy("adam"), toy_data(SIZES), [FedPer()], max_rounds=4, participation=1)
    for number in range(1, 4):
        for client in SIZES:
            before, after = spy.records[number - 1][client], spy.records[number][client]
            if client in spy.of_round(number):
                assert differs(before.personal, after.personal) or not before.personal
            else:
                assert after is before or after.visits == before.visits == 0


class Ten(Toy):
    """Names of which one is the beginning of another."""

    def make(self, hidden, dropout):
        return nn.ModuleDict({"layer1": nn.Linear(6, hidden), "layer10": nn.Linear(hidden, 3)})

    def logits(self, x):
        return self.net["layer10"](torch.relu(self.net["layer1"](x)))


def test_prefixes_are_paths_not_parts_of_names():
    _trainer, spy = spied(Ten("sgd"), toy_data(SIZES), [FedPer(personal=["net.layer1"])], max_rounds=1)
    assert set(spy.updates[0].state) == {"net.layer10.weight", "net.layer10.bias"}


@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (FedPer(num_layers=2), "FedPer leaves nothing to share: Toy has 2 layer.*use Local"),
        (FedPer(personal=["net"]), "FedPer leaves nothing to share"),
        (FedPer(personal=["head"]), "head.*net"),
    ],
)
def test_impossible_splits_are_refused(callback, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(Toy(), toy_data(SIZES), [callback])


# -- FedBN -----------------------------------------------------------------------------------------------------------


def test_all_of_batch_norm_stays_and_the_rest_is_averaged():
    module, data = NormNet("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [FedBN()], max_rounds=2)
    for item in (*spy.messages, *spy.updates):
        assert set(item.state) == BODY | HEAD
    same(select(global_state(trainer), BODY | HEAD), mean_of(spy.of_round(1), SIZES))
    clients = {client: module_state(trainer.module(client)) for client in SIZES}
    for client, state in clients.items():
        assert set(spy.records[-1][client].personal) == NORM
        same(select(state, NORM), spy.records[-1][client].personal)
        same(select(state, BODY | HEAD), select(global_state(trainer), BODY | HEAD))
    assert differs(select(clients["0"], NORM), select(clients["1"], NORM))


def test_other_normalisation_is_shared():
    class Mixed(Toy):
        def make(self, hidden, dropout):
            norms = nn.LayerNorm(hidden), nn.BatchNorm1d(hidden), nn.GroupNorm(2, hidden)
            return nn.Sequential(nn.Linear(6, hidden), *norms, nn.ReLU(), nn.Linear(hidden, 3))

    assert batch_norm_names(Mixed()) == {name.replace("net.1.", "net.2.") for name in NORM}


def test_one_client_with_batch_norm_is_plain_training():
    module, data = NormNet("adam"), toy_data([24])
    trainer = federate(module, data, [FedBN()], max_rounds=3, optimizer_state="keep")
    same(module_state(trainer.module("0")), plain_fit(module, data, "0", max_epochs=3))


def test_a_module_without_batch_norm_is_refused():
    with pytest.raises(ValueError, match=r"FedBN.*`?Toy`? has no BatchNorm layer.*Remove FedBN"):
        federate(Toy(), toy_data(SIZES), [FedBN()])


# -- Local -----------------------------------------------------------------------------------------------------------


def adam():
    return NormNet("adam")


@pytest.mark.parametrize("make", mostly_slow([lambda: Toy("onecycle"), adam, lambda: PiecesStyle("steplr")], [adam]))
@pytest.mark.slow
def test_rounds_of_epochs_are_one_ordinary_training_of_each_client(make):
    module, data = make(), toy_data(SIZES)
    trainer, spy = spied(module, data, [Local()], max_rounds=3, local_epochs=2)
    for client in SIZES:
        theirs = plain_fit(module, data, client, epochs_per_round=2, max_epochs=6)
        same(module_state(trainer.module(client)), theirs)
    assert trainer.server.costs.bytes_up == trainer.server.costs.bytes_down == 0
    same(global_state(trainer), module_state(module))
    assert not any(item.state for item in (*spy.messages, *spy.updates))


def test_local_can_be_told_to_start_optimizers_anew():
    module, data = Toy("adam"), toy_data([22])
    kept, anew = (
        module_state(federate(module, data, [Local()], optimizer_state=how).module("0")) for how in (None, "reset")
    )
    assert differs(kept, anew)


def test_local_has_no_global_model(tmp_path):
    trainer = federate(Toy(), toy_data(SIZES), [Local()], root=tmp_path)
    with pytest.raises(ValueError, match=r"no global model.*Name a client"):
        trainer.module()
    assert not {row.stage for row in trainer.rows} & {"G"}
    assert not (trainer.run.path / "checkpoints" / "global.ckpt").exists()


WORKS_ON_IT = [FedProx(1.0), FedAdam(), FLIU(), IFCA(), FedLP(), LocalAdaptation(), FedBABU()]


@pytest.mark.parametrize("alone", [Local(), FD(), FedProto()], ids=lambda c: c.key)
@pytest.mark.parametrize("other", WORKS_ON_IT, ids=lambda c: c.key)
def test_what_works_on_a_travelling_model_is_refused_where_none_travels(alone, other):
    with pytest.raises(ValueError, match=rf"{alone.key}\b.* lets no model travel, and {other.key} "):
        federate(Toy(), toy_data(SIZES), [other, alone])


@pytest.mark.parametrize("other", [FedPer(), LGFedAvg(num_layers=1), FedBN()], ids=lambda c: c.key)
def test_what_chooses_what_travels_is_refused_where_nothing_does(other):
    with pytest.raises(ValueError, match=f"Local lets no model travel, so {other.key} has nothing to choose from"):
        federate(NormNet(), toy_data(), [Local(), other])


@pytest.mark.parametrize(
    ("idle", "other"),
    [(FedBN(), LGFedAvg(num_layers=1)), (FedPer(), FedRep()), (FedBN(), FedIT(r=2, head="net.3"))],
    ids=lambda c: c.key,
)
def test_a_part_that_stays_anyway_is_warned_of(idle, other):
    with pytest.warns(UserWarning, match=f"{idle.key} changes nothing beside {other.key}: what it keeps"):
        federate(NormNet(), toy_data(), [idle, other], max_rounds=1)


def test_default_of_local_is_named_in_the_trainer():
    assert make_trainer(None, [Local()]).arguments["optimizer_state"] is None
