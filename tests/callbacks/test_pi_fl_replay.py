"""PI-FL replayed round by round in plain torch (sheet B 1.8): who trains, models, accounts, contributions, personal models.

Only who takes part and whom the dice choose is taken from the run.
"""

from __future__ import annotations

from itertools import combinations, permutations
from math import nan
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import PIFL
from fedlightning.callbacks.shared.contributions import Ledger
from fedlightning.contract.messages import Update
from fedlightning.engines.attempts import TooFewClientsError
from fedlightning.options import FailurePolicy
from fedlightning.tensors import module_state
from tests.callbacks.common import Breaks, Plain, fixed_data, mean_state, start_of
from tests.helpers import NormNet, close, federate, same, spied, toy_data

CLOSE = 1e-6
"""Scores are numbers of single precision."""
GENEROUS = {"num_clusters": 2, "importance": "matching", "threshold": 0.2, "tokens": 4.0}
POOR = {"num_clusters": 3, "importance": "accuracy", "threshold": "mean"}
POOR |= {"tokens": 1.5, "price": 0.7, "eta": 1.0, "gamma": 1.0}


class Replay:
    """A run of PI-FL by hand."""

    def __init__(self, trainer, spy, data, start, options, broken):
        self.spy, self.data, self.broken, self.options = spy, data, broken, options
        self.clients = list(trainer.server.clients)
        self.models = {f"cluster {k + 1}": dict(start) for k in range(options["num_clusters"])}
        self.price = options.get("price", 1.0)
        self.tokens = dict.fromkeys(self.clients, options["tokens"])
        self.best, self.rows = {}, []
        self.worth = {cluster: {} for cluster in self.models}  # all Shapley values of a client
        self.short = 0  # bids that were not paid for want of tokens

    def right(self, state, client, split):
        x, y = self.data.tensors[client][split]
        return float((Plain(state)(x).argmax(-1) == y).float().mean())

    def weights(self, client):
        if self.options["importance"] == "accuracy":
            return [self.right(state, client, "train") for state in self.models.values()]
        x, y = self.data.tensors[client]["train"]
        losses = [F.cross_entropy(Plain(state)(x), y, reduction="none") for state in self.models.values()]
        nearest = torch.stack(losses).argmin(0)
        return [float((nearest == k).double().mean()) for k in range(len(losses))]

    def bids(self, client):
        v, threshold = self.weights(client), self.options["threshold"]
        if threshold == "mean":
            return {c for c, one in zip(self.models, v, strict=True) if one > sum(v) / len(v) - CLOSE}
        return {c for c, one in zip(self.models, v, strict=True) if one > threshold + CLOSE}

    def can_pay(self, client):
        return self.tokens[client] > self.price - 1e-9

    def pay_and_check(self, number, available, chosen):
        """The best bidders who can pay come first; the rest of the slots are anybody's who can."""
        bids = {client: self.bids(client) for client in available} if number else {}
        turn = number % len(self.models)
        for cluster in [*self.models][turn:] + [*self.models][:turn]:
            if number:
                willing = [c for c in available if cluster in bids[c]]
                self.short += sum(not self.can_pay(c) for c in willing)
                worth = {c: self.worth[cluster].get(c, []) for c in willing}
                rank = lambda c: (-round(sum(worth[c]) / max(len(worth[c]), 1), 5), len(worth[c]), int(c))  # noqa: E731,B023
                first = sorted(filter(self.can_pay, willing), key=rank)[:2]
                others = [c for c in available if c not in first and self.can_pay(c)]
                assert set(first) <= set(chosen[cluster]), (number, cluster)
                assert set(chosen[cluster]) - set(first) <= set(others)
                assert len(chosen[cluster]) == len(first) + min(1, len(others))
            for client in chosen[cluster]:
                self.tokens[client] -= self.price
        assert number or max(map(len, chosen.values())) <= 3

    def round(self, number):
        messages = [m for m in self.spy.messages if m.round == number]
        chosen = {k: [m.client for m in messages if (m.model, m.tag, m.work) == (k, "", None)] for k in self.models}
        self.pay_and_check(number, [m.client for m in messages if m.tag == "bid"], chosen)
        self.models |= {cluster: self.settle(number, cluster, some) for cluster, some in chosen.items() if some}

    def settle(self, number, cluster, chosen):
        heard = [client for client in chosen if client != self.broken]
        for client in set(chosen) - set(heard):
            self.tokens[client] += self.price
            self.rows.append((number + 1, cluster, client, self.price, 0.0, None))
        before = self.models[cluster]
        if not heard:
            return before
        sizes = {client: len(self.data.tensors[client]["train"][0]) for client in heard}
        trained = {client: Plain(before).trained(*self.data.tensors[client]["train"]) for client in heard}
        values = {}
        for size in range(len(heard) + 1):
            for some in map(frozenset, combinations(heard, size)):
                model = mean_state([(sizes[c], trained[c]) for c in heard if c in some]) if some else before
                values[some] = sum(self.right(model, client, "val") for client in heard) / len(heard)
        shapley = dict.fromkeys(heard, 0.0)
        orders = list(permutations(heard))
        for order in orders:
            for place, client in enumerate(order):
                gain = values[frozenset(order[: place + 1])] - values[frozenset(order[:place])]
                shapley[client] += gain / len(orders)
        accuracy, best = values[frozenset(heard)], self.best.setdefault(cluster, values[frozenset()])
        eta, gamma = self.options.get("eta", 0.5), self.options.get("gamma", 0.1)
        better = max(0.0, (accuracy - best) / best)
        refund = self.price * eta * (gamma - min(gamma, better)) / gamma
        self.best[cluster] = max(best, accuracy)
        for client in heard:
            self.worth[cluster].setdefault(client, []).append(shapley[client])
        keys = {c: (round(shapley[c], 5), len(self.worth[cluster][c])) for c in heard}
        part = (self.price - refund) * len(heard) / sum(range(1, len(heard) + 1))
        for client in heard:
            ties = sum(key == keys[client] for key in keys.values())
            rank = sum(key < keys[client] for key in keys.values()) + (ties + 1) / 2
            self.tokens[client] += refund + rank * part
            self.rows.append((number + 1, cluster, client, refund, rank * part, shapley[client]))
        return mean_state([(sizes[client], trained[client]) for client in heard])


@pytest.mark.parametrize("options", [GENEROUS, POOR], ids=["bids for several", "tokens run out"])
def test_a_federation_by_hand(options):
    """Five of six clients take part, one of which breaks whenever it trains; equal contributions are frequent."""
    data, start = fixed_data([24, 16, 16, 8, 8, 20], broken="4"), start_of(Breaks)
    algorithm = PIFL(monitor="val_acc", performance_slots=2, random_slots=1, **options)
    with pytest.warns(UserWarning, match="'4' failed"):
        trainer, spy = spied(start, data, [algorithm], max_rounds=5, participation=5)
    replay, own = Replay(trainer, spy, data, module_state(start), options, "4"), trainer.server.state["PIFL"]
    for number in range(5):
        replay.round(number)
        assert spy.states[number]["PIFL"]["balances"] == pytest.approx(replay.tokens, abs=1e-9)
    found = {(row["round"], row["cluster"], row["client"]): row for row in own["ledger"]}
    assert set(found) == {row[:3] for row in replay.rows}
    for *place, refund, reward, worth in replay.rows:
        row = found[tuple(place)]
        assert (row["refunded"], row["rewarded"]) == pytest.approx((refund, reward), abs=1e-9)
        assert row.get("contribution") == (None if worth is None else pytest.approx(worth, abs=1e-6))
    assert own["best"] == pytest.approx(replay.best, abs=1e-6)
    for cluster, values in replay.worth.items():
        assert own["taken_part"][cluster] == {client: len(some) for client, some in values.items()}
        for client, some in values.items():
            assert own["contribution"][cluster][client] == (pytest.approx(sum(some) / len(some), abs=1e-6), len(some))
    for cluster, state in replay.models.items():
        for name, value in state.items():
            torch.testing.assert_close(trainer.server.models[cluster][name], value, atol=1e-9, rtol=0)
    for client in set(replay.clients) - {"4"}:
        mixed = mean_state(list(zip(replay.weights(client), replay.models.values(), strict=True)))
        for name, value in module_state(trainer.module(client)).items():
            torch.testing.assert_close(value, mixed[name], atol=1e-9, rtol=0)
    assert replay.short > 0 if options is POOR else replay.short == 0


def test_a_score_on_all_data_is_no_client_that_contributed():
    data = fixed_data([16, 16], broken="1")
    algorithm = PIFL(monitor="val_acc", utility="pooled", num_clusters=1, performance_slots=None)
    with pytest.raises(TooFewClientsError, match="1 of 2 clients contributed"):
        federate(start_of(Breaks), data, [algorithm], max_rounds=1, failures=FailurePolicy(min_clients=2))


def test_optimizers_that_go_on_from_one_cluster_to_the_next_are_refused():
    with pytest.raises(
        ValueError, match=r"PIFL lets a client train several clusters' models .* optimizer_state='reset'"
    ):
        federate(start_of(Breaks), toy_data(), [PIFL(monitor="val_acc")], optimizer_state="keep")
    one = PIFL(num_clusters=1, monitor="val_acc")
    federate(start_of(Breaks), fixed_data([8, 8]), [one], optimizer_state="keep", max_rounds=1)


def alone(**options):
    """One cluster with slots for all."""
    return PIFL(**{"monitor": "val_acc", "num_clusters": 1, "performance_slots": None} | options)


def test_cosines_are_those_with_the_mean_step():
    data, start = fixed_data([24, 16, 8]), start_of(Breaks)
    trainer = federate(start, data, [alone(utility="gradient", ledger=False)], max_rounds=1)
    before, sizes = module_state(start), {"0": 24, "1": 16, "2": 8}
    after = {client: Plain(before).trained(*data.tensors[client]["train"]) for client in sizes}
    after["mean"] = mean_state([(size, after[client]) for client, size in sizes.items()])
    steps = {key: torch.cat([(state[n] - before[n]).flatten() for n in before]) for key, state in after.items()}
    expected = {c: float(F.cosine_similarity(steps[c], steps["mean"], dim=0)) for c in sizes}
    found = trainer.server.state["PIFL"]["contribution"]["cluster 1"]
    assert {client: mean for client, (mean, _) in found.items()} == pytest.approx(expected, abs=1e-9)


def test_the_first_round_is_free_if_asked():
    _, spy = spied(start_of(Breaks), fixed_data([8, 8]), [alone(charge_first_round=False)], max_rounds=2)
    first, second = (state["PIFL"] for state in spy.states)
    assert first["ledger"] == [] and set(first["balances"].values()) == {first["tokens"]}
    assert {entry["round"] for entry in second["ledger"]} == {2}
    assert set(second["taken_part"]["cluster 1"].values()) == {2}


def test_only_clients_with_validation_data_judge():
    data, start = fixed_data([8, 16, 8]), start_of(Breaks)
    data.tensors["1"]["val"] = tuple(t[:0] for t in data.tensors["1"]["val"])
    trainer = federate(start, data, [alone()], max_rounds=1)
    scores = []
    for state in (module_state(start), trainer.server.models["cluster 1"]):
        judged = [(Plain(state)(x).argmax(-1) == y).float().mean() for x, y in (data.tensors[c]["val"] for c in "02")]
        scores.append(float(sum(judged)) / 2)
    assert trainer.server.state["PIFL"]["best"]["cluster 1"] == pytest.approx(max(scores), abs=1e-6)


def test_groups_of_the_pre_training_hold_for_one_round():
    """Without bids clients are dealt anew afterwards."""
    algorithm = PIFL(monitor="val_acc", pretrain_rounds=1, incentive=False)
    trainer, spy = spied(start_of(Breaks), fixed_data([8] * 6), [algorithm], max_rounds=6)
    rounds = [
        {(m.client, m.model) for m in spy.messages if (m.round, m.tag, m.work) == (r, "", None)} for r in range(6)
    ]
    assert rounds[1] == set(trainer.server.state["PIFL"]["groups"].items())
    assert any(later != rounds[1] for later in rounds[2:])


def test_weights_on_validation_data_and_the_model_of_stage_g():
    data = fixed_data([16, 8, 16, 8])
    trainer = federate(start_of(Breaks), data, [PIFL(monitor="val_acc", split="val")], max_rounds=2)
    own, models = trainer.server.state["PIFL"], [trainer.server.models[f"cluster {k}"] for k in (1, 2)]
    assert own["tokens"] == 2 * 2 * 1.0 * 2  # 2 K price rounds
    weights = own["importance"] | {"0": torch.tensor([0.2, 0.7])}
    trainer.server.state["PIFL"] = own | {"importance": weights}
    for client in trainer.server.clients:
        x, y = data.tensors[client]["val"]
        v = [float((Plain(state)(x).argmax(-1) == y).float().mean()) for state in models]
        close(module_state(trainer.module(client)), mean_state(list(zip(v, models, strict=True))), atol=1e-9, rtol=0)
        best = models[int(weights[client].argmax())]
        same(module_state(trainer.server.global_module(client)), best)


def test_statistics_are_not_scaled_by_the_equation_as_printed():
    torch.manual_seed(0)
    module, data = NormNet(), toy_data([16, 16])
    whole, printed = (
        module_state(federate(module, data, [PIFL(monitor="val_acc", normalize=n)], max_rounds=1).module("0"))
        for n in (True, False)
    )
    assert torch.equal(whole["net.1.running_var"], printed["net.1.running_var"])
    assert not torch.allclose(whole["net.0.weight"], printed["net.0.weight"])


class Desk:
    """What the server's steps of a round need of a server, without a federation."""

    def __init__(self, own=None):
        self.models, self.state, self.model = {}, {"PIFL": own or {}}, {"w": torch.zeros(1)}
        self.round, self.blueprint = 0, SimpleNamespace(settings=SimpleNamespace(seed=0))

    def weight(self, update):
        return 1.0

    def rng(self, *address):
        return torch.Generator()

    def seed_of(self, source):
        return 0


def answer(client, steps=3, error=None, **extras):
    state = {"w": torch.full((1,), float(ord(client)))}
    return Update(0, client, state, {"PIFL": extras} if extras else {}, contributed=steps > 0, error=error)


def carried_out(steps, reply):
    """Carry out steps of the server; return their result and all jobs that they asked for."""
    asked = []
    try:
        jobs = next(steps)
        while True:
            asked += jobs
            jobs = steps.send([reply(job) for job in jobs])
    except StopIteration as end:
        return end.value, asked


def test_a_client_without_a_step_gets_its_price_back_and_is_no_player():
    """All its steps were skipped by the gradient scaler: it has sent back what it got."""
    ledger = Ledger(dict.fromkeys("abc", 2.0), {"cluster 1": 0.0})
    for client in "abc":
        ledger.pay(client, "cluster 1", 1.0)
    found = {"a": answer("a"), "b": answer("b", steps=0), "c": answer("c", error="NaN")}
    steps = alone()._train(ledger, {"cluster 1": list("abc")})
    answers, jobs = carried_out(steps, lambda job: found[job.client])
    assert [update.client for update in answers["cluster 1"]] == ["a"] and all(job.keep for job in jobs)
    assert ledger.balances == {"a": 1.0, "b": 2.0, "c": 2.0} and ledger.pools == {"cluster 1": 1.0}


def test_a_client_without_a_step_is_not_grouped_by_what_it_knows():
    found = {"a": answer("a"), "b": answer("b", steps=0), "c": answer("c", error="NaN"), "d": answer("d")}
    server, scores = Desk(), {"f1": torch.ones(3)}

    def reply(job):
        return answer("z", **scores) if job.tag == "classes" else found[job.client]

    _, jobs = carried_out(PIFL(pretrain_rounds=1)._pretrain(server, list("abcd")), reply)
    assert sum(job.tag == "classes" for job in jobs) == 2 and "trial" not in server.models
    assert set(server.state["PIFL"]["groups"]) == {"a", "d"}


@pytest.mark.parametrize("utility", ["local", "pooled"])
def test_a_coalition_that_nobody_can_score_is_worth_nothing(utility):
    """v(nobody) = 0.5, v(a) = 0.7, v(b) unknown, v(ab) = 0.8."""
    worths = {ord("a"): 0.7, ord("b"): nan}
    server = Desk()

    def reply(job):
        return answer("z", utility=worths[int(server.models["trial"]["w"])])

    def shares(known):
        steps = alone(utility=utility)._contributions(
            server, {"w": torch.zeros(1)}, {"w": torch.ones(1)}, [answer("a"), answer("b")], known
        )
        return carried_out(steps, reply)

    found, jobs = shares((0.5, 0.8))
    assert found.exact and found.evaluations == 2 and len(jobs) == (2 if utility == "pooled" else 4)
    assert found.values == pytest.approx({"a": 0.25, "b": 0.05}, abs=1e-12)
    for known in ((nan, 0.8), (0.5, nan)):
        assert shares(known)[0].values == {"a": 0.0, "b": 0.0} and shares(known)[1] == []


def test_who_cannot_tell_does_not_count_in_a_score():
    told = {"a": answer("a", utility=0.4), "b": answer("b", utility=nan), "c": answer("c", error="gone")}
    told |= {"d": answer("d", utility=0.8)}
    for players, expected in (("abcd", 0.6), ("bc", nan), ("a", 0.4)):
        steps = alone()._scores(Desk(), [{"w": torch.zeros(1)}], list(players))
        (found,), _ = carried_out(steps, lambda job: told[job.client])
        assert found == pytest.approx(expected, nan_ok=True)
