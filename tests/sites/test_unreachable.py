"""A site that does not answer in time is waited for once: the run goes on without it until it is back."""

from __future__ import annotations

import pytest

from fedlightning.sites import connections
from fedlightning.sites.connections import PING
from tests.sites.helpers import SHARES, Line, a_site, at_sites, sites
from tests.sites.test_failures import visits_of

TIMEOUT = 30.0  # of `at_sites`, on the connection's own clock
ROUNDS = 4


def left_out(run):
    return {(entry["round"], entry["client"]) for entry in run.server.failures if entry["where"] == "training"}


def missed(*rounds):
    return {(round, client) for round in rounds for client in SHARES[1]}


class Silent:
    """Says nothing from its first visit of a round on, until the other site's of another round."""

    def __init__(self, line, begin, end=None):
        self.line, self.begin, self.end, self.silent = line, begin, end, False
        line.watch = self

    def __call__(self, node, data):
        if node == "1" and visits_of(data, self.begin):
            self.silent = True
        if node == "0" and self.end is not None and visits_of(data, self.end):
            self.silent, self.begin = False, None
        return None if node == "1" and self.silent else data


def test_a_silent_site_is_waited_for_once(tmp_path):
    line = Line(sites(tmp_path / "sites", max_rounds=ROUNDS))
    Silent(line, begin=1)
    run = at_sites(line, tmp_path / "server", max_rounds=ROUNDS)
    assert run.rounds_done == ROUNDS and left_out(run) == missed(2, 3, 4)
    assert TIMEOUT <= line.now < TIMEOUT + 2 * PING  # not in every round
    assert all("failures.timeout=30" in entry["reason"] for entry in run.server.failures)
    assert any("goes on without its site until that is back" in entry["reason"] for entry in run.server.failures)


def test_a_lost_site_is_said_once_and_not_in_every_round(tmp_path):
    """The summary has each round; two long warnings for each client did, too."""
    line = Line(sites(tmp_path / "sites", max_rounds=6))
    Silent(line, begin=1)
    with pytest.warns(UserWarning, match="goes on without") as told:
        run = at_sites(line, tmp_path / "server", max_rounds=6)
    assert left_out(run) == missed(2, 3, 4, 5, 6)
    for client in SHARES[1]:
        assert sum(f"'{client}'" in str(one.message) for one in told if "failures.timeout" in str(one.message)) == 2


def test_a_site_that_is_lost_again_is_said_again(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "LOST", -1.0)
    line = Line(sites(tmp_path / "sites", max_rounds=8))
    silent = Silent(line, begin=1, end=3)

    def again(node, data):
        if visits_of(data, 5):
            silent.begin = 5
        return silent(node, data)

    line.watch = again
    with pytest.warns(UserWarning, match="goes on without") as told:
        at_sites(line, tmp_path / "server", max_rounds=8)
    rounds = [str(one.message).partition(":")[0] for one in told if "goes on without" in str(one.message)]
    assert len(set(rounds)) == 2 and len(rounds) == 2 * len(SHARES[1])


def test_a_silent_site_that_answers_again_takes_part_again(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "LOST", -1.0)  # the question is among what is lost here: it is asked again
    line = Line(sites(tmp_path / "sites", max_rounds=ROUNDS))
    Silent(line, begin=1, end=2)
    run = at_sites(line, tmp_path / "server", max_rounds=ROUNDS)
    assert left_out(run) in (missed(2), missed(2, 3))  # its answer may come in the round or before the next
    assert line.now < TIMEOUT + 2 * PING


@pytest.mark.parametrize("how", ["gone", "refused"])
def test_a_site_that_is_gone_or_refused_is_waited_for_once(how, tmp_path):
    line = Line(sites(tmp_path / "sites", max_rounds=ROUNDS))

    def change(node, data):
        if node == "1" and visits_of(data, 1) and "1" in line.sites:
            if how == "gone":
                del line.sites["1"]
            else:
                other = a_site(tmp_path / "sites" / "1", (*SHARES[1], "site0"), max_rounds=ROUNDS)
                line.sites["1"] = other.answer
        return data

    line.watch = change
    run = at_sites(line, tmp_path / "server", max_rounds=ROUNDS)
    assert left_out(run) == missed(2, 3, 4) and TIMEOUT <= line.now < TIMEOUT + 2 * PING


def test_a_site_that_is_gone_and_comes_back_takes_part_again(tmp_path):
    line = Line(sites(tmp_path / "sites", max_rounds=ROUNDS))

    def change(node, data):
        if node == "1" and visits_of(data, 1):
            line.sites.pop("1", None)
        if node == "0" and visits_of(data, 2):
            line.sites["1"] = a_site(tmp_path / "sites" / "1", SHARES[1], max_rounds=ROUNDS).answer
        return data

    line.watch = change
    run = at_sites(line, tmp_path / "server", max_rounds=ROUNDS)
    assert left_out(run) in (missed(2), missed(2, 3)) and line.now < TIMEOUT + 2 * PING
