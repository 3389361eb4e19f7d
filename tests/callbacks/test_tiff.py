"""TIFF: sheet B 1.7; the accounts are those of test_tokens.py."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fedlightning.callbacks import TIFF, FedAvg, FedPer, GlobalCheckpoint
from fedlightning.contract import POOLED
from fedlightning.tensors import load_state, module_state
from tests.callbacks.common import FailsOnce, Plain, fixed_data, mean_state, start_of
from tests.callbacks.test_pi_fl import STATE
from tests.conformance.case import Case, Kept
from tests.helpers import Toy, close, federate, global_state, make_trainer, same, spied, toy_data

LOSS = {"monitor": "val_loss"}
CASES = {"TIFF": Case(TIFF(**LOSS)), "TIFF gradient": Case(TIFF(utility="gradient", **LOSS))}
KEPT = {"TIFF": Kept("TIFF", server=STATE, models=("global", "cluster 1"), options={"monitor": "val_acc"})}


def tiff(**options):
    return TIFF(**{"monitor": "val_acc"} | options)


def own(trainer):
    return trainer.server.state["TIFF"]


def test_slots_for_all_are_fedavg():
    module, data = Toy("adam", dropout=0.2), toy_data()
    plain = federate(module, data, [FedAvg()], max_rounds=3)
    ours, spy = spied(module, data, [tiff(performance_slots=None)], max_rounds=3)
    same(ours.server.models["cluster 1"], global_state(plain))
    for client in (None, *ours.server.clients):
        same(module_state(ours.module(client) if client else ours.module()), global_state(plain))
    assert not any(message.tag == "bid" for message in spy.messages)


def test_tokens_are_conserved_and_buy_slots():
    _, spy = spied(Toy(), toy_data([8] * 6), [tiff(performance_slots=2, random_slots=1, tokens=2.0)], max_rounds=5)
    for number, state in enumerate(spy.states):
        balances = state["TIFF"]["balances"]
        assert sum(balances.values()) == pytest.approx(12.0, abs=1e-9) and min(balances.values()) >= 0
        paid = [entry["client"] for entry in state["TIFF"]["ledger"] if entry["round"] == number + 1]
        assert len(paid) == len(set(paid)) == 3
        assert {u.client for u in spy.updates if u.round == number and u.state} == set(paid)


@pytest.mark.parametrize("utility", ["pooled", "gradient"])
def test_refunds_follow_the_accuracy_on_the_servers_data(utility):
    data = toy_data([24, 40, 16])
    trainer, spy = spied(Toy(), data, [tiff(performance_slots=None, utility=utility)], max_rounds=1)
    x, y = (torch.cat([data.tensors[c]["val"][k] for c in "012"]) for k in (0, 1))

    def accuracy(state):
        net = Toy()
        load_state(net, state)
        return float((net(x).argmax(-1) == y).float().mean())

    start = module_state(trainer.server.module)
    best, reached = accuracy(start), accuracy(trainer.server.models["cluster 1"])
    d = max(0.0, (reached - best) / best)
    theta = 0.5 * (0.1 - min(0.1, d)) / 0.1
    for entry in own(trainer)["ledger"]:
        assert entry["refunded"] == pytest.approx(theta, abs=1e-6)
    assert all(message.client == POOLED for message in spy.messages if message.tag == "utility")
    if utility == "pooled":
        sent = {update.client: update for update in spy.updates if update.state}
        for client, value in shapley(sent, start, accuracy).items():
            assert own(trainer)["contribution"]["cluster 1"][client][0] == pytest.approx(value, abs=1e-6)


def shapley(sent, start, worth):
    """The mean of a player's gains over all orders."""

    def v(some):
        if not some:
            return worth(start)
        total = sum(sent[c].num_samples for c in some)
        return worth({n: sum(sent[c].state[n] * sent[c].num_samples for c in some) / total for n in start})

    orders = list(itertools.permutations(sent))
    gains = {c: sum(v(order[: order.index(c) + 1]) - v(order[: order.index(c)]) for order in orders) for c in sent}
    return {client: gain / math.factorial(len(sent)) for client, gain in gains.items()}


def test_there_is_a_global_model_to_select(tmp_path):
    trainer = make_trainer(tmp_path, [GlobalCheckpoint(), tiff()], max_rounds=2)
    trainer.fit(Toy(), datamodule=toy_data())
    assert trainer.server.checkpoints["GlobalCheckpoint"]["round"] in (1, 2)
    assert (trainer.run.path / "ledger.csv").exists() and not (trainer.run.path / "clusters.csv").exists()


def test_refusals():
    with pytest.raises(ValueError, match="TIFF scores whole models on the server's data, and here some entries stay"):
        federate(Toy(), toy_data(), [tiff(), FedPer()])
    with pytest.raises(ValueError, match="TIFF got utility='local'"):
        TIFF(utility="local")
    with pytest.raises(ValueError, match=r"TIFF got eta=2\.0"):
        TIFF(eta=2.0)
    with pytest.raises(ValueError, match="TIFF pays by what validation data say"):
        federate(Toy(), toy_data(val=0), [tiff()])


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_federation_by_hand(weighting):
    """Slots by contribution, payments, mean, utility, refunds and rewards, from sheet B 1.8.4; one client fails once."""
    data, start = fixed_data([16, 24, 16, 8, 20], worlds=2), start_of(Toy)
    options = {"performance_slots": 2, "random_slots": 1, "tokens": 1.2, "gamma": 0.5, "weighting": weighting}
    _, free = spied(start, data, [tiff(**options)], max_rounds=1)
    failing = next(iter(dict.fromkeys(u.client for u in free.updates if u.state)))
    with pytest.warns(UserWarning, match=f"'{failing}' failed"):
        trainer, spy = spied(start, data, [FailsOnce(failing, 0, ""), tiff(**options)], max_rounds=6)
    clients = trainer.server.clients
    x, y = (torch.cat([data.tensors[c]["val"][k] for c in clients]) for k in (0, 1))
    worth = lambda state: float((Plain(state)(x).argmax(-1) == y).double().mean())  # noqa: E731
    weights = {c: len(data.tensors[c]["train"][0]) if weighting == "samples" else 1 for c in clients}
    w, tokens, best = module_state(start), dict.fromkeys(clients, 1.2), None
    psi, times, broke = {c: [] for c in clients}, dict.fromkeys(clients, 0), False
    for number in range(6):
        entries = {e["client"]: e for e in spy.states[number]["TIFF"]["ledger"] if e["round"] == number + 1}
        able = [c for c in clients if tokens[c] >= 1]
        broke = broke or len(able) < len(clients)
        mean = {c: sum(psi[c]) / len(psi[c]) if psi[c] else 0.0 for c in clients}
        order = sorted(able, key=lambda c: (-round(mean[c], 6), times[c], clients.index(c)))
        assert set(order[:2]) <= set(entries) and len(entries) == min(3, len(able)) and set(entries) <= set(able)
        came = [c for c in clients if c in entries and (c, number) != (failing, 0)]
        trained = {c: Plain(w).trained(*data.tensors[c]["train"]) for c in came}

        def of(some, w=w, trained=trained):
            return worth(mean_state([(weights[c], trained[c]) for c in some]) if some else w)

        best = worth(w) if best is None else best
        reached = of(came)
        theta = 0.5 * (0.5 - min(0.5, max(0.0, (reached - best) / best))) / 0.5
        best = max(best, reached)
        w = mean_state([(weights[c], trained[c]) for c in came])
        orders = list(itertools.permutations(came))
        gain = {c: sum(of(o[: o.index(c) + 1]) - of(o[: o.index(c)]) for o in orders) / len(orders) for c in came}
        for c in came:
            psi[c].append(gain[c])
            times[c] += 1
        key = {c: (round(gain[c], 6), times[c]) for c in came}
        rank = {c: sum(key[o] < key[c] for o in came) + (1 + sum(key[o] == key[c] for o in came)) / 2 for c in came}
        pool = len(came) * (1 - theta)
        for c in came:
            tokens[c] += theta - 1 + pool * rank[c] / sum(rank.values())
        assert spy.states[number]["TIFF"]["balances"] == pytest.approx(tokens, abs=1e-6)
        found = spy.states[number]["TIFF"]["contribution"]["cluster 1"]
        assert {c: v for c, (v, _) in found.items()} == pytest.approx(
            {c: sum(v) / len(v) for c, v in psi.items() if v}, abs=1e-6
        )
    assert broke
    close(trainer.server.models["cluster 1"], w, atol=1e-9, rtol=0)
