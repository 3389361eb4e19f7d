"""The base of methods in which a client deploys a model of its own: Ditto, MAPPER, LocalAdaptation."""

from __future__ import annotations

import pytest

from fedlightning.callbacks.own_models import KeepsModel
from tests.callbacks.common import SIZES, deployed
from tests.helpers import NormNet, federate, global_state, same, spied, toy_data


class Keeps(KeepsModel):
    """Keeps what a client has trained, after ``spoil`` has had its way with it."""

    def __init__(self, spoil=lambda client: None):
        self.spoil = spoil

    def on_send(self, client, update):
        self.spoil(client)
        self.keep(client, visit=client.round)


def test_what_was_kept_is_deployed_and_nothing_of_it_travels():
    module, data = NormNet("momentum"), toy_data(SIZES)
    trainer, spy = spied(module, data, [Keeps()], max_rounds=2)
    for client, update in spy.of_round(1).items():
        same(deployed(trainer, client), update.state)
        kept = trainer.store.get(client).state["Keeps"]
        assert kept["visit"] == 1
        same(kept["model"], update.state)
        assert update.extras == {}
    same(global_state(trainer), global_state(federate(module, data, max_rounds=2)))


def test_a_client_that_has_kept_nothing_deploys_what_it_receives():
    trainer, spy = spied(NormNet("momentum"), toy_data(SIZES), [Keeps()], max_rounds=1, participation=1)
    (visited,) = spy.of_round(0)
    for client in set(SIZES) - {visited}:
        same(deployed(trainer, client), global_state(trainer))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_model_is_not_kept_and_the_one_before_stays(value):
    first = {}

    def spoil(client):
        if client.round == 0:
            first[client.id] = client.model_state()
        elif client.id == "1":
            client.module.net[0].weight.data.fill_(value)

    with pytest.warns(UserWarning, match=r"Round 2: 'net.0.weight' of the own model of client '1' holds NaN.*Keeps's"):
        trainer, spy = spied(NormNet("sgd"), toy_data(SIZES), [Keeps(spoil)], max_rounds=2)
    same(deployed(trainer, "1"), first["1"])
    assert trainer.store.get("1").state["Keeps"]["visit"] == 0
    same(deployed(trainer, "0"), spy.of_round(1)["0"].state)
