"""FedAvg, the core's default rule, and FedSGD: sheet entries 1 and 2."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import FedAvg, FedProx, FedRep, FedSGD
from fedlightning.tensors import module_state, select
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    PiecesStyle,
    Toy,
    close,
    differs,
    federate,
    global_state,
    mean_of,
    plain_fit,
    same,
    spied,
    toy_data,
)

CASES = {
    "FedAvg": Case(FedAvg()),
    "FedAvg uniform": Case(FedAvg(weighting="uniform")),
    "FedSGD": Case(
        FedSGD(),
        arguments={"local_steps": 1, "batch_size": 64},
        skip={"mixed_precision": "it accumulates batches, and FedSGD takes one step on one batch"},
    ),
}
KEPT = {"FedAvg": Kept("FedAvg"), "FedSGD": Kept("FedSGD")}

SIZES = (24, 40, 16)


def test_a_round_is_plain_fits_and_their_weighted_mean():
    module, data = Toy("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, max_rounds=1, local_epochs=2)
    for client, update in spy.of_round(0).items():
        same(update.state, plain_fit(module, data, client, epochs_per_round=2, max_epochs=2))
    same(global_state(trainer), mean_of(spy.of_round(0), dict(zip("012", SIZES, strict=True))))


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [("samples", SIZES), ("uniform", (1, 1, 1)), ("log", [math.log1p(size) for size in SIZES])],
)
def test_weightings(weighting, weights):
    trainer, spy = spied(Toy(), toy_data(SIZES), [FedAvg(weighting=weighting)], max_rounds=1)
    same(global_state(trainer), mean_of(spy.of_round(0), dict(zip("012", weights, strict=True))))


def test_weights_are_renormalised_over_the_participants():
    _trainer, spy = spied(Toy(), toy_data(SIZES), participation=2, max_rounds=3)
    sizes = dict(zip("012", SIZES, strict=True))
    seen = set()
    for number, model in enumerate(spy.rounds):
        updates = spy.of_round(number)
        assert len(updates) == 2
        seen |= set(updates)
        same(model, mean_of(updates, sizes))
    assert seen == {"0", "1", "2"}


def test_the_mean_lies_in_the_hull_of_the_clients_models():
    trainer, spy = spied(Toy("adam"), toy_data(SIZES), max_rounds=1)
    for name, value in global_state(trainer).items():
        stack = torch.stack([update.state[name] for update in spy.of_round(0).values()])
        assert bool(((stack.min(0).values <= value) & (value <= stack.max(0).values)).all())


def test_buffers_float_averaged_integer_not():
    module, data = NormNet(), toy_data(SIZES)
    trainer, spy = spied(module, data, max_rounds=1)
    updates, model = spy.of_round(0), global_state(trainer)
    counters = [int(update.state["net.1.num_batches_tracked"]) for update in updates.values()]
    assert counters == [3, 5, 2]
    assert int(model["net.1.num_batches_tracked"]) == 3  # the first client's, not the mean
    assert model["net.1.num_batches_tracked"].dtype == torch.int64
    expected = mean_of(updates, dict(zip("012", SIZES, strict=True)))
    assert {"net.1.running_mean", "net.1.running_var"} < set(expected)
    same(select(model, expected), expected)


@pytest.mark.parametrize("rule", ["local", "server"])
def test_other_rules_for_float_buffers(rule):
    module, data = NormNet(), toy_data(SIZES)
    before = module_state(module)["net.1.running_var"].clone()
    trainer, spy = spied(module, data, float_buffers=rule)
    torch.testing.assert_close(global_state(trainer)["net.1.running_var"], before, rtol=0, atol=0)
    for update in spy.updates:
        assert not any("running" in name or "tracked" in name for name in update.state)
    sent_down = {name for message in spy.messages for name in message.state}
    assert ("net.1.running_var" in sent_down) == (rule == "server")
    own = module_state(trainer.module("0"))["net.1.running_var"]
    assert torch.equal(own, before) == (rule == "server")


class Frozen(Toy):
    def __init__(self):
        super().__init__("adamw")
        self.net[0].weight.requires_grad_(False)


def test_frozen_parameters_survive():
    module = Frozen()
    trainer, _ = spied(module, toy_data(SIZES), [FedProx(1.0)], max_rounds=3)
    assert torch.equal(global_state(trainer)["net.0.weight"], module.net[0].weight)
    assert differs(global_state(trainer), module_state(module))
    assert trainer.server.kinds["net.0.weight"] == "frozen"


class Tied(Toy):
    """Two names of one tensor."""

    def make(self, hidden, dropout):
        net = nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 6), "head": nn.Linear(6, 3)})
        net["second"].weight = net["first"].weight
        return net

    def logits(self, x):
        x = torch.relu(self.net["first"](x))
        return self.net["head"](torch.relu(self.net["second"](x)))


def test_tied_weights_survive():
    module, data = Tied("momentum"), toy_data([22])
    ours = global_state(federate(module, data, max_rounds=3, optimizer_state="keep"))
    same(ours, plain_fit(module, data, "0", max_epochs=3))
    trainer = federate(Tied("momentum"), toy_data(SIZES), [FedProx(0.1)], max_rounds=3)
    copy = trainer.module()
    assert copy.net["first"].weight is copy.net["second"].weight
    state = global_state(trainer)
    assert torch.equal(state["net.first.weight"], state["net.second.weight"])


def test_a_learning_rate_of_zero_leaves_the_model():
    module = Toy("sgd", lr=0.0)
    same(global_state(federate(module, toy_data(SIZES))), module_state(module))


def test_identical_clients_hold_the_global_model():
    """Sheet 0.2 (3): same data, and no randomness in the batches."""
    data = toy_data({"0": 16, "1": 16}, shuffle=False)
    data.tensors["1"] = data.tensors["0"]
    trainer, spy = spied(Toy("adam"), data, max_rounds=1)
    for update in spy.updates:
        same(update.state, global_state(trainer))


# -- FedSGD ----------------------------------------------------------------------------------------------------------


def centralised_step(module, data, clients, lr=0.1):
    x, y = (torch.cat([data.tensors[client]["train"][i] for client in clients]) for i in (0, 1))
    loss = F.cross_entropy(module.logits(x), y)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return {
        name: (parameter - lr * gradient).detach()
        for (name, parameter), gradient in zip(module.named_parameters(), gradients, strict=True)
    }


@pytest.mark.parametrize("style", [Toy, PiecesStyle])
def test_one_round_is_one_centralised_step(style):
    module, data = style("sgd", lr=0.1), toy_data(SIZES, batch_size=64)
    trainer = federate(module, data, [FedSGD()], max_rounds=1, local_steps=1)
    close(global_state(trainer), centralised_step(module, data, "012"), atol=1e-7)


def test_with_partial_participation_it_is_the_participants_step():
    module, data = Toy("sgd", lr=0.1), toy_data(SIZES, batch_size=64)
    trainer, spy = spied(module, data, [FedSGD()], max_rounds=1, local_steps=1, participation=2)
    close(global_state(trainer), centralised_step(module, data, spy.of_round(0)), atol=1e-7)


def test_fedsgd_is_fedavg_of_one_full_batch_epoch():
    module, data = Toy("sgd"), toy_data(SIZES, batch_size=64)
    same(
        global_state(federate(module, data, [FedSGD()], local_steps=1)),
        global_state(federate(module, data, [FedAvg()], local_epochs=1)),
    )


def test_splitting_a_client_changes_nothing():
    module, whole = Toy("sgd"), toy_data({"a": 24, "b": 40}, batch_size=64)
    halves = toy_data({"a": 24, "b1": 20, "b2": 20}, batch_size=64)
    for half, part in (("b1", slice(0, 20)), ("b2", slice(20, 40))):
        halves.tensors[half]["train"] = tuple(tensor[part] for tensor in whole.tensors["b"]["train"])
    runs = [federate(module, data, [FedSGD()], max_rounds=3, local_steps=1) for data in (whole, halves)]
    close(*map(global_state, runs), atol=1e-6)


def test_a_step_that_does_not_see_all_samples_is_refused():
    with pytest.raises(ValueError, match=r"client '1' comes in 5 batches.*batch size of at least 40.*FedAvg"):
        federate(Toy(), toy_data({"0": 8, "1": 40}), [FedSGD()], local_steps=1)
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=2 would divide its gradient by 2"):
        federate(Toy(), toy_data(SIZES, batch_size=64), [FedSGD()], local_steps=1, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="one step per round, and FedRep fits several times"):
        federate(Toy(), toy_data(SIZES, batch_size=64), [FedSGD(), FedRep(weighting=None)], local_steps=1)


def test_what_is_not_one_step_is_refused():
    with pytest.raises(ValueError, match=r"FedSGD takes one step per round.*local_steps=1.*whole training set"):
        federate(Toy(), toy_data(SIZES), [FedSGD()])
    with pytest.warns(UserWarning, match="and the module.s optimizer is Adam"):
        federate(Toy("adam"), toy_data(SIZES, batch_size=64), [FedSGD()], local_steps=1, max_rounds=1)
