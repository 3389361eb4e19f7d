"""The ledger of PI-FL: sheet B 1.8.4 and 1.8.11."""

from __future__ import annotations

import csv
import math
import random

import pytest

from fedlightning.callbacks.shared.contributions import COLUMNS, Ledger, contribution_ranks, refund_share, write_ledger


def test_the_oracle():
    ledger = Ledger(dict.fromkeys("abc", 10.0), {"one": 0.0})
    for client in "abc":
        ledger.pay(client, "one", 1.0)
    ledger.refund("one", refund_share(0.525, best=0.5, eta=0.5, gamma=0.1))
    assert ledger.pools["one"] == pytest.approx(2.25, abs=1e-12)
    ledger.reward("one", contribution_ranks({"a": 0.01, "b": 0.02, "c": 0.05}))
    assert ledger.balances == pytest.approx({"a": 9.625, "b": 10.0, "c": 10.375}, abs=1e-12)
    assert [entry["rewarded"] for entry in ledger.entries] == pytest.approx([0.375, 0.75, 1.125], abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_conserved_after_every_step(seed):
    draw = random.Random(seed)
    clients, clusters = [str(i) for i in range(9)], ["one", "two", "three"]
    ledger = Ledger(dict.fromkeys(clients, 3.0), dict.fromkeys(clusters, 0.0))

    def holds():
        assert ledger.total == pytest.approx(27.0, abs=1e-9)
        assert min(ledger.balances.values()) >= 0

    for _ in range(20):
        ledger.entries = []
        chosen = {cluster: draw.sample(clients, 5) for cluster in clusters}
        for cluster in clusters:
            chosen[cluster] = [client for client in chosen[cluster] if ledger.can_pay(client, 0.7)]
            for client in chosen[cluster]:
                ledger.pay(client, cluster, 0.7)
                holds()
        for cluster in clusters:
            gone = chosen[cluster][:1]
            for client in gone:
                ledger.give_back(client, cluster)
                holds()
            answered = chosen[cluster][1:]
            ledger.refund(cluster, draw.random())
            holds()
            pool = ledger.pools[cluster]
            before = dict(ledger.balances)
            ledger.reward(cluster, contribution_ranks({client: draw.choice((0.1, 0.2)) for client in answered}))
            holds()
            if answered:
                assert ledger.pools[cluster] == 0
                assert sum(ledger.balances[c] - before[c] for c in answered) == pytest.approx(pool, abs=1e-9)
            assert all(ledger.balances[c] == before[c] for c in gone)


def test_ranks_pay_in_proportion():
    ledger = Ledger(dict.fromkeys("abcd", 1.0), {"one": 0.0})
    for client in "abcd":
        ledger.pay(client, "one", 1.0)
    ledger.reward("one", contribution_ranks({"a": -0.1, "b": 0.0, "c": 0.1, "d": 0.2}))
    assert [ledger.balances[c] / ledger.balances["a"] for c in "abcd"] == pytest.approx([1, 2, 3, 4])


def test_ties_go_to_those_who_took_part_more_often_and_are_shared_otherwise():
    ranks = contribution_ranks({"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.1}, {"a": 2, "b": 1, "c": 1, "d": 1})
    assert ranks == {"a": 3.0, "b": 1.5, "c": 1.5, "d": 4.0}
    assert sum(ranks.values()) == 4 * 5 / 2


@pytest.mark.parametrize(("eta", "gamma"), [(0.5, 0.1), (1.0, 0.3), (0.0, 0.1), (1.0, math.inf)])
def test_the_refund(eta, gamma):
    shares = [refund_share(accuracy / 100, 0.5, eta, gamma) for accuracy in range(0, 101, 5)]
    assert all(0 <= share <= eta for share in shares)
    assert shares == sorted(shares, reverse=True)
    assert all(share == eta for share in shares[:11])  # not better than before
    if gamma < 1:
        assert shares[-1] == 0
    if gamma == math.inf:
        assert set(shares) == {eta}


def test_a_best_of_zero_is_no_division_by_zero():
    assert refund_share(0.2, best=0.0, eta=0.5, gamma=0.1) == 0
    assert refund_share(0.0, best=0.0, eta=0.5, gamma=0.1) == 0.5


def test_nobody_pays_what_he_does_not_have():
    ledger = Ledger({"a": 0.5}, {"one": 0.0})
    with pytest.raises(ValueError, match=r"'a' has 0\.5 tokens and cannot pay 1\.0"):
        ledger.pay("a", "one", 1.0)


def test_the_file(tmp_path):
    write_ledger(tmp_path / "ledger.csv", [{"round": 1, "cluster": "one", "client": "a", "paid": 1.0}])
    with (tmp_path / "ledger.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert tuple(row) == COLUMNS and row["paid"] == "1.0" and row["rewarded"] == ""
