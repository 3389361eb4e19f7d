"""The rule of verdicts, against a computation of its own."""

from __future__ import annotations

import math
import random

import pytest

from fedlightning.experiments.reproduce.results import (
    Chance,
    Line,
    expected_by_chance,
    judge,
    judge_order,
    wrong_by_chance,
)

T_95 = {2: 12.706204736, 3: 4.30265273, 5: 2.776445105, 10: 2.262157163}
"""Quantiles of Student's t, from a printed table: number of values -> 97.5 % of t with one degree less."""


def interval(values: list[float]) -> tuple[float, float]:
    n, mean = len(values), sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return mean - T_95[n] * spread / math.sqrt(n), mean + T_95[n] * spread / math.sqrt(n)


def test_the_rule_against_an_independent_computation():
    numbers, seen = random.Random(0), set()
    for _ in range(300):
        values = [numbers.gauss(0.7, numbers.choice([0.001, 0.02])) for _ in range(numbers.choice(list(T_95)))]
        published, tolerance = numbers.uniform(0.6, 0.8), numbers.choice([0.01, 0.05, 0.1])
        low, high = interval(values)
        if published - tolerance <= low and high <= published + tolerance:
            expected = "agrees"
        elif high < published - tolerance or low > published + tolerance:
            expected = "disagrees"
        else:
            expected = "inconclusive"
        found = judge(values, published, tolerance)
        assert found.word == expected
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)
        seen.add(expected)
    assert len(seen) == 3


def test_orders_are_paired_by_seed():
    better, worse = [0.5, 0.7, 0.9], [0.49, 0.689, 0.89]  # far apart over seeds, close together within one
    assert judge_order(better, worse).word == "order agrees"
    assert judge_order(worse, better).word == "order disagrees"
    assert judge_order(better, [0.49, 0.71, 0.89]).word == "inconclusive"
    assert judge_order(better, worse, margin=0.05).word == "order disagrees"
    assert judge_order(worse, better, margin=-0.05).word == "order agrees"


def test_one_seed_is_judged_only_where_nothing_is_random():
    assert judge([0.5], 0.5, 0.1).word == "inconclusive"
    assert judge([0.5], 0.5, 0.0, exact=True).word == "agrees"
    assert judge([0.500001], 0.5, 1e-6, exact=True).word == "agrees"
    assert judge([0.500002], 0.5, 1e-6, exact=True).word == "disagrees"
    assert judge_order([1.0], [0.5]).word == "inconclusive"
    assert judge_order([1.0], [0.5], exact=True).word == "order agrees"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_model_disagrees(value):
    assert judge([0.5, value], 0.5, 0.1).word == "disagrees"
    assert judge_order([0.5, value], [0.4, 0.4]).word == "order disagrees"


def test_a_target_that_was_not_reached_never_agrees():
    assert judge([50.0, 50.0], published=45, tolerance=10, beyond=True).word == "inconclusive"
    assert judge([50.0, 50.0], published=100, tolerance=10, beyond=True).word == "inconclusive"
    assert judge([50.0, 50.0], published=20, tolerance=10, beyond=True).word == "disagrees"


def test_a_ratio_to_a_target_that_was_not_reached_is_an_upper_bound():
    assert judge([2.0, 2.0], published=2, tolerance=1, below=True).word == "inconclusive"
    assert judge([9.0, 9.0], published=2, tolerance=1, below=True).word == "inconclusive"
    assert judge([0.5, 0.5], published=2, tolerance=1, below=True).word == "disagrees"


def test_chance_counts_intervals_that_have_a_width():
    verdicts = [judge([0.5], 0.5, 0.1, exact=True), judge([0.4, 0.5], 0.5, 0.3), judge_order([0.1, 0.2], [0.0, 0.0])]
    lines = [Line("a", verdict, dict(enumerate((0.4, 0.5)))) for verdict in verdicts]  # orders: no published value
    assert expected_by_chance(lines) == Chance(verdicts=2, disagree=0.05, agree=0.05)
    assert "so none is wrong" in str(expected_by_chance(lines[:1]))


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.03, 0.1])
def test_disagreements_by_chance_are_as_many_as_said(tolerance):
    """At the worst place, a true mean at an end of the tolerance; small tolerances err on both sides."""
    numbers, wrong, said = random.Random(1), 0, 0.0
    for _ in range(2000):
        values = [numbers.gauss(0.5 + tolerance, 0.05) for _ in range(5)]
        verdict = judge(values, 0.5, tolerance)
        wrong += verdict.word == "disagrees"
        said += wrong_by_chance(Line("a", verdict, dict(enumerate(values)), published=0.5, tolerance=tolerance))[0]
    assert wrong / 2000 == pytest.approx(said / 2000, abs=0.012)
    assert 0.025 <= said / 2000 <= 0.05


def test_disagreements_by_chance_at_an_early_small_look_are_counted():
    """With two seeds the mean lies far off more often than with twenty: then the interval lies beyond the other end."""
    numbers, wrong, said, looks = random.Random(5), 0, 0.0, (2, 20)
    for _ in range(3000):
        values = [numbers.gauss(0.05, 0.3) for _ in range(looks[-1])]
        verdicts = [judge(values[:n], 0.0, 0.05, confidence=0.975) for n in looks]
        wrong += "disagrees" in [verdict.word for verdict in verdicts]
        line = Line("a", verdicts[-1], dict(enumerate(values)), published=0.0, tolerance=0.05, looks=looks)
        said += wrong_by_chance(line)[0]
    assert wrong / 3000 == pytest.approx(said / 3000, abs=0.007) and said / 3000 > 0.03


def test_agreements_by_chance_are_not_more_than_said():
    numbers = random.Random(2)
    words = [judge([numbers.gauss(0.6, 0.02) for _ in range(5)], 0.5, 0.1).word for _ in range(4000)]
    assert 0.015 < words.count("agrees") / 4000 < 0.033
    orders = [judge_order([numbers.gauss(0.0, 1) for _ in range(5)], [0.0] * 5).word for _ in range(4000)]
    assert 0.015 < orders.count("order agrees") / 4000 < 0.033


@pytest.mark.parametrize(("looks", "fewest", "most"), [((5, 10), 0.0, 0.027), ((10,), 0.016, 0.033)])
def test_two_planned_looks_err_no_more_often_than_one(looks, fewest, most):
    """A true difference of zero, judged at every look: how often is the order said to agree at one of them?"""
    confidence, numbers, wrong = 1 - 0.05 / len(looks), random.Random(3), 0
    for _ in range(4000):
        values = [numbers.gauss(0.0, 1.0) for _ in range(looks[-1])]
        words = [judge_order(values[:n], [0.0] * n, confidence=confidence).word for n in looks]
        wrong += "order agrees" in words
    assert fewest < wrong / 4000 < most
