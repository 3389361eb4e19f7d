"""A site that does not answer in time is waited for once: the run goes on without it until it is back."""

from __future__ import annotations

import pytest

from fedlightning.engines.sites import connections
from fedlightning.engines.sites.connections import PING
from tests.engines.sites.helpers import SHARES, Line, a_site, at_sites, sites
from tests.engines.sites.test_failures import visits_of

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
    assert all("client_timeout=30" in entry["reason"] for entry in run.server.failures)
    assert any("goes on without its site until that is back" in entry["reason"] for entry in run.server.failures)


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
