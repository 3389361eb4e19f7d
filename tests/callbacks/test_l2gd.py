"""L2GD: sheet entry 31."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedlightning.callbacks import L2GD, SCAFFOLD, FedAdam, FedAvgM, FedNova, FedPer, FedSGD
from fedlightning.seeding import generator
from fedlightning.tensors import module_state
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

CASES = {
    "L2GD": Case(L2GD(), skip={"one_client": "the coin decides how many steps there are"}, arguments={"local_steps": 1})
}
KEPT = {"L2GD": Kept("L2GD", server=("m",), client=("lr", "x"))}

A = [[1.0, 2.0, 0.5], [3.0, 0.4, 1.0], [0.5, 0.5, 2.0]]
B = [[1.0, -1.0, 2.0], [-2.0, 3.0, 0.5], [0.0, 1.0, 1.0]]
STEPS = {"local_steps": 1}


def xs(records):
    return {client: record.state["L2GD"]["x"] for client, record in records.items() if "L2GD" in record.state}


def coins(seed, rounds, p):
    """The rounds' k and the aggregation steps after them, from the same addresses."""
    server = SimpleNamespace(state={}, participants=lambda: ["0"])
    found = []
    for number in range(rounds):
        server.rng = lambda purpose, number=number: generator(seed, number, "server", purpose)
        plan = L2GD(p=p).plan_round(server)
        (job,) = next(plan)
        with pytest.raises(StopIteration):
            plan.send([])
        found.append((job.work, server.state["L2GD"]["m"]))
    return found


def test_the_whole_run_by_hand():
    """Quadratics: coins, contractions and local steps in the order of the paper's loop."""
    lam, p, lr = 0.8, 0.3, 0.1
    data = quadratic_data(A, B)
    trainer, spy = spied(Quadratic(lr=lr), data, [L2GD(lam, p)], max_rounds=6, **STEPS)
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B))
    theta = lr * lam * (1 - p) / p
    x, m = torch.zeros(3, 3, dtype=torch.float64), 0
    for number, (k, next_m) in enumerate(coins(0, 6, p)):
        for _ in range(m):
            x = (1 - theta) * x + theta * x.mean(0)
        for _ in range(k):
            x = x - lr * a * (x - b)
        m = next_m
        sent = torch.stack([update.state["w"] for update in spy.of_round(number).values()])
        torch.testing.assert_close(sent, x, atol=1e-12, rtol=0)
        torch.testing.assert_close(spy.rounds[number]["w"], x.mean(0), atol=1e-12, rtol=0)
        assert all(update.steps == k for update in spy.of_round(number).values())
    for _ in range(m):
        x = (1 - theta) * x + theta * x.mean(0)
    deployed = torch.stack([module_state(trainer.client(client).module)["w"] for client in "012"])
    torch.testing.assert_close(deployed, x, atol=1e-12, rtol=0)


def received(x, xbar, lam=0.8, p=0.3, lr=0.1, m=1):
    """What a client holding ``x`` makes of ``xbar``."""
    client = SimpleNamespace(state={"L2GD": {"x": {"w": x}, "lr": lr}})
    message = SimpleNamespace(state={"w": xbar}, extras={"L2GD": {"m": m}})
    L2GD(lam, p).on_receive(client, message)
    return message.state["w"]


def test_aggregation_keeps_the_mean():
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator("x"))
    for m in (1, 3):
        new = torch.stack([received(row, x.mean(0), m=m) for row in x])
        torch.testing.assert_close(new.mean(0), x.mean(0), atol=1e-15, rtol=0)
        assert float((new - x).abs().max()) > 0.01


def test_repeated_aggregations_are_one_message():
    x, xbar = torch.tensor([3.0, -1.0]).double(), torch.tensor([0.5, 2.0]).double()
    once = x
    for _ in range(4):
        once = received(once, xbar)
    torch.testing.assert_close(received(x, xbar, m=4), once, atol=1e-15, rtol=0)


def test_a_full_step_makes_all_equal():
    """a lam / (N p) = 1."""
    p, lr = 0.25, 0.1
    lam = p / (lr * (1 - p))
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator("x"))
    for row in x:
        torch.testing.assert_close(received(row, x.mean(0), lam, p, lr), x.mean(0), atol=1e-15, rtol=0)


def test_the_expected_step_is_the_gradient_of_the_objective():
    """Both branches weighted by the coin: -a/N (grad f_i(x_i) + lam (x_i - xbar)), with a = eta N (1 - p)."""
    lam, p, lr, n = 0.8, 0.3, 0.1, 3
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B))
    x = torch.randn(3, 3, dtype=torch.float64, generator=generator("x"))
    local = -lr * a * (x - b)
    towards = torch.stack([received(row, x.mean(0), lam, p, lr) for row in x]) - x
    step = lr * n * (1 - p)
    objective = x.clone().requires_grad_()
    value = (0.5 * a * (objective - b).square()).sum() / n + lam / (2 * n) * (
        objective - objective.mean(0)
    ).square().sum()
    value.backward()
    torch.testing.assert_close((1 - p) * local + p * towards, -step * objective.grad, atol=1e-14, rtol=0)


def test_it_finds_the_minimiser_of_the_mixture():
    """x_i = (A_i + lam I)^-1 (A_i b_i + lam xbar) for small steps: neither the local nor the global minimiser."""
    lam = 1.0
    _, spy = spied(Quadratic(lr=0.04), quadratic_data(A, B), [L2GD(lam, p=0.2)], max_rounds=30, **STEPS)
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B))
    xbar = (a / (a + lam) * b).mean(0) / (a / (a + lam)).mean(0)
    best = (a * b + lam * xbar) / (a + lam)
    late = torch.stack([torch.stack([r[c]["w"] for c in "012"]) for r in (xs(r) for r in spy.records[15:])]).mean(0)
    assert float((late - best).abs().max()) < 0.12
    assert float((late - b).abs().max()) > 0.5


class Alone(L2GD):
    """The same coins with nothing on the wire."""

    @property
    def key(self):
        return "L2GD"

    def shared_names(self, server, module):
        return []


@pytest.mark.parametrize("make", [lambda: Toy("sgd", dropout=0.2), lambda: NormNet("sgd")])
def test_without_a_penalty_it_is_training_alone(make):
    module, data = make(), toy_data()
    together = federate(module, data, [L2GD(lam=0.0, p=0.3)], max_rounds=5, **STEPS)
    alone = federate(module, data, [Alone(lam=0.0, p=0.3)], max_rounds=5, **STEPS)
    for client in "012":
        same(*(module_state(run.client(client).module) for run in (together, alone)))
    pulled = federate(module, data, [L2GD(lam=1.0, p=0.3)], max_rounds=5, **STEPS)
    assert differs(*(module_state(run.client("0").module) for run in (together, pulled)))


def test_one_coin_for_all_and_its_statistics():
    """Rounds are runs of a coin: k is geometric with mean 1/p, m with mean 1/(1 - p)."""
    _, spy = spied(Quadratic(lr=0.01), quadratic_data(A, B), [L2GD(p=0.4)], max_rounds=8, **STEPS)
    for number in range(8):
        assert len({update.steps for update in spy.of_round(number).values()}) == 1
    for p in (0.4, 0.1):
        k, m = zip(*coins(1, 2000, p), strict=True)
        assert min(k) == min(m) == 1
        assert sum(k) / 2000 == pytest.approx(1 / p, rel=0.07)
        assert sum(m) / 2000 == pytest.approx(1 / (1 - p), rel=0.07)


def test_a_small_p_communicates_rarely():
    """Messages per step are p (1 - p): they vanish with p."""
    rates = []
    for p in (0.3, 0.03, 0.003):
        runs = coins(2, 400, p)
        rates.append(400 / sum(k + m for k, m in runs))
        assert rates[-1] == pytest.approx(p * (1 - p), rel=0.15)
    assert rates == sorted(rates, reverse=True)


def test_what_is_evaluated_is_what_is_sent_next(tmp_path):
    """The aggregation steps after a round are known when it ends: evaluation draws no coin."""
    module, data = NormNet("sgd"), toy_data()
    often = federate(module, data, [L2GD()], root=tmp_path, max_rounds=4, evaluation=1, **STEPS)
    never = federate(module, data, [L2GD()], max_rounds=4, **STEPS)
    for client in "012":
        same(*(module_state(run.client(client).module) for run in (often, never)))


def test_absent_clients_keep_x_and_newcomers_take_the_mean():
    trainer, spy = spied(Toy("sgd"), toy_data((24, 40, 16, 8)), [L2GD()], max_rounds=3, participation=1, **STEPS)
    for number in range(1, 3):
        for client, x in xs(spy.records[number - 1]).items():
            if client not in spy.of_round(number):
                same(x, xs(spy.records[number])[client])
    newcomer = next(client for client in "0123" if client not in xs(spy.records[-1]))
    same(module_state(trainer.client(newcomer).module), global_state(trainer))


def test_private_layers_are_not_pulled():
    module, data = Toy("sgd"), toy_data()
    trainer, spy = spied(module, data, [FedPer(personal=["net.3"]), L2GD()], max_rounds=2, **STEPS)
    assert set(xs(spy.records[-1])["0"]) == {"net.0.weight", "net.0.bias"}
    close({"w": global_state(trainer)["net.3.weight"]}, {"w": module_state(module)["net.3.weight"]}, atol=0, rtol=0)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match=r"local_steps=None and local_epochs=1\. Set local_steps=1"):
        federate(Toy(), toy_data(), [L2GD()])
    with pytest.raises(ValueError, match=r"would step past the mean: theta = .* = 4\.5"):
        federate(Toy("sgd", lr=0.5), toy_data(), [L2GD()], **STEPS)
    with pytest.warns(UserWarning, match="L2GD balances steps of plain SGD"):
        federate(Toy("momentum", lr=0.01), toy_data(), [L2GD()], max_rounds=1, **STEPS)
    for options, text in (({"lam": -1.0}, "lam=-1"), ({"p": 0.0}, r"p=0\.0.*Local"), ({"p": 1.0}, r"p=1\.0")):
        with pytest.raises(ValueError, match=f"L2GD got {text}"):
            L2GD(**options)


@pytest.mark.parametrize(
    "other", [FedAvgM(weighting="uniform"), FedAdam(weighting="uniform"), FedNova("uniform"), SCAFFOLD()]
)
def test_what_makes_the_servers_model_no_mean_is_refused(other):
    with pytest.raises(ValueError, match=rf"L2GD pulls the clients towards the mean.*, and {other.key} "):
        federate(Toy(lr=0.01), toy_data([8]), [L2GD(), other], local_steps=1)


def test_one_full_step_and_a_coin_contradict_each_other():
    with pytest.raises(ValueError, match="FedSGD takes one step per round, and L2GD decides how much"):
        federate(Toy(lr=0.01), toy_data([8]), [L2GD(), FedSGD(weighting="uniform")], local_steps=1)
