"""PI-FL: sheet B 1.8. The accounts are tested in test_tokens.py, the values in test_shapley.py."""

from __future__ import annotations

import csv
import math
from collections import Counter
from itertools import combinations, permutations

import pytest
import torch

from fedlightning.callbacks import FLIU, MOON, PIFL, Ditto, FedAvg, FedPer
from fedlightning.callbacks.shared.contributions import shares
from fedlightning.tensors import module_state
from tests.callbacks.common import cut_and_resumed
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import NormNet, Toy, ToyData, federate, global_state, same, spied, toy_data

LOSS = {"monitor": "val_loss", "importance": "matching", "threshold": 0.2}
CASES = {
    "PIFL": Case(PIFL(performance_slots=2, random_slots=1, **LOSS), neutral=PIFL(num_clusters=1, **LOSS)),
    "PIFL all slots": Case(PIFL(**LOSS), neutral=PIFL(num_clusters=1, **LOSS)),
    "PIFL pooled": Case(PIFL(utility="pooled", **LOSS), skip=NO_PLAIN_FORM),
    "PIFL dealt": Case(
        PIFL(utility="gradient", incentive=False, importance="matching", monitor="val_loss"), skip=NO_PLAIN_FORM
    ),
}
STATE = ("balances", "best", "contribution", "evaluations", "groups", "importance", "ledger", "taken_part", "tokens")
KEPT = {"PIFL": Kept("PIFL", server=STATE, models=("global", "cluster 1", "cluster 2"), options={"monitor": "val_acc"})}


def pifl(**options):
    return PIFL(**{"monitor": "val_acc", "performance_slots": 2, "random_slots": 1} | options)


def own(trainer):
    return trainer.server.state["PIFL"]


def everyone(server):
    return sum(own for own in server["balances"].values())


def trained(spy, number):
    """Who trained which cluster in a round."""
    return [(m.client, m.model) for m in spy.messages if m.round == number and m.tag == "" and m.work is None]


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_one_cluster_with_slots_for_all_is_fedavg(make):
    module, data = make(), toy_data()
    plain = federate(module, data, [FedAvg()], max_rounds=3)
    ours = federate(module, data, [pifl(num_clusters=1, threshold=-1, performance_slots=None)], max_rounds=3)
    same(ours.server.models["cluster 1"], global_state(plain))
    for client in ("0", "1", "2"):
        same(module_state(ours.module(client)), global_state(plain))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"ledger": False}, {"tokens": 1e9}, pytest.param({"price": 0.0}, marks=pytest.mark.slow)]
)
def test_the_ledger_does_not_touch_training(options):
    """Unlimited balances, no accounts at all, no price: the same bits."""
    module, data = Toy("adam", dropout=0.2), toy_data([24, 16, 16, 8])
    one = federate(module, data, [pifl()], max_rounds=4)
    other = federate(module, data, [pifl(**options)], max_rounds=4)
    for key, model in one.server.models.items():
        same(model, other.server.models[key])
    assert bool(own(other)["ledger"]) == ("ledger" not in options)


def test_clients_without_tokens_rest():
    with_tokens = federate(Toy(), toy_data([8] * 4), [pifl(tokens=1.0, eta=0.0)], max_rounds=4)
    assert min(own(with_tokens)["balances"].values()) >= 0
    assert everyone(own(with_tokens)) == pytest.approx(4.0, abs=1e-9)
    nobody = federate(Toy(), toy_data([8] * 4), [pifl(tokens=0.5)], max_rounds=2)
    assert own(nobody)["ledger"] == [] and nobody.server.costs.steps == 0


@pytest.mark.slow
def test_without_incentives_clients_are_dealt_at_random():
    _, spy = spied(Toy(), toy_data([8] * 6), [pifl(incentive=False)], max_rounds=6)
    assert not any(m.tag == "bid" for m in spy.messages)
    of_client = [tuple(dict(trained(spy, number)).get("0") for number in range(6))]
    assert len(set(of_client[0])) > 1  # not always one cluster
    for number in range(6):
        assert Counter(model for _, model in trained(spy, number)) == {"cluster 1": 3, "cluster 2": 3}


# -- slots and accounts ------------------------------------------------------------------------------------------------


def test_slots_balances_and_conservation_in_every_round():
    _trainer, spy = spied(Toy(), toy_data([8] * 7), [pifl(num_clusters=3, tokens=6.0)], max_rounds=6, participation=6)
    for number, state in enumerate(spy.states):
        jobs = trained(spy, number)
        assert len(jobs) == len(set(jobs)), "a client twice in a cluster"
        assert max(Counter(model for _, model in jobs).values()) <= 3
        balances = state["PIFL"]["balances"]
        assert sum(balances.values()) == pytest.approx(7 * 6.0, abs=1e-9) and min(balances.values()) >= 0
        entries = [entry for entry in state["PIFL"]["ledger"] if entry["round"] == number + 1]
        assert {(entry["client"], entry["cluster"]) for entry in entries} == set(jobs)
        assert sum(e["paid"] for e in entries) == pytest.approx(sum(e["refunded"] + e["rewarded"] for e in entries))
        before = spy.states[number - 1]["PIFL"]["balances"] if number else dict.fromkeys(balances, 6.0)
        for client, balance in balances.items():
            moved = sum(e["refunded"] + e["rewarded"] - e["paid"] for e in entries if e["client"] == client)
            assert balance == pytest.approx(before[client] + moved, abs=1e-9)


def test_performance_slots_go_to_bidders_by_contribution_then_participation():
    trainer, spy = spied(Toy(), toy_data([8] * 7), [pifl(random_slots=0, threshold=-1)], max_rounds=5)
    for number in range(1, 5):
        before = spy.states[number - 1]["PIFL"]
        for cluster in ("cluster 1", "cluster 2"):
            worth, counts = before["contribution"][cluster], before["taken_part"][cluster]
            order = sorted(trainer.server.clients, key=lambda c: (-worth.get(c, (0, 0))[0], counts.get(c, 0), int(c)))
            assert {client for client, model in trained(spy, number) if model == cluster} == set(order[:2])


class OneFails(Toy):
    """Raises on the batches of one client."""

    def training_step(self, batch, batch_idx):
        if bool((batch[0] > 1e3).any()):
            raise RuntimeError("broken data")
        return super().training_step(batch, batch_idx)


def test_who_does_not_answer_gets_the_price_back_and_no_reward():
    data = toy_data([8] * 4)
    data.tensors["2"]["train"][0][:] = 1e4
    with pytest.warns(UserWarning, match="'2' failed"):
        trainer = federate(OneFails(), data, [pifl(performance_slots=None)], max_rounds=2)
    mine = [entry for entry in own(trainer)["ledger"] if entry["client"] == "2"]
    assert mine and all((e["paid"], e["refunded"], e["rewarded"]) == (1.0, 1.0, 0.0) for e in mine)
    assert everyone(own(trainer)) == pytest.approx(4 * own(trainer)["tokens"], abs=1e-9)
    assert "2" not in own(trainer)["taken_part"]["cluster 1"]


@pytest.mark.slow
def test_the_refund_follows_the_best_accuracy_so_far():
    trainer = federate(Toy(), toy_data([16] * 4), [pifl(num_clusters=1, performance_slots=None, eta=0.5)], max_rounds=4)
    for number in range(1, 5):
        entries = [entry for entry in own(trainer)["ledger"] if entry["round"] == number]
        assert len({entry["refunded"] for entry in entries}) == 1 and 0 <= entries[0]["refunded"] <= 0.5
        rewards = sorted(entry["rewarded"] for entry in entries)
        assert sum(rewards) == pytest.approx(4 * (1 - entries[0]["refunded"]), abs=1e-9)
    none = federate(Toy(), toy_data([16] * 4), [pifl(eta=0.0)], max_rounds=2)
    assert all(entry["refunded"] == 0 for entry in own(none)["ledger"])
    all_of_it = federate(Toy(), toy_data([16] * 4), [pifl(eta=1.0, gamma=math.inf)], max_rounds=2)
    assert all(entry["refunded"] == 1 and entry["rewarded"] == 0 for entry in own(all_of_it)["ledger"])


# -- contributions -----------------------------------------------------------------------------------------------------


def accuracy(state, data, players):
    model = Toy()
    model.load_state_dict(state)
    scores = []
    for client in players:
        x, y = data.tensors[client]["val"]
        scores.append(float((model(x).argmax(-1) == y).float().mean()))
    return sum(scores) / len(scores)


@pytest.mark.parametrize("utility", ["local", "pooled"])
def test_contributions_are_shapley_values_of_the_rounds_models(utility):
    data = toy_data([24, 40, 16])
    trainer, spy = spied(Toy(), data, [pifl(num_clusters=1, performance_slots=None, utility=utility)], max_rounds=1)
    sent = {update.client: update for update in spy.updates if update.state}
    players = sorted(sent)
    worth = {frozenset(): accuracy(module_state(spy_start(spy)), data, players)}
    for size in range(1, 4):
        for some in combinations(players, size):
            n = sum(sent[c].num_samples for c in some)
            names = sent[players[0]].state
            mixed = {k: sum(sent[c].num_samples * sent[c].state[k].double() for c in some) / n for k in names}
            worth[frozenset(some)] = accuracy({k: v.float() for k, v in mixed.items()}, data, players)
    expected = dict.fromkeys(players, 0.0)
    for order in permutations(players):
        for place, player in enumerate(order):
            expected[player] += (worth[frozenset(order[: place + 1])] - worth[frozenset(order[:place])]) / 6
    found = {entry["client"]: entry["contribution"] for entry in own(trainer)["ledger"]}
    assert found == pytest.approx(expected, abs=1e-6)
    assert sum(found.values()) == pytest.approx(worth[frozenset(players)] - worth[frozenset()], abs=1e-6)
    assert own(trainer)["evaluations"] == 6


def spy_start(spy):
    model = Toy()
    model.load_state_dict(next(m for m in spy.messages if m.tag == "" and m.work is None).state)
    return model


def test_contributions_by_cosines_score_nothing():
    trainer, spy = spied(Toy(), toy_data([8] * 4), [pifl(utility="gradient", ledger=False)], max_rounds=2)
    assert not any(m.tag == "utility" for m in spy.messages)
    values = [mean for found in own(trainer)["contribution"].values() for mean, _ in found.values()]
    assert values and all(-1 <= value <= 1 for value in values)


# -- bids and the personal model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "weights", "bids"),
    [
        ("mean", [0.9, 0.4], [0]),
        ("mean", [0.5, 0.5], [0, 1]),
        (0.2, [0.7, 0.3], [0, 1]),
        (0.3, [0.7, 0.3], [0]),
        (0.9, [0.7, 0.3], []),
        (-1, [0.0, 0.0], [0, 1]),
    ],
)
def test_bids(threshold, weights, bids):
    assert PIFL(threshold=threshold).bids(torch.tensor(weights, dtype=torch.float64)) == bids


@pytest.mark.parametrize("importance", ["accuracy", "matching"])
def test_weights_and_the_personal_model(importance):
    data = toy_data([24, 40, 16])
    trainer = federate(NormNet(), data, [pifl(importance=importance)], max_rounds=2)
    models = [trainer.server.models[f"cluster {k}"] for k in (1, 2)]
    for client in ("0", "1", "2"):
        x, y = data.tensors[client]["train"]
        logits = []
        for state in models:
            net = NormNet().eval()
            net.load_state_dict(state)
            logits.append(net(x).detach())
        right = torch.stack([found.argmax(-1) == y for found in logits]).double().mean(1)
        losses = torch.stack([torch.nn.functional.cross_entropy(found, y, reduction="none") for found in logits])
        matching = torch.bincount(losses.argmin(0), minlength=2).double() / len(y)
        v = right if importance == "accuracy" else matching
        state = module_state(trainer.module(client))
        for name, value in models[0].items():
            if value.is_floating_point():
                mean = sum(w * model[name].double() for w, model in zip(v, models, strict=True)) / v.sum()
                assert torch.allclose(state[name].double(), mean, atol=1e-6), name


def test_shares_sum_to_one_and_nothing_is_everything():
    assert shares(torch.tensor([0.3, 0.6])) == pytest.approx([1 / 3, 2 / 3])
    assert shares(torch.tensor([1.0, 0.0])) == [1.0, 0.0]
    assert shares(torch.zeros(4)) == [0.25] * 4


def test_the_equation_as_printed_scales_the_parameters():
    module = Toy()
    whole, printed = (
        federate(module, toy_data(), [pifl(normalize=normalize)], max_rounds=1) for normalize in (True, False)
    )
    a, b = (module_state(trainer.module("0"))["net.0.weight"] for trainer in (whole, printed))
    x, y = toy_data().tensors["0"]["train"]
    right = 0.0
    for k in (1, 2):
        module.load_state_dict(whole.server.models[f"cluster {k}"])
        right += float((module(x).argmax(-1) == y).float().mean())
    assert torch.allclose(b, right * a, atol=1e-5) and abs(right - 1) > 0.05


def test_a_client_without_data_neither_bids_nor_pays():
    data = toy_data({"0": 16, "1": 16, "2": 0, "3": 16})
    trainer = federate(Toy(), data, [pifl(performance_slots=None)], max_rounds=2)
    assert "2" not in {entry["client"] for entry in own(trainer)["ledger"]} | set(own(trainer)["importance"])
    assert not trainer.server.failures


def test_a_client_without_validation_data_takes_part():
    data = toy_data([16] * 3)
    data.tensors["1"]["val"] = tuple(t[:0] for t in data.tensors["1"]["val"])
    trainer = federate(Toy(), data, [pifl(performance_slots=None)], max_rounds=2)
    assert not trainer.server.failures
    assert "1" in {entry["client"] for entry in own(trainer)["ledger"]}


# -- pre-training ------------------------------------------------------------------------------------------------------


def halves():
    """Two clients know classes 0 and 1, two know 2 and 0 in other places."""
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for number in range(4):
        classes = (0, 1) if number % 2 else (2, 2)
        parts = {}
        for split, count in (("train", 32), ("val", 12), ("test", 4)):
            y = torch.tensor([classes[i % 2] for i in range(count)])
            x = torch.randn(count, 6, generator=draw) * 0.2
            x[torch.arange(count), y] += 2
            parts[split] = (x, y)
        tensors[str(number)] = parts
    return ToyData(tensors)


def test_pre_training_groups_clients_by_the_classes_they_know():
    trainer, spy = spied(Toy(), halves(), [pifl(pretrain_rounds=2)], max_rounds=3, local_epochs=4)
    groups = own(trainer)["groups"]
    assert groups["0"] == groups["2"] != groups["1"] == groups["3"]
    assert set(trained(spy, 2)) == {(client, cluster) for client, cluster in groups.items()}
    assert {entry["round"] for entry in own(trainer)["ledger"]} == {3}
    plain = federate(spy.trainer.server.module, halves(), [FedAvg()], max_rounds=2, local_epochs=4)
    starts = [m.state for m in spy.messages if m.round == 2 and m.tag == "" and m.work is None]
    for start in starts:
        same(start, global_state(plain))


def test_pre_training_that_never_ends_is_refused():
    with pytest.raises(ValueError, match="2 rounds of pre-training and there are 2 in all"):
        federate(Toy(), toy_data(), [pifl(pretrain_rounds=2)], max_rounds=2)


# -- files, resume, engines, others ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_last_token(tmp_path):
    make = lambda: [pifl()]  # noqa: E731
    whole, _cut, again = cut_and_resumed(tmp_path, Toy("adam"), toy_data([16, 8, 8, 8]), make, max_rounds=3)
    for key in ("balances", "ledger", "contribution", "best", "evaluations"):
        assert own(whole)[key] == own(again)[key], key
    for key, model in whole.server.models.items():
        same(model, again.server.models[key])
    files = [
        (trainer.run.path / name).read_text() for trainer in (whole, again) for name in ("ledger.csv", "clusters.csv")
    ]
    assert files[:2] == files[2:]
    with (whole.run.path / "ledger.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(own(whole)["ledger"])
    assert (whole.run.path / "figures" / "ledger.png").stat().st_size > 1000
    assert (whole.run.path / "figures" / "clusters.png").stat().st_size > 1000


def test_stacks_of_clients_give_the_same():
    module, data = Toy(), toy_data([16, 16, 8, 8])
    one = federate(module, data, [pifl(threshold=-1)], max_rounds=2)
    other = federate(module, data, [pifl(threshold=-1)], max_rounds=2, engine="vectorized")
    assert own(one)["balances"] == pytest.approx(own(other)["balances"], abs=1e-6)
    for key, model in one.server.models.items():
        for name, value in model.items():
            assert torch.allclose(value, other.server.models[key][name], atol=1e-5)


def test_personal_heads_stay_and_cannot_be_scored_in_one_place():
    _, spy = spied(Toy(), toy_data(), [FedPer(), pifl(num_clusters=1)], max_rounds=2)
    assert all(set(update.state) <= {"net.0.weight", "net.0.bias"} for update in spy.updates)
    with pytest.raises(ValueError, match="some entries stay with the clients"):
        federate(Toy(), toy_data(), [FedPer(), pifl(num_clusters=1, utility="pooled")])


@pytest.mark.parametrize("other", [Ditto(), MOON(), FedPer(), FLIU(weighting="samples")])
def test_what_a_client_keeps_would_train_for_one_cluster_after_the_other(other):
    with pytest.raises(ValueError, match=f"would train in both visits, and {other.key} keeps"):
        federate(Toy(), toy_data(), [pifl(), other])


def test_running_statistics_of_two_clusters_are_not_kept_in_one_place():
    with pytest.raises(ValueError, match=r"'net.1.running_mean', which stays with the client, would follow one after"):
        federate(NormNet(), toy_data(), [pifl()], float_buffers="local")


def test_payment_without_validation_data_is_refused():
    with pytest.raises(ValueError, match="pays by what validation data say"):
        federate(Toy(), toy_data(val=0), [pifl()])


def test_a_metric_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match="needs the metric 'val_accuracy', but validation gives"):
        federate(Toy(), toy_data(), [PIFL()])


@pytest.mark.parametrize(
    "options",
    [
        {"num_clusters": 0},
        {"performance_slots": 0},
        {"random_slots": -1},
        {"importance": "loss"},
        {"threshold": 1.0},
        {"split": "test"},
        {"price": -1.0},
        {"eta": 1.5},
        {"gamma": 0.0},
        {"utility": "loss"},
    ],
)
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"PIFL got {next(iter(options))}="):
        PIFL(**options)
