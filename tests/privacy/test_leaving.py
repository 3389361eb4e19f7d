"""What can leave a client is its own side's list: no message widens it, and nothing is lost because it was sent."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedlightning.assemble import CLIENT_PARTS
from fedlightning.callbacks import FENDA, SCAFFOLD, FedBN, FedPer, FedRep, LGFedAvg, PLayerFL
from fedlightning.catalogue import ALGORITHMS
from fedlightning.catalogue.catalogue_row import WHOLE
from fedlightning.client.blueprint import Blueprint, ClientParts
from fedlightning.client.requests import Evaluate, LocalSettings
from fedlightning.contract import POOLED, CallbackList, FederatedCallback, ModelSelection, Protection
from fedlightning.contract.messages import Extra, Message, Wire
from fedlightning.errors import ConfigurationError
from fedlightning.privacy.outgoing import make_outgoing_filter
from fedlightning.testing.runs import same_tree, watching
from fedlightning.testing.toys import ToyData, ToyModule, federate
from tests.conformance.case import Case, collect
from tests.helpers import FEATURES, Toy

CASES: dict[str, Case] = collect("CASES")


def run(algorithm, **given):
    return federate(copy.deepcopy(algorithm), ToyData(), None, **{"max_rounds": 2, "local_steps": 2} | given)


def visit(trainer, **fields):
    """Carry out one more visit of the first client, as a server may ask for it; return the update, and both records."""
    engine, client = trainer.federation.engine, trainer.server.clients[0]
    before = engine.store.get(client)
    given = {"round": 2, "client": client, "state": {}, "returns": (), "work": 0} | fields
    (update,) = engine.run([Message(**given)], Evaluate())
    return update, before, engine.store.get(client)


@pytest.mark.parametrize("work", [0, 1])
@pytest.mark.parametrize(
    "algorithm, full, private",
    [
        (FedPer(), False, "head.weight"),
        (FedRep(), False, "head.bias"),
        (LGFedAvg(), False, "body.0.weight"),
        (FENDA(head="head"), False, None),
        (FedBN(), True, None),
    ],
    ids=["FedPer", "FedRep", "LGFedAvg", "FENDA", "FedBN"],
)
def test_a_message_that_asks_for_private_entries_is_a_failed_visit(algorithm, full, private, work):
    trainer = run(algorithm, full=full)
    leaving = make_outgoing_filter(trainer.server.blueprint, "site0")
    assert leaving.private and leaving.entries
    private = private or sorted(leaving.private)[0]
    shared = sorted(leaving.entries)[0]
    state = {name: trainer.server.model[name] for name in leaving.entries}
    update, before, after = visit(trainer, returns=(shared, private), work=work, state=state)
    assert f"'{private}' stays with the client" in update.error and not update.state
    assert after is before and private in after.personal


def test_what_the_client_alone_has_is_not_lost_because_it_was_sent():
    """A method of which everything may leave in some round, and a message that asks for what is personal now."""
    trainer = run(PLayerFL())
    personal = trainer.federation.engine.store.get("site0").personal
    update, before, after = visit(trainer, returns=tuple(personal))
    assert update.error is None and same_tree(dict(update.state), dict(personal))
    assert same_tree(before.personal, after.personal)


def test_extras_that_nobody_declared_and_private_entries_in_them_stay():
    class Leak(FederatedCallback):
        def __init__(self, key: str = "Leak", spec: str | Extra = "state") -> None:
            self.where, self.spec = key, spec

        def wire(self, module):
            return Wire(up={"more": self.spec})

        def on_send(self, client, update):
            state = {"head.weight": client.model_state()["head.weight"]}
            update.extras[self.where] = {"more": {"a": state} if Extra.of(self.spec).form == "states" else state}

    for leak, reason in (
        (Leak(), "Leak puts private entries into its 'more': 'head.weight' stays"),
        (Leak(spec="parameters"), "Leak puts private entries into its 'more': 'head.weight' stays"),
        (Leak(spec="tensors"), "Leak puts private entries into its 'more': 'head.weight' stays"),
        (Leak(spec="states"), "Leak puts private entries into its 'more': 'head.weight' stays"),
        (Leak(spec=Extra("states")), "Leak puts private entries into its 'more': 'head.weight' stays"),
        (Leak("Nobody"), "extras of 'Nobody' are in the update, and no callback has that key"),
    ):
        with pytest.raises(RuntimeError) as failed:
            run(FedPer(), others=[leak])
        assert reason in str(failed.value)


class Late(ModelSelection):
    """Keeps the update that `on_send` shows, and writes into it when the client has been scored."""

    def __init__(self, write) -> None:
        self.write = write

    def on_send(self, client, update):
        client.scratch["update"] = update

    def on_client_evaluated(self, client, stage, split, metrics, module):
        if stage == "L2":
            self.write(client, client.scratch["update"])


def _write_private(client, update):
    update.state["head.weight"] = client.entries["head.weight"]


def _write_extras(client, update):
    update.extras["Late"] = {"more": client.entries["head.weight"]}


def _write_logs(client, update):
    update.metrics = {"head": float(client.entries["head.weight"].sum())}


@pytest.mark.parametrize(
    "write, reason",
    [
        (_write_private, "'head.weight' is in the update, but the server asked only for what is shared"),
        (_write_extras, "Late puts 'more' on the wire but declares only nothing"),
    ],
)
@pytest.mark.parametrize("parts", [CLIENT_PARTS, ClientParts()], ids=["attached", "core alone"])
def test_what_is_written_after_everybody_has_seen_the_update_stays_too(write, reason, parts, monkeypatch):
    monkeypatch.setattr("fedlightning.assemble.CLIENT_PARTS", parts)
    with pytest.raises(RuntimeError) as failed:
        run(FedPer(), others=[Late(write)], evaluation=1)
    assert reason in str(failed.value)


class Withholds(Protection):
    """Lets no logged value leave."""

    def covers(self, outgoing):
        return "withheld" if outgoing.kind == "logged" else "in the clear"


def test_what_is_logged_late_is_withheld_as_the_rest():
    with watching() as visits:
        run(FedPer(), others=[Withholds(), Late(_write_logs)], evaluation=1)
    assert visits.all and not any(update.metrics for _, update, _ in visits.all)


def test_two_methods_leave_what_both_let_leave():
    server = run(FedPer(), others=[FedBN()], full=True).server
    leaving = make_outgoing_filter(server.blueprint, "site0")
    assert leaving.entries == set(server.shared_names())
    one, other = (make_outgoing_filter(_built(method, full=True), "site0").entries for method in (FedPer(), FedBN()))
    assert leaving.entries == one & other not in (one, other)
    assert set(make_outgoing_filter(run(SCAFFOLD()).server.blueprint, "site0").extras) == {"SCAFFOLD"}


def test_an_entry_that_is_tied_to_a_private_one_stays_too():
    class Tied(Toy):
        def make(self, hidden, dropout):
            body, head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
            head.weight = body.weight
            return nn.Sequential(body, nn.ReLU(), head)

    blueprint = Blueprint(Tied(), CallbackList([FedPer(personal=["net.2"])]), _built(FedPer()).settings)
    leaving = make_outgoing_filter(blueprint, "site0")
    assert leaving.entries == {"net.0.bias"}
    assert leaving.private == {"net.0.weight", "net.2.weight", "net.2.bias"}


@pytest.mark.parametrize("buffers", ["local", "server"])
def test_running_statistics_leave_only_where_they_are_averaged(buffers):
    server = run(None, full=True, float_buffers=buffers).server
    leaving = make_outgoing_filter(server.blueprint, "site0")
    assert leaving.entries == set(server.returned_names())
    assert {server.kinds[name] for name in leaving.private} == {"float_buffer", "int_buffer"}
    assert not make_outgoing_filter(server.blueprint, POOLED).private


def test_a_method_that_needs_the_server_for_its_answer_is_refused_before_round_1():
    class Asks(FederatedCallback):
        def shared_names(self, server, module):
            return list(server.kinds) if server.round else []

    with pytest.raises(ConfigurationError, match=r"Asks cannot say without a server.*Wire\(entries="):
        run(Asks())

    class Says(Asks):
        def wire(self, module):
            return Wire(entries=["body"])

    assert make_outgoing_filter(_built(Says()), "site0").private


def _built(algorithm, **arguments):
    torch.manual_seed(0)
    settings = LocalSettings(seed=0, max_rounds=1, trainer_arguments={"accelerator": "cpu"})
    return Blueprint(ToyModule(**arguments), CallbackList([algorithm]), settings)


@pytest.mark.parametrize("row", ALGORITHMS, ids=lambda row: row.name)
def test_the_catalogue_says_what_can_leave(row):
    """That it is the whole model where it is, that it is not where some of it is private, and nothing where nothing is."""
    case = next(case for case in CASES.values() if type(case.algorithm).__name__ == row.name)
    arguments = {name: value for name, value in case.arguments.items() if name == "full"}
    leaving = make_outgoing_filter(_built(copy.deepcopy(case.algorithm), **arguments), "site0")
    assert row.leaves.startswith(WHOLE) == (not leaving.private)
    assert row.leaves.startswith("no entry") == (not leaving.entries)
