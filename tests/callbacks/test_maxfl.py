"""MaxFL: sheet B 1.6."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.algorithm import Change, Facts
from fedlightning.callbacks import Ditto, FedAdam, FedAvg, FedBN, FedPer, FedProx, MaxFL
from fedlightning.callbacks.maxfl import ALONE, appeal_weight
from fedlightning.tensors import module_state
from tests.callbacks.common import FailsOnce, Plain, fixed_data, start_of
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Quadratic, Toy, close, federate, global_state, quadratic_data, spied, toy_data

CASES = {
    "MaxFL": Case(MaxFL(), neutral=MaxFL(eps=0.0)),
    "MaxFL alone": Case(MaxFL(server_lr=0.5, alone=2), neutral=MaxFL(eps=0.0)),
}
KEPT = {"MaxFL": Kept("MaxFL", server=("known", "rows"), client=("requirement",))}

A = [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
B = [[1.0, 2.0, 1.0], [0.8, 1.5, 1.0], [1.0, -1.0, 0.2]]


def loss(i, w):
    return 0.5 * (np.array(A[i]) * (w - np.array(B[i])) ** 2).sum()


def steps(i, w, count=1, lr=0.1):
    for _ in range(count):
        w = w - lr * np.array(A[i]) * (w - np.array(B[i]))
    return w


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


@pytest.mark.parametrize(("options", "alone"), [({}, 1), ({"alone": 4}, 4), ({"server_lr": 0.5, "eps": 0.3}, 1)])
def test_rounds_by_hand(options, alone):
    ours = federate(Quadratic(), quadratic_data(A, B), [MaxFL(**options)], max_rounds=4)
    rho = [loss(i, steps(i, np.zeros(3), alone)) for i in range(3)]
    w = np.zeros(3)
    for _ in range(4):
        s = sigmoid(np.array([loss(i, w) - rho[i] for i in range(3)]))
        q = s * (1 - s)
        moved = sum(q[i] * (steps(i, w) - w) for i in range(3))
        w = w + options.get("server_lr", 1.0) / (q.sum() + options.get("eps", 1e-6)) * moved
    np.testing.assert_allclose(global_state(ours)["w"], w, atol=1e-12)
    assert ours.store.get("1").state["MaxFL"]["requirement"] == pytest.approx(rho[1], abs=1e-12)


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_equal_distances_are_uniform_fedavg(make, monkeypatch):
    monkeypatch.setattr("fedlightning.callbacks.maxfl.appeal_weight", lambda loss, requirement: 0.21)
    module = make()
    plain = federate(module, toy_data(), [FedAvg("uniform")], max_rounds=2)
    ours = federate(module, toy_data(), [MaxFL(eps=0.0)], max_rounds=2)
    close(global_state(ours), global_state(plain), atol=1e-7)
    assert ours.server.costs.bytes_down == plain.server.costs.bytes_down


@pytest.mark.parametrize("z", [0.0, 0.3, 2.0, 7.5, 25.0, math.inf])
def test_weights_are_symmetric_and_largest_at_the_requirement(z):
    assert appeal_weight(1.0 + z, 1.0) == appeal_weight(1.0 - z, 1.0)
    s = sigmoid(np.float64(min(z, 20.0)))
    assert appeal_weight(z, 0.0) == pytest.approx(s * (1 - s), rel=1e-6)
    assert 0 < appeal_weight(z, 0.0) <= 0.25


def test_one_client_at_its_requirement_decides_where_all_others_are_far():
    far = [[1.0, 1.0, 1.0], [900.0, 900.0, 900.0], [-900.0, 700.0, 800.0]]
    _, spy = spied(
        Quadratic(1e-3), quadratic_data([[1.0, 1.0, 1.0]] * 3, far), [MaxFL(alone=20, eps=0.0)], max_rounds=1
    )
    (near,) = (update for update in spy.updates if update.client == "0" and not update.tag)
    close(spy.rounds[0], near.state, atol=1e-6)


def test_late_clients_find_their_requirement_from_the_first_model():
    trainer, spy = spied(Quadratic(), quadratic_data(A, B), [MaxFL()], max_rounds=5, participation=1)
    seen = set()
    for number in range(5):
        visits = [update for update in spy.updates if update.round == number]
        late = number > 0 and visits[0].client not in seen
        assert [update.tag for update in visits] == ([ALONE, ""] if late else [""])
        assert not late or visits[0].state == {}
        seen.add(visits[0].client)
    assert len(seen) > 1 and trainer.server.state["MaxFL"]["known"] == sorted(seen)
    for client in seen:
        own = trainer.store.get(client)
        rho = loss(int(client), steps(int(client), np.zeros(3)))
        assert own.state["MaxFL"]["requirement"] == pytest.approx(rho, abs=1e-12)
    assert ALONE not in trainer.server.models


@pytest.mark.parametrize(
    ("options", "failing"), [({}, ("1", 0)), ({"alone": 3, "server_lr": 0.7, "eps": 0.1}, ("2", 2))]
)
def test_a_federation_by_hand(options, failing):
    """Three of five clients take part in a round; some come late, one fails once."""
    data, start, callback = fixed_data([16, 24, 10, 8, 20], worlds=2), start_of(Toy), MaxFL(**options)
    with pytest.warns(UserWarning, match=f"'{failing[0]}' failed"):
        _, spy = spied(start, data, [callback, FailsOnce(*failing)], max_rounds=4, participation=3)
    first = w = module_state(start)
    rho: dict[str, float] = {}
    for number in range(4):
        q, trained = {}, {}
        for client in dict.fromkeys(update.client for update in spy.updates if update.round == number):
            x, y = data.tensors[client]["train"]
            if client not in rho:
                own = Plain(first)
                for _ in range(callback.alone or 1):
                    own.trained(x, y)
                rho[client] = float(F.cross_entropy(own(x), y))
            s = sigmoid(float(F.cross_entropy(Plain(w)(x), y)) - rho[client])
            q[client], trained[client] = s * (1 - s), Plain(w).trained(x, y)
        share = callback.server_lr / (sum(q.values()) + callback.eps)
        w = {name: v + sum(share * q[c] * (trained[c][name] - v) for c in q) for name, v in w.items()}
        close(spy.rounds[number], w, atol=1e-9, rtol=0)
        found = {c: weight for c, weight, _ in spy.states[number]["MaxFL"]["rows"]}
        assert found == pytest.approx(q, abs=1e-9)
    assert set(rho) == set(spy.states[-1]["MaxFL"]["known"]) and len(rho) > 3


@pytest.mark.parametrize("alone", [None, 2])
def test_who_fails_alone_does_not_take_its_requirement_from_the_model_of_all(alone):
    clients, options = quadratic_data(A, B), {"max_rounds": 3, "participation": 2}
    _, plain = spied(Quadratic(), clients, [MaxFL(alone=alone)], **options)
    late = {u.client: u.round for u in reversed(plain.updates) if u.tag == ALONE}
    who, when = next((c, r) for c, r in late.items() if r == 1)
    with pytest.warns(UserWarning, match=f"'{who}' failed"):
        trainer, spy = spied(Quadratic(), clients, [FailsOnce(who, when, ALONE), MaxFL(alone=alone)], **options)
    assert who not in {u.client for u in spy.updates if u.round == when}
    assert {u.tag for u in spy.updates if u.client == who and u.round == 2} == {ALONE, ""}
    rho = loss(int(who), steps(int(who), np.zeros(3), alone or 1))
    assert trainer.store.get(who).state["MaxFL"]["requirement"] == pytest.approx(rho, abs=1e-12)


def test_who_fails_in_round_1_does_not_train_what_it_keeps_twice_in_a_round():
    """Where a client can come later, such callbacks are refused; a failure makes one come later all the same."""
    with pytest.warns(UserWarning, match="'1' failed"):
        _, spy = spied(Toy(), toy_data(), [FailsOnce("1", 0), MaxFL(), Ditto()], max_rounds=4)
    visits = [(u.round, u.tag) for u in spy.updates if u.client == "1" and u.steps]
    assert visits == [(1, ALONE), (2, ""), (3, "")]


def test_the_appeal_of_each_round_is_written_once(tmp_path):
    trainer = federate(Quadratic(), quadratic_data(A, B), [MaxFL()], tmp_path, max_rounds=3, evaluation=0)
    with (trainer.run.path / "appeal.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["round"], row["client"]) for row in rows] == [(str(r), c) for r in (1, 2, 3) for c in "012"]
    assert [row["satisfied"] for row in rows[:3]] == ["0", "0", "0"]  # all begin from where nobody has trained
    w, rho = np.zeros(3), [loss(i, steps(i, np.zeros(3))) for i in range(3)]
    for number in range(3):
        s = sigmoid(np.array([loss(i, w) - rho[i] for i in range(3)]))
        q = s * (1 - s)
        for i, row in enumerate(rows[3 * number : 3 * number + 3]):
            assert float(row["weight"]) == pytest.approx(q[i], rel=1e-5)
            assert int(row["satisfied"]) == (loss(i, w) < rho[i])
        w = w + sum(q[i] * (steps(i, w) - w) for i in range(3)) / (q.sum() + 1e-6)
    assert {row["satisfied"] for row in rows} == {"0", "1"}


def test_a_round_of_hopeless_clients_says_that_it_stands_still():
    far = [[1e3, 1e3, 1e3], [-1e3, 1e3, 1e3], [1e3, -1e3, 1e3]]
    with pytest.warns(UserWarning, match="so far from their requirements that MaxFL takes 0.0"):
        federate(Quadratic(), quadratic_data(A, far), [MaxFL()], max_rounds=1)


class Merging(FederatedCallback):
    facts = Facts(changes={Change.START})


class Reducing(FederatedCallback):
    def reduce(self, server, updates):
        return {}


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (FedPer(), "MaxFL asks whether one model for all satisfies each client, but here 'net.3.weight' stays"),
        (FedBN(), "but here 'net.1.weight' stays with the clients"),
        (Merging(), "and Merging makes the model that training starts from"),
        (Reducing(), "and Reducing combines updates in a way of its own"),
        (FedAdam(), "both claim 'server_step'"),
        (FedAvg(), "ask for different weightings"),
    ],
)
def test_what_leaves_no_one_model_to_weigh_is_refused(other, match):
    with pytest.raises(ValueError, match=match):
        federate(NormNet(), toy_data(), [MaxFL(), other])


@pytest.mark.parametrize("given", [{"alone": 2}, {"participation": 2}])
def test_moments_do_not_go_on_from_the_visit_alone(given):
    options = {"optimizer_state": "keep", "participation": given.get("participation", 1.0)}
    with pytest.raises(ValueError, match="train alone before it trains the global model"):
        federate(Toy("adam"), toy_data(), [MaxFL(alone=given.get("alone"))], **options)


@pytest.mark.parametrize("given", [{"alone": 2}, {"participation": 2}])
def test_a_personal_model_takes_no_steps_in_the_visit_alone(given):
    with pytest.raises(ValueError, match="would train in both visits, and Ditto keeps"):
        federate(
            Toy(), toy_data(), [MaxFL(alone=given.get("alone")), Ditto()], participation=given.get("participation", 1.0)
        )


def test_the_sum_of_updates_keeps_other_terms():
    module = Toy()
    a = federate(module, toy_data(), [MaxFL(), FedProx(0.0)], max_rounds=2)
    b = federate(module, toy_data(), [MaxFL()], max_rounds=2)
    assert all(torch.equal(value, global_state(b)[name]) for name, value in global_state(a).items())


@pytest.mark.parametrize("options", [{"server_lr": 0.0}, {"eps": -1.0}, {"alone": 0}])
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"MaxFL got {next(iter(options))}="):
        MaxFL(**options)
