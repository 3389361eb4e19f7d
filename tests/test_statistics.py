"""Intervals, ranks, fairness and incentives against closed forms and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedlightning.evaluation import fairness, statistics


def test_t_interval_is_the_textbook_one():
    values = [0.70, 0.72, 0.69, 0.75, 0.74]
    found = statistics.mean_interval(values)
    assert found.centre == pytest.approx(0.72)
    assert found.radius == pytest.approx(2.776445 * np.std(values, ddof=1) / math.sqrt(5), rel=1e-6)
    assert statistics.mean_interval(values, method="normal").radius < found.radius


def test_equal_runs_have_no_radius_and_the_radius_scales():
    assert statistics.mean_interval([0.5] * 5).radius == 0
    values = np.array([1.0, 2.0, 4.0])
    assert statistics.mean_interval(3 * values).radius == pytest.approx(3 * statistics.mean_interval(values).radius)


@pytest.mark.parametrize(
    "interval", [statistics.median_interval, lambda v: statistics.mean_interval(v, method="bootstrap")]
)
def test_bootstrap_is_seeded_and_stays_in_the_data(interval):
    values = np.random.default_rng(0).normal(size=12)
    first, second = interval(values), interval(values)
    assert (first.low, first.high) == (second.low, second.high)
    assert values.min() <= first.low < first.high <= values.max()


def test_few_runs_give_the_median_alone():
    found = statistics.median_interval([1.0, 2.0, 9.0])
    assert (found.centre, found.radius) == (2.0, 0.0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")]])
def test_nothing_is_averaged_away(values):
    with pytest.raises(ValueError, match=r"no value|not averaged away"):
        statistics.mean_interval(values)


def test_paired_difference_equals_scipy():
    a, b = [0.8, 0.82, 0.79, 0.85], [0.78, 0.83, 0.75, 0.80]
    interval, p = statistics.paired_difference(a, b)
    assert interval.centre == pytest.approx(np.mean(np.subtract(a, b)))
    assert p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert statistics.paired_difference(a, a)[1] == 1.0
    with pytest.raises(ValueError, match="same seeds"):
        statistics.paired_difference(a, b[:2])


SCORES = {"a": [0.9, 0.8, 0.85, 0.7], "b": [0.8, 0.7, 0.85, 0.65], "c": [0.5, 0.6, 0.55, 0.6]}


def test_friedman_tests_algorithms_not_data_sets():
    found = statistics.friedman(SCORES)
    wanted = stats.friedmanchisquare(*SCORES.values())
    assert (found.statistic, found.p_value) == pytest.approx((wanted.statistic, wanted.pvalue))
    assert found.p_value != pytest.approx(stats.friedmanchisquare(*np.array(list(SCORES.values())).T).pvalue)
    k, d = 3, 4
    assert sum(found.ranks.values()) == pytest.approx(k * (k + 1) / 2)
    assert found.ranks["a"] == pytest.approx((1 + 1 + 1.5 + 1) / 4)
    f = (d - 1) * found.statistic / (d * (k - 1) - found.statistic)
    assert found.iman_davenport == pytest.approx(f)
    assert found.iman_davenport_p == pytest.approx(stats.f.sf(f, k - 1, (k - 1) * (d - 1)))
    assert found.critical_difference == pytest.approx(2.343 * math.sqrt(k * (k + 1) / (6 * d)), rel=1e-3)


def test_friedman_of_losses_turns_the_ranks_and_ties_are_no_evidence():
    losses = {name: [-value for value in values] for name, values in SCORES.items()}
    assert statistics.friedman(losses, higher_is_better=False).ranks == statistics.friedman(SCORES).ranks
    equal = statistics.friedman({key: [0.5, 0.6] for key in "abc"})
    assert (equal.statistic, equal.p_value) == (0.0, 1.0)
    with pytest.raises(ValueError, match="at least 3 algorithms"):
        statistics.friedman({"a": [1.0, 2.0], "b": [1.0, 2.0]})


def test_spread_names_the_bad_end():
    scores = {"x": 0.9, "y": 0.5, "z": 0.7}
    found = fairness.spread(scores)
    assert (found.worst, found.best, found.median) == (0.5, 0.9, 0.7)
    assert found.variance == pytest.approx(np.var([0.9, 0.5, 0.7]))
    assert fairness.spread(scores, higher_is_better=False).worst == 0.9
    assert fairness.spread({"x": 0.4, "y": 0.4}).variance == 0


def test_thresholds_are_strict():
    scores = {"x": 0.9, "y": 0.5, "z": 0.7}
    assert (fairness.above(scores, 0.7), fairness.below(scores, 0.7)) == (1, 1)
    assert fairness.above(scores, -1) == 3


def test_participation_rate_needs_to_beat_both_baselines():
    scores, local, federated = {"x": 0.9, "y": 0.5}, {"x": 0.8, "y": 0.4}, {"x": 0.7, "y": 0.6}
    assert fairness.incentivised_participation_rate(scores, local, federated) == 50.0
    assert fairness.incentivised_participation_rate(federated, local, federated) == 0.0
    negative = [{c: -v for c, v in group.items()} for group in (scores, local, federated)]
    assert fairness.incentivised_participation_rate(*negative, higher_is_better=False) == 50.0


def test_appeal_and_opt_outs():
    scores, federated = {"x": 0.9, "y": 0.5}, {"x": 0.7, "y": 0.6}
    appeal = fairness.personal_model_appeal(scores, federated)
    assert appeal == pytest.approx({"x": 0.2, "y": -0.1})
    assert fairness.opt_outs(scores, federated) == 0.5
    assert fairness.global_model_appeal({"x": 0.3, "y": 0.5}, {"x": 0.4, "y": 0.5}) == 1
    with pytest.raises(ValueError, match="'y' is not in both runs"):
        fairness.opt_outs(scores, {"x": 0.7})
    with pytest.raises(ValueError, match="no finite score"):
        fairness.spread({"x": float("nan")})
