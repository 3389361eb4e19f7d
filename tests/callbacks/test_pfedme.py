"""pFedMe: sheet entry 12."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.callbacks import FedAvg, FedPer, pFedMe
from fedlightning.tensors import module_state
from tests.callbacks.common import A, B, batches
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
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

CASES = {
    "pFedMe": Case(pFedMe(), skip=NO_PLAIN_FORM),
    "pFedMe all": Case(pFedMe(all_clients=True, server_lr=0.5), skip=NO_PLAIN_FORM),
}
KEPT = {"pFedMe": Kept("PFedMe", client=("theta",))}

EXACT = {"lam": 2.0, "inner_steps": 60, "personal_lr": 0.3}


def started(lr):
    module = Quadratic(lr=lr)
    with torch.no_grad():
        module.w.fill_(0.5)
    return module


def thetas(records):
    return {client: record.state["PFedMe"]["theta"] for client, record in records.items() if "PFedMe" in record.state}


def test_exact_proximal_points_of_quadratics():
    """(a): theta = (A + lam I)^-1 (A b + lam w), and w_i = w - eta lam (w - theta), the gradient of the envelope."""
    _, spy = spied(started(lr=0.1), quadratic_data(A, B), [pFedMe(**EXACT)], max_rounds=2)
    w = torch.full((3,), 0.5, dtype=torch.float64)
    for number in range(2):
        for client, update in spy.of_round(number).items():
            a, b = (torch.tensor(rows[int(client)], dtype=torch.float64) for rows in (A, B))
            theta = (a * b + 2.0 * w) / (a + 2.0)
            torch.testing.assert_close(thetas(spy.records[number])[client]["w"], theta, atol=1e-12, rtol=0)
            torch.testing.assert_close(update.state["w"], w - 0.1 * 2.0 * (w - theta), atol=1e-12, rtol=0)
            envelope = (a * 2.0 / (a + 2.0)) * (w - b)  # of min_theta a/2 (theta - b)^2 + lam/2 (theta - w)^2
            torch.testing.assert_close(2.0 * (w - theta), envelope, atol=1e-12, rtol=0)
        w = spy.rounds[number]["w"]
        torch.testing.assert_close(w, sum(u.state["w"] for u in spy.of_round(number).values()) / 2, atol=1e-15, rtol=0)


def test_the_inner_and_outer_steps_by_hand():
    """K = 3 on a net, two epochs: theta is warm from batch to batch, and starts at w^t in every visit."""
    module, data = Toy("sgd", lr=0.05), toy_data()
    options = {"lam": 5.0, "inner_steps": 3, "personal_lr": 0.1}
    _, spy = spied(module, data, [pFedMe(**options)], max_rounds=2, local_epochs=2)
    for number, start in enumerate((module.state_dict(), spy.rounds[0])):
        for client, update in spy.of_round(number).items():
            theta, w = copy.deepcopy(module), {name: value.clone() for name, value in start.items()}
            theta.load_state_dict(start)
            for x, y in batches(data, client, round=number, epochs=2):
                for _ in range(3):
                    theta.zero_grad()
                    F.cross_entropy(theta(x), y).backward()
                    with torch.no_grad():
                        for name, p in theta.named_parameters():
                            p -= 0.1 * (p.grad + 5.0 * (p - w[name]))
                w = {name: v - 0.05 * 5.0 * (v - theta.state_dict()[name]) for name, v in w.items()}
            close(update.state, w, atol=1e-6)
            close(thetas(spy.records[number])[client], module_state(theta), atol=1e-6)


def test_at_eta_lam_one_w_is_the_last_theta():
    """(b)"""
    _, spy = spied(Toy("sgd", lr=0.2), toy_data(), [pFedMe(lam=5.0)], max_rounds=1)
    for client, update in spy.of_round(0).items():
        close(update.state, thetas(spy.records[0])[client], atol=1e-6)


def test_without_an_outer_rate_w_stays_and_theta_moves():
    """(d)"""
    module = Toy("sgd", lr=0.0)
    _, spy = spied(module, toy_data(), [pFedMe()], max_rounds=2)
    same(spy.rounds[-1], module_state(module))
    assert all(differs(theta, module_state(module)) for theta in thetas(spy.records[-1]).values())


def test_a_huge_lam_holds_theta_at_w():
    """(e)"""
    gaps = []
    for lam in (2.0, 20.0, 2000.0):
        options = {"lam": lam, "inner_steps": 60, "personal_lr": 1.0 / (lam + 3.0)}
        _, spy = spied(started(lr=0.1 / lam), quadratic_data(A, B), [pFedMe(**options)], max_rounds=1)
        gaps.append(max(float((theta["w"] - 0.5).abs().max()) for theta in thetas(spy.records[0]).values()))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 5e-3


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0, 2.0])
def test_the_servers_rate(rate):
    """(c): b = 0 is a frozen server, b = 1 the plain uniform mean; buffers are averaged."""
    module, data = NormNet("sgd", lr=0.05), toy_data()
    trainer, spy = spied(module, data, [pFedMe(server_lr=rate)], max_rounds=1)
    mean, start = mean_of(spy.of_round(0), dict.fromkeys("012", 1.0)), module_state(module)
    for name, value in mean.items():
        trainable = "running" not in name
        expected = (1 - rate) * start[name] + rate * value if trainable else value
        torch.testing.assert_close(global_state(trainer)[name], expected, atol=0 if rate in (0, 1) else 1e-6, rtol=0)


def test_the_personal_model_is_theta_and_not_an_alias_of_w():
    """The defect of the published code: its personal accuracy is that of w_i."""
    trainer, spy = spied(NormNet("sgd", lr=0.02), toy_data(), [pFedMe()], max_rounds=2)
    for client, theta in thetas(spy.records[-1]).items():
        same(module_state(trainer.client(client).module), theta)
        assert differs(theta, spy.of_round(1)[client].state)
        assert differs(theta, global_state(trainer))


def test_theta_has_its_own_statistics_and_leaves_those_of_w_alone():
    module, data = NormNet("sgd", lr=0.0), toy_data()
    _, spy = spied(module, data, [pFedMe(personal_lr=0.1)], max_rounds=1, local_epochs=2)
    _, plain = spied(module, data, [FedAvg("uniform")], max_rounds=1, local_epochs=2)
    for client, update in spy.of_round(0).items():
        same(update.state, plain.of_round(0)[client].state)
        theta = thetas(spy.records[0])[client]
        assert not torch.equal(theta["net.1.running_mean"], update.state["net.1.running_mean"])
        assert torch.equal(theta["net.1.num_batches_tracked"], update.state["net.1.num_batches_tracked"])


def test_theta_never_travels_and_an_absent_client_keeps_it():
    trainer, spy = spied(Toy("sgd", lr=0.02), toy_data((24, 40, 16, 8)), [pFedMe()], max_rounds=4, participation=2)
    names = set(global_state(trainer))
    for update in spy.updates:
        assert set(update.state) == names
        assert not update.extras
        theta = thetas(spy.records[update.round])[update.client]
        assert all(not torch.equal(update.state[name], theta[name]) for name in names)
    for number in range(1, 4):
        for client, theta in thetas(spy.records[number - 1]).items():
            if client not in spy.of_round(number):
                same(theta, thetas(spy.records[number])[client])


def test_a_newcomer_deploys_w():
    trainer, spy = spied(Toy("sgd", lr=0.02), toy_data((24, 40, 16)), [pFedMe()], max_rounds=1, participation=1)
    absent = [client for client in "012" if client not in spy.of_round(0)]
    assert len(absent) == 2
    same(module_state(trainer.client(absent[0]).module), global_state(trainer))


def test_everybody_may_compute_while_the_sampled_send():
    """The paper's plan: the server's trajectory is that of the sampled clients, every theta moves every round."""
    module, data = Toy("sgd", lr=0.02), toy_data((24, 40, 16))
    trainer, spy = spied(module, data, [pFedMe(all_clients=True)], max_rounds=3, participation=1)
    rest, _ = spied(module, data, [pFedMe()], max_rounds=3, participation=1)
    same(global_state(trainer), global_state(rest))
    for number in range(3):
        assert sum(bool(update.state) for update in spy.of_round(number).values()) == 1
        assert set(thetas(spy.records[number])) == {"0", "1", "2"}
    for client in "012":
        assert differs(*(thetas(spy.records[number])[client] for number in (1, 2)))


@pytest.mark.slow
def test_theta_fits_better_than_w():
    """The gain of personalisation where clients disagree: same inputs, other labels."""
    data = toy_data((24, 24, 24))
    x, y = data.tensors["0"]["train"]
    for shift, client in enumerate("012"):
        data.tensors[client]["train"] = (x, (y + shift) % 3)
    trainer = federate(Toy("sgd", lr=0.05), data, [pFedMe(lam=2.0, personal_lr=0.2)], max_rounds=6, local_epochs=2)

    def loss(module, client):
        return F.cross_entropy(module(x), data.tensors[client]["train"][1]).item()

    w = trainer.server.module_with(global_state(trainer))
    assert all(loss(trainer.client(c).module, c) < 0.9 * loss(w, c) for c in "012")


def test_private_layers_take_part():
    module = Toy("sgd", lr=0.02)
    trainer = federate(module, toy_data(), [FedPer(personal=["net.3"]), pFedMe()], max_rounds=2)
    start = module_state(module)
    same({"h": global_state(trainer)["net.3.weight"]}, {"h": start["net.3.weight"]})
    assert differs(module_state(trainer.client("0").module), start)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match=r"lr \* lam = 3 of its way.*below 0\.133"):
        federate(Toy("sgd", lr=0.2), toy_data(), [pFedMe(lam=15.0)])
    with pytest.warns(UserWarning, match="takes plain SGD steps of w, and the module's optimizer is Adam"):
        federate(Toy("adam", lr=0.01), toy_data(), [pFedMe()], max_rounds=1)
    with pytest.raises(ValueError, match=r"theta diverges unless .* personal_lr below 0\.133"):
        pFedMe(lam=15.0, personal_lr=0.2)
    for options in ({"lam": 0.0}, {"inner_steps": 0}, {"server_lr": -1.0}):
        with pytest.raises(ValueError, match=rf"pFedMe got .*{next(iter(options))}="):
            pFedMe(**options)

    class Other(FederatedCallback):
        def server_step(self, server, old, reduced):
            return reduced

    federate(Toy("sgd", lr=0.01), toy_data([8]), [pFedMe(), Other()], max_rounds=1)
    with pytest.raises(ValueError, match="PFedMe and Other both claim 'server_step'"):
        federate(Toy("sgd", lr=0.01), toy_data([8]), [pFedMe(server_lr=2.0), Other()], max_rounds=1)


@pytest.mark.parametrize("sizes", [{"0": 24}, {"0": 40}])
def test_accumulated_gradients_make_one_step_of_theta_too(sizes):
    """Against plain torch: theta takes its K steps on the mean over the batches of a window, then w takes one."""
    module, data, window = Toy("sgd"), toy_data(sizes), 2
    _, spy = spied(
        module, data, [pFedMe(lam=4.0, inner_steps=3, personal_lr=0.1)], max_rounds=1, accumulate_grad_batches=2
    )
    w = {name: p.detach().clone() for name, p in module.named_parameters()}
    theta, model, seen = copy.deepcopy(w), copy.deepcopy(module), [*batches(data, "0")]
    for start in range(0, len(seen), window):
        part = seen[start : start + window]
        for _ in range(3):
            model.load_state_dict(theta)
            loss = sum(F.cross_entropy(model(x), y) for x, y in part) / len(part)
            gradients = dict(zip(theta, torch.autograd.grad(loss, [*model.parameters()]), strict=True))
            theta = {n: theta[n] - 0.1 * (gradients[n] + 4.0 * (theta[n] - w[n])) for n in theta}
        w = {n: w[n] - module.lr * 4.0 * (w[n] - theta[n]) for n in w}
    close(thetas(spy.records[0])["0"], theta, atol=1e-5)
    close(spy.of_round(0)["0"].state, w, atol=1e-5)
