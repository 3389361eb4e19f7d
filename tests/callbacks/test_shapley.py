"""Shapley values on given games: sheet B 1.8.5 and 1.8.11."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from fedlightning.callbacks.shared.contributions import play, shapley_values
from fedlightning.seeding import generator

PLAYERS = list("abcde")
STRENGTH = dict(zip(PLAYERS, (0.0, 0.3, 0.3, 0.1, 0.5), strict=True))


def saturating(some):
    """Accuracy-like: more players help less and less; a contributes nothing, b and c are alike."""
    return 0.1 + 0.9 * (1 - math.exp(-sum(STRENGTH[player] for player in some)))


def by_orders(players, worth):
    """The definition by all m! orders, an independent computation."""
    found = dict.fromkeys(players, 0.0)
    orders = list(itertools.permutations(players))
    for order in orders:
        for place, player in enumerate(order):
            found[player] += (worth(frozenset(order[: place + 1])) - worth(frozenset(order[:place]))) / len(orders)
    return found


def test_exact_values_are_those_over_all_orders():
    found = play(shapley_values(PLAYERS), saturating)
    assert found.exact and found.evaluations == 2**5 - 2 and found.error == 0
    for player, value in by_orders(PLAYERS, saturating).items():
        assert found.values[player] == pytest.approx(value, abs=1e-12)


def test_efficiency_null_player_and_symmetry():
    values = play(shapley_values(PLAYERS), saturating).values
    whole = saturating(frozenset(PLAYERS)) - saturating(frozenset())
    assert sum(values.values()) == pytest.approx(whole, abs=1e-9)
    assert values["a"] == pytest.approx(0, abs=1e-12)
    assert values["b"] == pytest.approx(values["c"], abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_untruncated_samples_are_efficient_and_near_the_exact_values(seed):
    game = shapley_values(PLAYERS, max_evaluations=28, truncate_walk=0.0, draw=generator(seed, "game"))
    found = play(game, saturating)
    exact = play(shapley_values(PLAYERS), saturating).values
    whole = saturating(frozenset(PLAYERS)) - saturating(frozenset())
    assert not found.exact and 0 < found.error < 0.05
    assert sum(found.values.values()) == pytest.approx(whole, abs=1e-9)
    assert max(abs(found.values[player] - exact[player]) for player in PLAYERS) < 4 * found.error


def test_guided_sampling_counts_every_leader_alike():
    """v rewards only the first who comes: values are 1/m only if all lead alike, also when the last block is cut."""
    for budget in (10, 13, *range(20, 30)):
        game = shapley_values(PLAYERS, max_evaluations=budget, truncate_walk=0.0, draw=generator(0, budget))
        found = play(game, lambda some: float(len(some) > 0))
        assert found.values == pytest.approx(dict.fromkeys(PLAYERS, 0.2), abs=1e-12)


def test_a_walk_ends_where_nothing_is_left_to_gain():
    game = shapley_values(PLAYERS, max_evaluations=20, draw=generator(0))
    found = play(game, lambda some: float(len(some) > 0))
    assert found.evaluations == 5 and not found.exact  # whoever leads is worth all


def test_a_walk_that_is_cut_off_leaves_no_values_behind():
    """The truncated rest of a walk is not remembered: all that is asked for is answered by the game itself."""
    asked = []

    def worth(some):
        asked.append(some)
        return {0: 0.0, 1: 0.9996}.get(len(some), 1.0) if "a" in some or not some else 0.5 * (len(some) == 5)

    game = shapley_values(PLAYERS, max_evaluations=20, truncate_walk=1e-3, draw=generator(1))
    found = play(game, worth)
    assert len(asked) == len(set(asked)), "a coalition was asked for twice, so it was not remembered"
    assert found.evaluations == len(asked) - 2
    assert found.values["a"] > 0.9996 / 5  # walks led by others still see what a adds


def test_a_budget_bounds_what_is_asked():
    players = [str(number) for number in range(12)]
    game = shapley_values(players, max_evaluations=150, truncate_walk=0.0, draw=generator(0))
    found = play(game, lambda some: len(some) ** 0.5)
    assert 100 < found.evaluations <= 150 + 12


def test_sampling_goes_on_until_the_means_have_settled():
    players = [f"{number:02d}" for number in range(12)]
    noise = lambda some: random.Random(" ".join(sorted(some))).random() - 0.5  # noqa: E731
    steady, noisy = (
        play(shapley_values(players, max_evaluations=4000, truncate_walk=0.0, draw=generator(0)), worth)
        for worth in (len, noise)
    )
    assert steady.evaluations <= 30 * 11  # 30 walks, each through 11 coalitions at most
    assert noisy.evaluations > 1000


def test_a_round_without_progress_is_not_looked_at():
    found = play(shapley_values(PLAYERS, truncate_round=0.01), lambda some: 0.5 + 0.005 * (len(some) == 5))
    assert found.values == dict.fromkeys(PLAYERS, 0.0) and found.evaluations == 0 and not found.exact


@pytest.mark.parametrize(("players", "values"), [([], {}), (["a"], {"a": 2.0})])
def test_few_players(players, values):
    assert play(shapley_values(players), lambda some: 2.0 * len(some)).values == values
