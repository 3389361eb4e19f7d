"""The central baseline: sheet entry 3. Its equality with a plain fit is in tests/test_equivalence.py."""

from __future__ import annotations

import pytest

from fedlightning.callbacks import (
    FLIU,
    MOON,
    SCAFFOLD,
    Central,
    FedAdam,
    FedLP,
    FedPer,
    FedProx,
    PoissonSampling,
    pFedLA,
)
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import Toy, federate, global_state, same, spied, toy_data

CASES = {
    "Central": Case(
        Central(),
        skip={
            "one_client": "its batches are addressed as the pooled client's",
            "nan_client": "it trains on everybody's samples, so nobody can be left out",
        },
    )
}
KEPT = {"Central": Kept("Central", phases=())}


def test_every_client_is_scored_with_the_one_model(tmp_path):
    trainer = federate(Toy("adam"), toy_data(), [Central()], root=tmp_path, max_rounds=2)
    stage_g = {(r.client, r.metric): r.value for r in trainer.rows if r.stage == "G" and r.round == 2}
    assert {client for client, _ in stage_g} == {"0", "1", "2"}
    personal = {(r.client, r.metric): r.value for r in trainer.rows if r.stage == "L1" and r.round == 2}
    assert stage_g == personal
    for client in "012":
        same(module_state(trainer.module(client)), global_state(trainer))


def test_one_visit_a_round_on_all_samples():
    trainer, spy = spied(Toy(), toy_data(), [Central()], max_rounds=2, participation=1)
    assert [(update.client, update.num_samples) for update in spy.updates] == [("pooled", 80)] * 2
    assert not trainer.store.get("0").visits


@pytest.mark.parametrize(
    "other", [FedPer(), FLIU(), SCAFFOLD(), FedAdam(), pFedLA(), FedLP(), MOON()], ids=lambda c: c.key
)
def test_company_that_needs_clients_is_refused(other):
    with pytest.raises(ValueError, match=rf"Central trains one model on pooled data.*, and {other.key} "):
        federate(Toy(), toy_data(), [Central(), other])


def test_sampling_of_participants_is_refused_before_a_round_that_has_some():
    with pytest.raises(ValueError, match=r"Central trains one model on pooled data.*, and PoissonSampling says who"):
        federate(Toy(), toy_data(), [Central(), PoissonSampling(1e-9)], max_rounds=1)


def test_a_proximal_term_acts_on_the_pooled_fit():
    module, data = Toy(), toy_data()
    free, held = (global_state(federate(module, data, [Central(), *cb], max_rounds=1)) for cb in ([], [FedProx(5.0)]))
    start = module_state(module)
    assert (held["net.0.weight"] - start["net.0.weight"]).norm() < (free["net.0.weight"] - start["net.0.weight"]).norm()


def test_what_is_frozen_does_not_travel_unless_training_writes_into_it():
    class Follows(Toy):
        """The first layer is frozen, and in the first step of a visit somebody writes into it, as into a target network."""

        moves = False

        def configure_optimizers(self):
            self.net[0].weight.requires_grad_(False)
            return super().configure_optimizers()

        def on_train_start(self):
            if self.moves:
                self.net[0].weight.data.add_(1.0)

    module = Follows()
    module.net[0].weight.requires_grad_(False)
    began = {name: value.clone() for name, value in module_state(module).items()}
    size = sum(value.nbytes for name, value in began.items() if name != "net.0.weight")
    still = federate(module, toy_data(), [Central()], max_rounds=3)
    assert (still.server.costs.bytes_up, still.server.costs.bytes_down) == (3 * size, 3 * size)
    same({"w": global_state(still)["net.0.weight"]}, {"w": began["net.0.weight"]})
    module.moves = True
    moved = federate(module, toy_data(), [Central()], max_rounds=3)
    same({"w": global_state(moved)["net.0.weight"]}, {"w": began["net.0.weight"] + 1.0 + 1.0 + 1.0})
