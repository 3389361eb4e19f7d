"""FedProx: sheet entry 4."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import DSGD, FLIU, L2GD, FedPer, FedProx
from fedlightning.tensors import distance, module_state
from tests.callbacks.common import MAKES, batches, descend
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    differs,
    federate,
    global_state,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {"FedProx": Case(FedProx(mu=0.1), neutral=FedProx(mu=0.0))}
KEPT = {"FedProx": Kept("FedProx")}

A = [[1.0, 2.0, 0.8], [1.5, 0.8, 1.0]]
B = [[1.0, -1.0, 2.0], [-2.0, 3.0, 0.5]]


@pytest.mark.parametrize("make", MAKES)
def test_without_strength_it_is_fedavg(make):
    module, data = make(), toy_data()
    same(*(global_state(federate(module, data, cb, max_rounds=2, local_epochs=2)) for cb in ([], [FedProx(mu=0.0)])))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_one_local_step_is_fedavg_at_any_strength(optimizer):
    module, data = Toy(optimizer), toy_data()
    plain = global_state(federate(module, data, local_steps=1, max_rounds=3))
    same(plain, global_state(federate(module, data, [FedProx(mu=10.0)], local_steps=1, max_rounds=3)))


@pytest.mark.parametrize(
    ("others", "options"),
    [
        ([], {"local_steps": 1}),
        ([DSGD()], {"local_steps": 1}),
        ([], {"local_epochs": 1, "accumulate_grad_batches": 5}),
    ],
)
def test_it_says_that_it_does_nothing_in_one_step(others, options):
    with pytest.warns(UserWarning, match=r"FedProx\(mu=0.1\) does nothing here: a visit is one step"):
        federate(Toy(), toy_data(), [FedProx(), *others], max_rounds=1, **options)


@pytest.mark.filterwarnings("error:FedProx")
@pytest.mark.parametrize(
    ("others", "options"),
    [
        ([], {"local_steps": 2}),
        ([], {"local_epochs": 1}),
        ([L2GD(lam=0.1)], {"local_steps": 1}),
        ([FLIU()], {"local_steps": 1}),
        ([FedPer()], {"local_epochs": 2}),
    ],
)
def test_it_says_nothing_where_it_pulls(others, options):
    federate(Toy(), toy_data(), [FedProx(), *others], max_rounds=1, **options)


def test_two_local_steps_are_not():
    module, data = Toy(), toy_data()
    plain = global_state(federate(module, data, local_steps=2, max_rounds=1))
    assert differs(plain, global_state(federate(module, data, [FedProx(mu=1.0)], local_steps=2, max_rounds=1)))


def by_hand(module, data, client, mu, rounds_state, number, epochs=2):
    """Gradient steps on the loss plus the penalty, anchored at the round's start over all its epochs."""
    model = copy.deepcopy(module)
    model.load_state_dict(rounds_state)
    anchor = [parameter.detach().clone() for parameter in model.parameters()]

    def penalty():
        return 0.5 * mu * sum((p - a).square().sum() for p, a in zip(model.parameters(), anchor, strict=True))

    descend(model, model.configure_optimizers(), batches(data, client, round=number, epochs=epochs), penalty)
    return module_state(model)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_loss_form_by_hand(optimizer):
    module, data = Toy(optimizer, lr=0.05), toy_data()
    _trainer, spy = spied(module, data, [FedProx(mu=0.7)], max_rounds=2, local_epochs=2)
    starts = [module.state_dict(), spy.rounds[0]]
    for update in spy.updates:
        expected = by_hand(module, data, update.client, 0.7, starts[update.round], update.round)
        close(update.state, expected, atol=2e-6)


def test_quadratics_reach_the_proximal_point():
    """(c): ``w_i = (A + mu I)^-1 (A b + mu w^t)``; (d): the stronger, the nearer to the server's model."""
    data, distances = quadratic_data(A, B), []
    for mu in (0.0, 0.5, 1.5):
        module = Quadratic(lr=0.4)
        with torch.no_grad():
            module.w.fill_(0.5)
        _, spy = spied(module, data, [FedProx(mu=mu)], max_rounds=1, local_epochs=60)
        for update, a, b in zip(spy.updates, torch.tensor(A).double(), torch.tensor(B).double(), strict=True):
            torch.testing.assert_close(update.state["w"], (a * b + mu * 0.5) / (a + mu), atol=1e-6, rtol=0)
        distances.append(sum(distance(update.state, module_state(module)) for update in spy.updates))
    assert distances == sorted(distances, reverse=True)


def test_the_logged_loss_is_the_tasks():
    """At the first epoch's one step the penalty is zero; at later ones it is not, and must not be logged."""
    data = toy_data([16], batch_size=16)
    module = Toy("sgd", lr=0.5)
    _trainer, spy = spied(module, data, [FedProx(mu=1.0)], max_rounds=1, local_epochs=2)
    model = copy.deepcopy(module)
    x, y = data.tensors["0"]["train"]
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    assert spy.updates[0].metrics["train_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), abs=1e-6)


def test_only_trainable_parameters_that_travel_are_pulled():
    """The private head of FedPer has no anchor: a huge strength holds the body and leaves the head."""
    module, data = NormNet("sgd", lr=0.01), toy_data()
    trainer, spy = spied(module, data, [FedPer(personal=["net.3"]), FedProx(mu=99.0)], max_rounds=1, local_epochs=3)
    start = module_state(module)
    update = spy.updates[0]
    assert not any(name.startswith("net.3") for name in update.state)
    body = (update.state["net.0.weight"] - start["net.0.weight"]).norm()
    own = module_state(trainer.module("0"))
    head = (own["net.3.weight"] - start["net.3.weight"]).norm()
    free, _ = spied(module, data, [FedPer(personal=["net.3"])], max_rounds=1, local_epochs=3)
    free_body = (global_state(free)["net.0.weight"] - start["net.0.weight"]).norm()
    assert body < 0.6 * free_body
    assert head > 0.02
    assert differs({"running_mean": update.state["net.1.running_mean"]}, {"running_mean": start["net.1.running_mean"]})


def test_a_negative_strength_is_refused():
    with pytest.raises(ValueError, match=r"FedProx got mu=-1\. Use a number in \[0, inf\)\. 0 is FedAvg"):
        FedProx(mu=-1)
