"""Ditto: sheet entry 13."""

from __future__ import annotations

import copy

import pytest
import torch

from fedlightning.callbacks import Ditto, FedBN, FedPer, FedProx, Local
from fedlightning.tensors import distance, module_state
from tests.callbacks.common import MAKES, SIZES, A, B, absent_clients_rest, batches, cut_and_resumed, deployed, descend
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    differs,
    federate,
    global_state,
    mean_of,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {"Ditto": Case(Ditto(), neutral=Ditto(lam=0.0))}
KEPT = {"Ditto": Kept("Ditto", client=("model",), phases=("fit", "personal"))}

# -- (a) the server's trajectory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("options", [{"local_epochs": 2}, {"local_steps": 3, "optimizer_state": "keep"}])
def test_the_global_model_is_fedavgs_for_any_strength(make, options):
    module, data = make(), toy_data(SIZES)
    _, plain = spied(module, data, max_rounds=3, participation=2, **options)
    for lam in (0.0, 1.0, 30.0):
        _, spy = spied(module, data, [Ditto(lam=lam)], max_rounds=3, participation=2, **options)
        for theirs, ours in zip(plain.rounds, spy.rounds, strict=True):
            same(ours, theirs)
        assert [update.steps for update in spy.updates] == [update.steps for update in plain.updates]


def test_the_global_model_is_that_of_the_method_beside_it():
    """FedProx acts on w only: v has one pull, its own."""
    module, data = Toy("sgd"), toy_data(SIZES)
    options = {"max_rounds": 2, "local_epochs": 2}
    both = federate(module, data, [FedProx(mu=2.0), Ditto(lam=0.5)], **options)
    same(global_state(both), global_state(federate(module, data, [FedProx(mu=2.0)], **options)))
    with_prox, without = (
        federate(module, data, [*cb, Ditto(lam=0.5)], max_rounds=1, local_epochs=2) for cb in ([FedProx(2.0)], [])
    )
    same(deployed(with_prox, "1"), deployed(without, "1"))


def test_the_server_averages_global_models_never_personal_ones():
    """The defect of public code: a server that averages v."""
    module, data = Toy("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [Ditto(lam=0.1)], max_rounds=2, local_epochs=2)
    same(global_state(trainer), mean_of(spy.of_round(1), SIZES))
    for client, update in spy.of_round(1).items():
        assert differs(update.state, deployed(trainer, client))


# -- (b) lam = 0 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("how", ["keep", "reset"])
def test_without_strength_it_is_training_alone(make, how):
    module, data = make(), toy_data(SIZES)
    options = {"max_rounds": 3, "local_epochs": 2, "optimizer_state": how}
    ours, local = (federate(module, data, [cb], **options) for cb in (Ditto(lam=0.0), Local()))
    for client in SIZES:
        same(deployed(ours, client), deployed(local, client))


# -- (c) the personal objective --------------------------------------------------------------------------------------


def test_quadratics_reach_the_proximal_point():
    """``v = (A + lam I)^-1 (A b + lam w^t)``: the anchor is the model received, not the one aggregated afterwards."""
    data = quadratic_data(A, B)
    for lam in (0.8, 1.5):
        module = Quadratic(lr=0.33)
        with torch.no_grad():
            module.w.fill_(0.5)
        trainer, spy = spied(module, data, [Ditto(lam=lam)], max_rounds=2, local_epochs=40)
        for client, a, b in zip("01", torch.tensor(A).double(), torch.tensor(B).double(), strict=True):
            first, second = (spy.records[number][client].state["Ditto"]["model"]["w"] for number in (0, 1))
            torch.testing.assert_close(first, (a * b + lam * 0.5) / (a + lam), atol=1e-6, rtol=0)
            torch.testing.assert_close(second, (a * b + lam * spy.rounds[0]["w"]) / (a + lam), atol=1e-6, rtol=0)
            same(deployed(trainer, client), {"w": second})


def test_the_stronger_the_nearer():
    module, data = Toy("sgd"), toy_data(SIZES)
    away = []
    for lam in (0.0, 0.5, 4.0):
        trainer, _ = spied(module, data, [Ditto(lam=lam)], max_rounds=1, local_epochs=4)
        away.append(sum(distance(deployed(trainer, client), module_state(module)) for client in SIZES))
    assert away == sorted(away, reverse=True) and away[0] > 1.2 * away[-1]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_loss_form_by_hand(optimizer):
    """Two rounds of one client's v in plain torch, on the federation's batches."""
    module, data, lam = Toy(optimizer, lr=0.05), toy_data(SIZES), 0.7
    trainer, spy = spied(module, data, [Ditto(lam=lam)], max_rounds=2, local_epochs=2)
    v = copy.deepcopy(module)
    for number, received in enumerate([module_state(module), spy.rounds[0]]):

        def pull(received=received):
            return 0.5 * lam * sum((p - received[name]).square().sum() for name, p in v.named_parameters())

        descend(v, v.configure_optimizers(), batches(data, "1", round=number, epochs=2), pull)
    close(deployed(trainer, "1"), module_state(v), atol=3e-6)


# -- (d), (e), state ---------------------------------------------------------------------------------------------------


def test_nothing_of_v_travels():
    module, data = NormNet("adam"), toy_data(SIZES)
    ours, spy = spied(module, data, [Ditto()], max_rounds=2)
    plain, theirs = spied(module, data, max_rounds=2)
    for a, b in zip((*spy.messages, *spy.updates), (*theirs.messages, *theirs.updates), strict=True):
        same(a.state, b.state)
        assert a.extras == b.extras == {}
    assert (ours.server.costs.bytes_up, ours.server.costs.bytes_down) == (
        plain.server.costs.bytes_up,
        plain.server.costs.bytes_down,
    )


def test_no_personal_work_leaves_v_at_the_start():
    module, data = Toy("adam"), toy_data(SIZES)
    trainer = federate(module, data, [Ditto(work=0)], max_rounds=2)
    for client in SIZES:
        same(deployed(trainer, client), module_state(module))
    assert differs(global_state(trainer), module_state(module))


def test_personal_work_is_its_own():
    """``work`` epochs of v beside one of w."""
    module, data = Toy("sgd"), toy_data(SIZES)
    ours = federate(module, data, [Ditto(lam=0.0, work=3)], max_rounds=1)
    local = federate(module, data, [Local()], max_rounds=1, local_epochs=3)
    same(deployed(ours, "1"), deployed(local, "1"))
    same(global_state(ours), global_state(federate(module, data, max_rounds=1)))


def test_absent_clients_rest_and_newcomers_deploy_the_global_model():
    trainer, spy = spied(Toy("adam"), toy_data(SIZES), [Ditto()], max_rounds=4, participation=1)
    absent_clients_rest(spy)
    for client in SIZES:
        if not trainer.store.get(client).visits:
            same(deployed(trainer, client), global_state(trainer))


def test_v_has_running_statistics_of_its_own():
    module, data = NormNet("sgd"), toy_data(SIZES)
    trainer, spy = spied(module, data, [Ditto(lam=0.0)], max_rounds=1, local_epochs=2)
    other, other_spy = spied(module, data, [Ditto(lam=5.0)], max_rounds=1, local_epochs=2)
    for client in SIZES:
        own, pulled = deployed(trainer, client), deployed(other, client)
        assert int(own["net.1.num_batches_tracked"]) > 0
        assert differs({"m": own["net.1.running_mean"]}, {"m": pulled["net.1.running_mean"]})
        same(spy.of_round(0)[client].state, other_spy.of_round(0)[client].state)


def test_what_is_deployed_is_scored(tmp_path):
    trainer = federate(Toy("adam"), toy_data(SIZES), [Ditto()], root=tmp_path, max_rounds=2)
    stages = {row.stage for row in trainer.rows}
    assert stages == {"G", "L1", "L2"}
    last = {
        (r.stage, r.client): r.value for r in trainer.rows if (r.split, r.metric, r.round) == ("val", "val_loss", 2)
    }
    for client in SIZES:
        assert last["L1", client] == pytest.approx(last["L2", client], abs=1e-6)  # v does not change by receiving
        assert last["L1", client] != pytest.approx(last["G", client], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"optimizer_state": "keep"}, pytest.param({"optimizer_state": "reset"}, marks=pytest.mark.slow)]
)
def test_resumed_is_uninterrupted(tmp_path, options):
    module, data = NormNet("adam"), toy_data(SIZES)
    whole, _, again = cut_and_resumed(tmp_path, module, data, lambda: [Ditto()], max_rounds=3, **options)
    same(global_state(again), global_state(whole))
    for client in SIZES:
        same(deployed(again, client), deployed(whole, client))


def test_a_personal_model_that_diverges_does_not_disturb_the_global_one():
    module, data = Toy("sgd", lr=0.1), toy_data(SIZES)
    with pytest.warns(UserWarning, match=r"own model of client '0' holds NaN.*Lower the learning rate or Ditto's"):
        trainer = federate(module, data, [Ditto(lam=1e12)], max_rounds=2, local_epochs=3)
    same(global_state(trainer), global_state(federate(module, data, max_rounds=2, local_epochs=3)))
    for client in SIZES:
        assert all(value.isfinite().all() for value in deployed(trainer, client).values())


@pytest.mark.parametrize("other", [FedPer(personal=["net.3"]), FedBN()])
def test_beside_partial_sharing_only_what_travels_pulls(other):
    module, data = NormNet("sgd"), toy_data(SIZES)
    with_ditto = federate(module, data, [other, Ditto(lam=1.0)], max_rounds=2)
    same(global_state(with_ditto), global_state(federate(module, data, [other], max_rounds=2)))


def test_other_precision():
    trainer = federate(NormNet("adam"), toy_data(SIZES), [Ditto()], max_rounds=2, precision="bf16-mixed")
    assert all(value.dtype != torch.bfloat16 for value in deployed(trainer, "0").values())


def test_wrong_use():
    with pytest.raises(ValueError, match=r"Ditto got lam=-1\. Use a number in \[0, inf\)\. 0 is training alone"):
        Ditto(lam=-1)
    with pytest.raises(ValueError, match=r"Ditto got work=-2"):
        Ditto(work=-2)
    with pytest.warns(UserWarning, match=r"Ditto pulls by lr \* lam = 3 of its way .*below 0\.0667, or a smaller lam"):
        federate(Toy(lr=0.1), toy_data(SIZES), [Ditto(lam=30.0)], max_rounds=1)
