"""FedNova: sheet entry 8."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlightning import FederatedCallback
from fedlightning.algorithm import Change, Facts
from fedlightning.callbacks import FLIU, FedAvg, FedAvgM, FedNova, FedPer, FedProx
from fedlightning.callbacks.fednova import count_step
from fedlightning.contract import Phase
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    ToyData,
    close,
    differs,
    federate,
    global_state,
    mean_of,
    same,
    spied,
    toy_data,
)

CASES = {"FedNova": Case(FedNova())}
KEPT = {"FedNova": Kept("FedNova", client=("a",))}

SIZES = {"0": 24, "1": 40, "2": 16}


# -- A_i -----------------------------------------------------------------------------------------------------------


def counted(steps, lr=0.1, mu=0.0, **group):
    a, c = 0.0, None
    for _ in range(steps):
        a, c = count_step(a, c, {"lr": lr, **group}, mu)
    return a


def brute_force(steps, mu=0.0, rates=None, lr=0.1, **options):
    """One-hot gradients through torch's own SGD, with FedProx's pull in the gradient: each step's coefficient."""
    w = nn.Parameter(torch.zeros(steps, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=lr, **options)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr if rates is None else rates[step]
        w.grad = nn.functional.one_hot(torch.tensor(step), steps).double() + mu * w.detach()
        optimizer.step()
    return -w.detach()


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_closed_forms(steps):
    """(b): tau for plain SGD, and the sheet's sums for momentum and for the proximal term, all times eta."""
    rho, eta, mu = 0.9, 0.1, 2.0
    assert counted(steps) == pytest.approx(eta * steps)
    assert counted(steps, momentum=rho) == pytest.approx(eta * (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho))
    assert counted(steps, mu=mu) == pytest.approx(eta * (1 - (1 - eta * mu) ** steps) / (eta * mu))


@pytest.mark.parametrize("mu", [0.0, 2.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.8, "nesterov": True}],
    ids=lambda o: "+".join(o) or "plain",
)
def test_the_recursion_is_the_sum_of_the_coefficients(options, mu):
    """(b), (d): momentum, proximal term and both, against what torch's SGD really does."""
    for steps in (1, 2, 4, 9):
        coefficients = brute_force(steps, mu, **options)
        assert counted(steps, mu=mu, **options) == pytest.approx(float(coefficients.sum()), rel=1e-12)


def test_coefficients_are_positive_where_the_sum_is_called_a_norm():
    assert bool((brute_force(9, 0.2, momentum=0.9) > 0).all())


def test_schedules_weight_each_step_with_its_rate():
    rates = [0.1, 0.05, 0.2, 0.01]
    a, c = 0.0, None
    for lr in rates:
        a, c = count_step(a, c, {"lr": lr, "momentum": 0.5})
    assert a == pytest.approx(float(brute_force(4, rates=rates, momentum=0.5).sum()), rel=1e-12)


# -- the algorithm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: Toy("sgd"), lambda: NormNet("sgd"), lambda: Toy("momentum")])
def test_equal_work_is_fedavg(make):
    """(a): three clients of one size, so of equal tau."""
    module, data = make(), toy_data((24, 24, 24))
    close(*(global_state(federate(module, data, cb, max_rounds=3)) for cb in ([], [FedNova()])), atol=2e-7)


def test_unequal_work_is_not():
    module, data = Toy("sgd"), toy_data()
    assert differs(*(global_state(federate(module, data, cb, max_rounds=1)) for cb in ([], [FedNova()])))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("participation", [1.0, 2])
def test_rounds_by_hand(weighting, participation):
    """w - (sum p A) sum p (w - w_i)/A_i over participants, A_i = 0.1 * 2 * n_i / 8 for plain SGD."""
    module, data = NormNet("sgd"), toy_data()
    options = {"max_rounds": 3, "local_epochs": 2, "participation": participation}
    _, spy = spied(module, data, [FedNova(weighting)], **options)
    old = module_state(module)
    for number in range(3):
        updates = spy.of_round(number)
        weights = {c: float(SIZES[c]) if weighting == "samples" else 1.0 for c in updates}
        a = {c: 0.1 * 2 * SIZES[c] / 8 for c in updates}
        assert {c: u.extras["FedNova"]["a"] for c, u in updates.items()} == pytest.approx(a)
        total, mean = sum(weights.values()), mean_of(updates, weights)
        for name in mean:
            if "running" in name:
                assert torch.equal(spy.rounds[number][name], mean[name])
                continue
            start = old[name].double()
            d = sum(weights[c] * (start - update.state[name].double()) / a[c] for c, update in updates.items()) / total
            expected = start - sum(weights[c] * a[c] for c in updates) / total * d
            torch.testing.assert_close(spy.rounds[number][name], expected.float(), atol=1e-7, rtol=1e-6)
        old = spy.rounds[number]
        assert "FedNova" not in spy.states[number]


TARGETS, CURVES = [[3.0], [-1.0], [0.5]], [[2.0], [0.7], [1.0]]


def uneven_data(taus=(2, 5, 20)):
    """Client i's objective is a quadratic, seen tau_i times in an epoch of batches of one."""
    tensors = {}
    for i, tau in enumerate(taus):
        rows = tuple(torch.tensor([v], dtype=torch.float64).repeat(tau, 1) for v in (CURVES[i], TARGETS[i]))
        tensors[str(i)] = {"train": rows, "val": tuple(r[:0] for r in rows), "test": tuple(r[:0] for r in rows)}
    return ToyData(tensors, batch_size=1)


def error(callbacks, lr, rounds, **options):
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (CURVES, TARGETS))
    best = (a * b).sum(0) / a.sum(0)
    trainer = federate(Quadratic(lr=lr, size=1), uneven_data(), callbacks, max_rounds=rounds, **options)
    return float((global_state(trainer)["w"] - best).abs().max())


def test_unequal_work_does_not_move_the_fixed_point():
    """(c): tau = (2, 5, 20): FedNova's error is far below FedAvg's and shrinks with eta; FedAvg's does not."""
    nova, avg = ([error([cls("uniform")], lr, int(0.8 / lr)) for lr in (0.08, 0.04)] for cls in (FedNova, FedAvg))
    assert avg[1] > 5 * nova[1]
    assert nova[1] < 0.65 * nova[0]
    assert avg[1] > 0.9 * avg[0]


class Linear(Quadratic):
    """``-b w``: every gradient of a client is ``-b``."""

    momentum = 0.0

    def training_step(self, batch, batch_idx):
        return -(batch[1] * self.w).sum(-1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=self.momentum)


class HeavyLinear(Linear):
    momentum = 0.9


class ScheduledLinear(HeavyLinear):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("mu", [0.0, 2.0])
@pytest.mark.parametrize("make", [Linear, HeavyLinear, ScheduledLinear])
def test_d_is_the_clients_mean_gradient(make, mu):
    """With constant gradients d_i must be -b_i exactly, so the server moves along the mean of b, whatever tau_i."""
    callbacks = [FedNova("uniform"), *([FedProx(mu)] if mu else [])]
    _, spy = spied(make(lr=0.1, size=1), uneven_data(), callbacks, max_rounds=2)
    old = torch.zeros(1, dtype=torch.float64)
    for number in range(2):
        a = [update.extras["FedNova"]["a"] for update in spy.of_round(number).values()]
        for update, target in zip(spy.of_round(number).values(), TARGETS, strict=True):
            d = (old - update.state["w"]) / update.extras["FedNova"]["a"]
            torch.testing.assert_close(d, -torch.tensor(target).double(), atol=1e-12, rtol=0)
        new = old + sum(a) / 3 * torch.tensor(TARGETS).double().mean(0)
        torch.testing.assert_close(spy.rounds[number]["w"], new, atol=1e-12, rtol=0)
        old = new


def test_one_client_is_plain_training():
    module, data = NormNet("momentum"), toy_data([22])
    close(*(global_state(federate(module, data, cb, max_rounds=3)) for cb in ([], [FedNova()])), atol=2e-7)


def test_server_momentum_comes_from_fedavgm():
    module, data = Toy("sgd"), toy_data()
    _, spy = spied(module, data, [FedNova(), FedAvgM(beta=0.5)], max_rounds=2)
    _, plain = spied(module, data, [FedNova()], max_rounds=1)
    close(spy.rounds[0], plain.rounds[0], atol=1e-7)
    start = module_state(module)
    for name, new in spy.rounds[1].items():  # vel_1 = q_1, vel_2 = vel_1 / 2 + q_2
        q = [start[name].double() - spy.rounds[0][name].double(), spy.states[1]["FedAvgM"]["vel"][name]]
        torch.testing.assert_close(new, (spy.rounds[0][name].double() - q[1]).float())
        assert not torch.equal(q[1], 0.5 * q[0])


def test_private_layers_stay_and_do_not_matter():
    module = Toy("sgd")
    trainer, spy = spied(module, toy_data(), [FedPer(personal=["net.3"]), FedNova()], max_rounds=2)
    same({"w": global_state(trainer)["net.3.weight"]}, {"w": module_state(module)["net.3.weight"]})
    assert all(set(u.state) == {"net.0.weight", "net.0.bias"} for u in spy.updates)


class Drops(FederatedCallback):
    """Client 1 does not send the head (as layer-dropping methods do)."""

    facts = Facts(changes={Change.PARTS})

    def on_send(self, client, update):
        if client.id == "1":
            update.state = {name: value for name, value in update.state.items() if not name.startswith("net.3")}


def test_a_layer_is_normalised_over_those_who_sent_it():
    module, data = Toy("sgd"), toy_data()
    _, spy = spied(module, data, [Drops(), FedNova()], max_rounds=1)
    _, others = spied(module, toy_data({"0": 24, "2": 16}), [FedNova()], max_rounds=1)
    _, everybody = spied(module, data, [FedNova()], max_rounds=1)
    for name, value in spy.rounds[0].items():
        expected = others if name.startswith("net.3") else everybody
        torch.testing.assert_close(value, expected.rounds[0][name], atol=1e-7, rtol=1e-6)


def test_a_failing_client_does_not_count():
    data = toy_data()
    x, y = data.tensors["1"]["train"]
    data.tensors["1"]["train"] = (x * float("nan"), y)
    module = Toy("sgd")
    with pytest.warns(UserWarning, match="client '1'"):
        trainer = federate(module, data, [FedNova()], max_rounds=2)
    others = federate(module, toy_data({"0": 24, "2": 16}), [FedNova()], max_rounds=2)
    close(*map(global_state, (trainer, others)))


def test_only_a_number_more_travels():
    trainer, spy = spied(NormNet("sgd"), toy_data(), [FedNova()], max_rounds=1)
    size = sum(t.numel() * t.element_size() for t in global_state(trainer).values())
    assert [m.num_bytes for m in spy.messages[:3]] == [size] * 3
    assert [u.num_bytes for u in spy.updates] == [size + 8] * 3


def test_wrong_use_is_refused():
    class Median(FederatedCallback):
        def reduce(self, server, updates):
            return updates[0].state

    class TwoMomenta(Toy):
        def configure_optimizers(self):
            groups = [{"params": self.net[0].parameters(), "momentum": 0.9}, {"params": self.net[3].parameters()}]
            return torch.optim.SGD(groups, 0.1)

    with pytest.raises(ValueError, match=r"FedNova averages normalised changes.*, and Median combines"):
        federate(Toy(), toy_data(), [FedNova(), Median()])
    with pytest.raises(ValueError, match="TwoMomenta has groups of differing momentum"):
        federate(TwoMomenta(), toy_data(), [FedNova()])
    with pytest.warns(UserWarning, match="optimizer is Adam"):
        federate(Toy("adam"), toy_data(), [FedNova()], max_rounds=1)


class OwnPhase(FederatedCallback):
    """A fit of the client's own before the federated one."""

    def local_phases(self, client):
        return [Phase("own", federated=False, keep_as=lambda client: None), Phase()]


def test_only_federated_steps_count():
    _, spy = spied(Toy("momentum"), toy_data(), [OwnPhase(), FedNova()], max_rounds=1)
    _, plain = spied(Toy("momentum"), toy_data(), [FedNova()], max_rounds=1)
    assert [u.extras for u in spy.updates] == [u.extras for u in plain.updates]


@pytest.mark.parametrize("how", ["reset", "keep"])
def test_a_momentum_that_goes_on_is_counted_on(how):
    """A_i is what torch's own SGD, one for all rounds or a new one, moves a parameter whose gradients are all 1."""
    module, data = Toy("momentum"), toy_data({"0": 24, "1": 40})
    _, spy = spied(module, data, [FedNova()], max_rounds=3, optimizer_state=how)
    for client, steps in (("0", 3), ("1", 5)):
        w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=module.lr, momentum=0.9)
        for number in range(3):
            if how == "reset":
                optimizer = torch.optim.SGD([w], lr=module.lr, momentum=0.9)
            before = float(w)
            for _ in range(steps):
                w.grad = torch.ones_like(w)
                optimizer.step()
            assert spy.of_round(number)[client].extras["FedNova"]["a"] == pytest.approx(before - float(w), rel=1e-9)


def test_training_that_starts_elsewhere_is_refused():
    with pytest.raises(ValueError, match=r"steps from w\^t, and FLIU makes"):
        federate(Toy(), toy_data([8]), [FedNova(), FLIU()])
