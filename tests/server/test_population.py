"""Who there is, and how many take part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedlightning.server.population import Participation, Population


def test_clients_are_in_order_and_all_are_scored_unless_said():
    population = Population({"10": 1, "2": 3}, held_out=["9", "1"])
    assert population.clients == ["2", "10"] and list(population.num_samples) == ["2", "10"]
    assert population.held_out == ["1", "9"]
    assert population.all_are_scored and population.scored == ["2", "10"]
    population.scored = ["2"]
    assert not population.all_are_scored


def test_samples_follow_the_rounds_where_they_change():
    population = Population({"a": 8, "b": 4}, over_rounds={"a": [5, 3]})
    assert [population.samples_in(round) for round in (0, 1, 7, 0)] == [
        {"a": samples, "b": 4} for samples in (5, 3, 3, 5)
    ]
    assert Population({"a": 8}).samples_in(3) == {"a": 8}


def test_another_population_of_the_same_clients_shares_no_list():
    whole = Population({"a": 8, "b": 4}, over_rounds={"a": [5, 3]})
    whole.samples_in(1)
    other = replace(whole, held_out=["c"])
    other.num_samples = {"a": 1, "c": 2}
    assert whole.held_out == [] and whole.samples_in(1) == {"a": 3, "b": 4}


@pytest.mark.parametrize(
    ("share", "counts", "everybody"),
    [(1.0, [1, 5, 100], True), (0.5, [1, 2, 50], False), (1, [1, 1, 1], False), (7, [1, 5, 7], False)],
)
def test_a_share_or_a_number_takes_part(share, counts, everybody):
    participation = Participation(share)
    assert [participation.count(clients) for clients in (1, 5, 100)] == counts
    assert participation.is_everybody is everybody
