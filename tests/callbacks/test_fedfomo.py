"""FedFomo: sheet entry 28."""

from __future__ import annotations

import math

import pytest
import torch

from fedlightning.callbacks import FedAdam, FedFomo, FedPer, FedProx, Local
from fedlightning.callbacks.fedfomo import first_order_weights, score
from fedlightning.client.visit import open_client
from fedlightning.contract import Job
from fedlightning.tensors import module_state
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    ToyData,
    close,
    federate,
    make_trainer,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {
    "FedFomo": Case(FedFomo(num_models=2)),
    "FedFomo start": Case(FedFomo(num_models=2, epsilon=0.0, baseline="start"), skip=NO_PLAIN_FORM),
}
KEPT = {
    "FedFomo": Kept("FedFomo", server=("P", "models"), client=("own",)),
    "FedFomo start": Kept("FedFomo", server=("P", "models"), client=("own", "start"), options={"baseline": "start"}),
}

A = [[1.0, 2.0, 0.5], [2.0, 1.0, 1.0], [0.5, 0.5, 2.0], [1.0, 1.0, 1.0]]
B = [[1.0, 0.0, -1.0], [1.2, 0.1, -0.8], [-3.0, 2.0, 4.0], [1.1, 0.0, -0.9]]
NAMES = ("0", "1", "2", "3")
VAL = [[0.5, 0.5, -0.5], [1.0, 0.0, -1.0], [-2.0, 2.0, 3.0], [1.5, 0.0, -1.0]]


def split_data():
    """Training and validation objectives differ."""
    tensors = {}
    for i, client in enumerate(NAMES):
        train, val = (tuple(torch.tensor([row], dtype=torch.float64) for row in (A[i], b[i])) for b in (B, VAL))
        tensors[client] = {"train": train, "val": val, "test": val}
    return ToyData(tensors)


def fomo_by_hand(rounds, lr, baseline, steps=1):
    a, b, v = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B, VAL))

    def loss(i, w):
        return float(0.5 * (a[i] * (w - v[i]).square()).sum())

    start = torch.zeros(4, 3, dtype=torch.float64)
    trained, scores = None, torch.zeros(4, 4, dtype=torch.float64)
    l1 = start
    for _ in range(rounds):
        if trained is not None:
            l1 = torch.zeros_like(start)
            for i in range(4):
                base = trained[i] if baseline == "own" else start[i]
                s = torch.zeros(4, dtype=torch.float64)
                for n in range(4):
                    length = float((trained[n] - base).norm())
                    s[n] = (loss(i, base) - loss(i, trained[n])) / length if length > 0 else 0.0
                    if n != i:
                        scores[i, n] += s[n]
                w = s.clamp_min(0)
                w = w / w.sum() if w.sum() > 0 else w
                l1[i] = base + sum(w[n] * (trained[n] - base) for n in range(4))
        start, trained = l1, l1.clone()
        for _ in range(steps):
            trained = trained - lr * a * (trained - b)
    return start, trained, scores


@pytest.mark.parametrize("baseline", ["own", "start"])
def test_rounds_by_hand(baseline):
    callback = FedFomo(num_models=3, epsilon=0.0, baseline=baseline)
    trainer, spy = spied(Quadratic(lr=0.4), split_data(), [callback], max_rounds=4, local_epochs=2)
    _start, trained, scores = fomo_by_hand(4, 0.4, baseline, steps=2)
    for i, client in enumerate(NAMES):
        close(spy.of_round(3)[client].state, {"w": trained[i]}, atol=1e-12)
    torch.testing.assert_close(trainer.server.state["FedFomo"]["P"], scores, atol=1e-12, rtol=1e-12)
    assert (scores < 0).any()  # what is added up is not rectified
    after, _, _ = fomo_by_hand(5, 0.4, baseline, steps=2)
    for i, client in enumerate(NAMES):  # deployed: L1 of what would come next
        close(module_state(trainer.module(client)), {"w": after[i]}, atol=1e-12)


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scores", [[1.0, -2.0, 3.0], [0.0, 0.0], [-1.0], [], [5e-324, 1.0], [0.3, 0.3, 0.4], [-0.0, 1e300, 1e300]]
)
def test_weights_are_shares_or_nothing(scores):
    weights = first_order_weights(scores)
    assert all(weight >= 0 for weight in weights)
    assert sum(weights) == pytest.approx(1.0) if any(s > 0 for s in scores) else sum(weights) == 0
    assert all(weight == 0 for weight, s in zip(weights, scores, strict=True) if s <= 0)


def test_weights_do_not_depend_on_the_scale_of_the_loss():
    losses, lengths = [0.9, 0.5, 2.0], [1.0, 3.0, 0.5]
    plain, scaled = (
        first_order_weights([score(s * 1.0, s * v, d) for v, d in zip(losses, lengths, strict=True)])
        for s in (1.0, 64.0)
    )
    assert plain == scaled


def test_scores():
    assert score(1.0, 0.5, 2.0) == 0.25
    assert score(1.0, 1.5, 0.5) == -1.0
    assert score(1.0, 1.0, 0.0) == 0.0  # the same model: not 0/0
    assert score(1.0, math.nan, 1.0) == score(math.inf, 1.0, 1.0) == 0.0


# -- reductions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_without_downloads_it_is_local(make):
    module, data = make(), toy_data()
    alone = federate(module, data, [Local()], max_rounds=3, optimizer_state="reset")
    ours, _spy = spied(module, data, [FedFomo(num_models=0)], max_rounds=3)
    for client in NAMES[:3]:
        same(module_state(ours.module(client)), module_state(alone.module(client)))
    assert ours.server.costs.bytes_down == 0


def test_a_client_alone_keeps_its_model():
    trainer, spy = spied(NormNet("adam"), toy_data([24]), [FedFomo()], max_rounds=3)
    same(module_state(trainer.module("0")), spy.of_round(2)["0"].state)


def test_worse_models_change_nothing():
    """Clients whose minimisers are far apart: everybody else's model is worse."""
    far = [[10.0, 0, 0], [0, 10.0, 0], [0, 0, 10.0]]
    trainer, spy = spied(Quadratic(), quadratic_data(A[:3], far), [FedFomo()], max_rounds=3)
    for client, update in spy.of_round(2).items():
        same(module_state(trainer.module(client)), update.state)
    assert (trainer.server.state["FedFomo"]["P"] <= 0).all()


# -- on models with every kind of entry ------------------------------------------------------------------------------


def test_statistics_move_with_the_parameters_and_integers_stay():
    """All entries of L1 are one convex combination of own and others'; found again by least squares."""
    trainer, spy = spied(NormNet("sgd", lr=0.02), toy_data([24, 40, 24, 32]), [FedFomo(epsilon=0.0)], max_rounds=2)
    sent, moved = spy.of_round(1), 0
    for client in NAMES:
        l1 = module_state(trainer.module(client))
        own = sent[client].state
        assert l1["net.1.num_batches_tracked"] == own["net.1.num_batches_tracked"]
        others = [update.state for name, update in sent.items() if name != client]
        matrix = torch.stack([flat(other) - flat(own) for other in others], dim=1)
        weights = torch.linalg.lstsq(matrix, (flat(l1) - flat(own))[:, None]).solution.flatten()
        torch.testing.assert_close(matrix @ weights, flat(l1) - flat(own), atol=1e-5, rtol=1e-4)
        assert (weights > -1e-4).all()
        total = float(weights.sum())
        assert abs(total) < 1e-3 or abs(total - 1) < 1e-3
        moved += total > 0.5
    assert moved


def flat(state):
    return torch.cat([v.double().flatten() for v in state.values() if v.is_floating_point()])


def test_distances_are_over_parameters_only():
    """Models that differ in their running statistics alone are at distance 0: score 0."""
    trainer = federate(NormNet("sgd"), toy_data([24, 24]), [FedFomo()], max_rounds=1)
    server, callback = trainer.server, trainer.server.callbacks.find(FedFomo)
    with open_client(
        trainer.federation.engine.runner, server.message(Job("0", work=0)), trainer.store.get("0"), evaluating=True
    ) as client:
        own = client.state["FedFomo"]["own"]
        other = own | {"net.1.running_mean": own["net.1.running_mean"] + 1.0}
        nearer = own | {"net.3.bias": own["net.3.bias"] + 0.01}
        found = callback.scores(client, own, {"0": other, "1": nearer})
        assert found["0"] == 0.0
        expected = (client.loss(own, "val") - client.loss(nearer, "val")) / (0.01 * math.sqrt(3))
        assert found["1"] == pytest.approx(expected, rel=1e-3)


def test_without_validation_data_training_data_decide():
    trainer = federate(Quadratic(lr=0.3), quadratic_data(A, B), [FedFomo(num_models=3)], max_rounds=3)
    assert (trainer.server.state["FedFomo"]["P"] != 0).sum() >= 6


# -- what travels ----------------------------------------------------------------------------------------------------


def test_the_wire_and_who_is_sent():
    module = Toy("sgd")
    size = 4 * sum(p.numel() for p in module.parameters())
    trainer, spy = spied(module, toy_data([24] * 4), [FedFomo(num_models=2)], max_rounds=3)
    for message in spy.messages:
        assert message.state == {}
        models = message.extras["FedFomo"]["models"]
        assert len(models) == (0 if message.round == 0 else 2)
        assert message.client not in models  # nobody downloads what it has
        for place, model in models.items():
            same(model, spy.of_round(message.round - 1)[NAMES[int(place)]].state)
    assert trainer.server.costs.bytes_down == 2 * 4 * 2 * size
    assert trainer.server.costs.bytes_up == 3 * 4 * size + 2 * 4 * 2 * 16


def test_preferences_choose_and_exploration_ends():
    callback = FedFomo(num_models=1, epsilon=0.5, epsilon_decay=0.25)
    trainer = federate(Quadratic(), quadratic_data(A, B), [callback], max_rounds=1)
    server = trainer.server
    server.state["FedFomo"]["P"] = torch.tensor(
        [[0, 1, 2, 3], [3, 0, 1, 2], [0.1, 0.3, 0, 0.2], [-3, -1, -2, 0]], dtype=torch.float64
    )
    best = {"0": "3", "1": "0", "2": "1", "3": "1"}
    for client, other in best.items():
        assert callback.candidates(server, client, explore=False) == [other]
    shares = {}
    for number in (0, 1, 2, 50):
        server.round, other = number, 0
        for seed in range(200):
            server.blueprint.settings.seed = seed
            other += callback.candidates(server, "0", explore=True) != ["3"]
        shares[number] = other / 200
    assert 0.24 < shares[0] < 0.42  # half the time at random, of which a third is the best anyway
    assert 0.08 < shares[1] < 0.27
    assert shares[2] == shares[50] == 0.0


def test_equal_preferences_are_drawn_by_lot():
    trainer = federate(Quadratic(), quadratic_data(A, B), [FedFomo(num_models=1)], max_rounds=1)
    server, seen = trainer.server, set()
    callback = server.callbacks.find(FedFomo)
    for seed in range(30):
        server.blueprint.settings.seed = seed
        seen.update(callback.candidates(server, "1", explore=False))
    assert seen == {"0", "2", "3"}


def test_only_the_last_rounds_models_are_eligible_and_absent_clients_stay():
    trainer, spy = spied(Toy("sgd"), toy_data([24] * 4), [FedFomo(num_models=3)], max_rounds=5, participation=2)
    for message in spy.messages:
        if message.round:
            uploaded = set(spy.of_round(message.round - 1)) - {message.client}
            assert {NAMES[int(place)] for place in message.extras["FedFomo"]["models"]} == uploaded
    for number in range(1, 5):
        for client in NAMES:
            if client not in spy.of_round(number) and spy.records[number][client].visits:
                assert spy.records[number][client] is spy.records[number - 1][client]
    assert set(trainer.server.state["FedFomo"]["models"]) == set(spy.of_round(4))


def test_private_entries_stay_private():
    _trainer, spy = spied(Toy("sgd"), toy_data(), [FedPer(), FedFomo()], max_rounds=3)
    body = {"net.0.weight", "net.0.bias"}
    for update in spy.updates:
        assert set(update.state) == body
    for message in spy.messages:
        for model in message.extras["FedFomo"]["models"].values():
            assert set(model) == body
    for client in NAMES[:3]:
        assert set(spy.records[-1][client].personal) == {"net.3.weight", "net.3.bias"}


def test_there_is_no_global_model():
    trainer = federate(Toy("sgd"), toy_data(), [FedFomo()], max_rounds=2)
    with pytest.raises(ValueError, match="no global model"):
        trainer.module()


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_server_optimizer_is_refused_and_a_common_anchor_is_missed():
    with pytest.raises(ValueError, match=r"FedFomo keeps several models.*, and FedAdam .*Remove"):
        make_trainer(None, [FedFomo(), FedAdam()]).fit(Toy(), datamodule=toy_data())
    with pytest.warns(UserWarning, match="no anchor that FedProx"):
        federate(Toy(), toy_data(), [FedFomo(), FedProx()], max_rounds=1)


@pytest.mark.parametrize(
    "options", [{"num_models": -1}, {"epsilon": 1.5}, {"epsilon_decay": -0.1}, {"baseline": "global"}]
)
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=rf"FedFomo got .*{next(iter(options))}="):
        FedFomo(**options)
