"""Intervals, ranks, fairness and incentives against closed forms and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedlightning.study import fairness_measures
from fedlightning.study import significance as statistics


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


def test_bootstrap_is_seeded_and_stays_in_the_data():
    values = np.random.default_rng(0).normal(size=12)
    first, second = (statistics.mean_interval(values, method="bootstrap") for _ in range(2))
    assert (first.low, first.high) == (second.low, second.high)
    assert values.min() <= first.low < first.high <= values.max()


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


def test_the_corrected_t_is_nadeau_and_bengios():
    a, b, share = np.array([0.8, 0.82, 0.79, 0.85]), np.array([0.78, 0.83, 0.75, 0.80]), 254 / 486
    interval, p = statistics.resampled_difference(a, b, share)
    d = a - b
    t = d.mean() / math.sqrt((1 / 4 + share) * d.var(ddof=1))
    assert p == pytest.approx(2 * stats.t.sf(abs(t), 3))
    assert interval.radius == pytest.approx(stats.t.ppf(0.975, 3) * d.mean() / t)
    assert statistics.resampled_difference(a, b, 0)[1] == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert statistics.resampled_difference(a, a, share) == (statistics.Interval(0, 0, 0, 4, "resampled t"), 1.0)


def errors_of_type_one(splits: int, folds: bool = False, studies: int = 2000) -> tuple[float, float]:
    """How often two learners of the same worth differ at 5 %: by the paired t-test, and by the corrected one.

    Each study draws samples with two features that tell as much of the class; a learner cuts one of them halfway between the
    classes' means.
    """
    random, n = np.random.default_rng(splits), 120
    paired = corrected = 0
    for _ in range(studies):
        y = np.arange(n) % 2
        x = random.normal(size=(n, 2)) + 0.8 * y[:, None]
        size = n // splits if folds else n // 3
        order = random.permutation(n)
        differences = []
        for _ in range(splits):
            order = np.roll(order, size) if folds else random.permutation(n)
            test, train = order[:size], order[size:]
            cut = (x[train][y[train] == 1].mean(axis=0) + x[train][y[train] == 0].mean(axis=0)) / 2
            right = ((x[test] > cut) == y[test, None]).mean(axis=0)
            differences.append(right[0] - right[1])
        nothing = np.zeros(splits)
        paired += statistics.paired_difference(differences, nothing)[1] < 0.05
        corrected += statistics.resampled_difference(differences, nothing, size / (n - size))[1] < 0.05
    return paired / studies, corrected / studies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "folds", "most"), [(5, False, 0.07), (10, False, 0.07), (5, True, 0.07), (10, True, 0.07)]
)
def test_the_type_one_error_over_overlapping_splits(splits, folds, most):
    paired, corrected = errors_of_type_one(splits, folds)
    assert (paired if folds else corrected) <= most
    if not folds:
        assert paired > 0.15  # why the corrected one is taken


def test_the_interval_of_crossed_runs_is_that_of_a_two_way_analysis_of_variance():
    values = np.array([0.1, 0.3, 0.2, 0.5, 0.9, 0.4, 0.2, 0.3, 0.7])
    grid = values.reshape(3, 3)
    rows, columns = (3 * grid.mean(axis).var(ddof=1) for axis in (1, 0))  # mean squares
    rest = ((grid - grid.mean(1, keepdims=True) - grid.mean(0) + grid.mean()) ** 2).sum() / 4
    spread = rows + columns - rest
    freedom = spread**2 / (rows**2 / 2 + columns**2 / 2 + rest**2 / 4)
    found, p = statistics.crossed_difference(values, levels=3)
    assert found.radius == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(spread / 9))
    assert p == pytest.approx(2 * stats.t.sf(values.mean() / math.sqrt(spread / 9), freedom))
    assert statistics.crossed_difference(np.zeros(4), 2) == (statistics.Interval(0, 0, 0, 4, "crossed t"), 1.0)
    assert statistics.crossed_difference(values, 3, test_share=0.5)[0].radius > found.radius


@pytest.mark.parametrize(("levels", "sources"), [(3, 2), (5, 2), (3, 3)])
def test_the_type_one_error_of_crossed_runs(levels, sources):
    random, wrong = np.random.default_rng(levels), np.zeros(2)
    for _ in range(400):
        grid = random.normal(0, 0.3, (levels,) * sources)
        grid += random.normal(0, 1, (levels,) + (1,) * (sources - 1))  # one source dominates
        values = grid.ravel()
        wrong += [statistics.crossed_difference(values, levels)[1] < 0.05, stats.ttest_1samp(values, 0).pvalue < 0.05]
    assert wrong[0] / 400 <= 0.08
    assert wrong[1] / 400 > 0.2  # why runs of one seed do not count as independent


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


# Demšar (2006), "Statistical comparisons of classifiers over multiple data sets", table 6: AUC on 14 data sets. On the
# last but one, two are printed as 0.975 with ranks 2 and 3, so one of them is a little more.
C45 = {
    "C4.5": [0.763, 0.599, 0.954, 0.628, 0.882, 0.936, 0.661, 0.583, 0.775, 1.000, 0.940, 0.619, 0.972, 0.957],
    "C4.5+m": [0.768, 0.591, 0.971, 0.661, 0.888, 0.931, 0.668, 0.583, 0.838, 1.000, 0.962, 0.666, 0.981, 0.978],
    "C4.5+cf": [0.771, 0.590, 0.968, 0.654, 0.886, 0.916, 0.609, 0.563, 0.866, 1.000, 0.965, 0.614, 0.9751, 0.946],
    "C4.5+m+cf": [0.798, 0.569, 0.967, 0.657, 0.898, 0.931, 0.685, 0.625, 0.875, 1.000, 0.962, 0.669, 0.975, 0.970],
}


def test_friedman_reproduces_the_published_example():
    """Demšar prints chi-square 9.28 and F 3.69 without the correction for ties, which scipy makes."""
    found = statistics.friedman(C45)
    assert {name: round(rank, 3) for name, rank in found.ranks.items()} == {
        "C4.5": 3.143, "C4.5+m": 2.000, "C4.5+cf": 2.893, "C4.5+m+cf": 1.964
    }  # fmt: skip
    k, d = 4, 14
    plain = 12 * d / (k * (k + 1)) * (sum(rank**2 for rank in found.ranks.values()) - k * (k + 1) ** 2 / 4)
    assert plain == pytest.approx(9.28, abs=0.005)
    assert (d - 1) * plain / (d * (k - 1) - plain) == pytest.approx(3.69, abs=0.005)
    tied = sum(
        int(n) ** 3 - int(n)
        for column in zip(*C45.values(), strict=True)
        for n in np.unique(column, return_counts=True)[1]
    )
    assert found.statistic == pytest.approx(plain / (1 - tied / (d * (k**3 - k))))
    assert found.critical_difference == pytest.approx(1.25, abs=0.005)


def test_nemenyi_is_scikit_posthocs_and_agrees_with_the_critical_difference():
    posthocs = pytest.importorskip("scikit_posthocs")
    found = statistics.friedman(C45)
    expected = posthocs.posthoc_nemenyi_friedman(np.array(list(C45.values())).T)
    names = list(C45)
    ours = statistics.nemenyi(found.ranks, found.datasets)
    assert len(ours) == 6
    for (a, b), p in ours.items():
        assert p == pytest.approx(expected.iloc[names.index(a), names.index(b)], abs=1e-6)
        assert (p < 0.05) == (abs(found.ranks[a] - found.ranks[b]) > found.critical_difference)
    edge = {"x": 1.0, "y": 1.0 + found.critical_difference, "z": 2.0, "w": 2.0}
    assert statistics.nemenyi(edge, 14)["x", "y"] == pytest.approx(0.05, abs=1e-6)


def test_holm_by_the_textbook():
    """Sorted p times 4, 3, 2, 1, never below the one before."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0] and statistics.holm([]) == []
    assert statistics.holm([0.2]) == [0.2]


def test_holm_is_statsmodels():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    p = np.random.default_rng(0).uniform(size=9) ** 3
    assert statistics.holm(list(p)) == pytest.approx(list(multitest.multipletests(p, method="holm")[1]))


def test_wilcoxon_counts_signs_and_ranks():
    a = [0.5, 0.7, 0.6, 0.9, 0.8]
    assert statistics.wilcoxon(a, [v - d for v, d in zip(a, (0.01, 0.02, 0.03, 0.04, 0.05), strict=True)]) == 2 / 2**5
    assert statistics.wilcoxon(a, a) == 1.0


def test_a_paired_difference_may_have_a_bootstrap_interval():
    a, b = [0.8, 0.82, 0.79, 0.85], [0.78, 0.83, 0.75, 0.80]
    (plain, p), (bootstrap, same) = (statistics.paired_difference(a, b, method=m) for m in ("t", "bootstrap"))
    assert p == same and bootstrap.centre == plain.centre and bootstrap.radius < plain.radius


def test_spread_names_the_bad_end():
    scores = {"x": 0.9, "y": 0.5, "z": 0.7}
    found = fairness_measures.spread(scores)
    assert (found.worst, found.best, found.median) == (0.5, 0.9, 0.7)
    assert found.variance == pytest.approx(np.var([0.9, 0.5, 0.7]))
    assert fairness_measures.spread(scores, higher_is_better=False).worst == 0.9
    assert fairness_measures.spread({"x": 0.4, "y": 0.4}).variance == 0


def test_thresholds_are_strict():
    scores = {"x": 0.9, "y": 0.5, "z": 0.7}
    assert (fairness_measures.above(scores, 0.7), fairness_measures.below(scores, 0.7)) == (1, 1)
    assert fairness_measures.above(scores, -1) == 3


def test_participation_rate_needs_to_beat_both_baselines():
    scores, local, federated = {"x": 0.9, "y": 0.5}, {"x": 0.8, "y": 0.4}, {"x": 0.7, "y": 0.6}
    assert fairness_measures.incentivised_participation_rate(scores, local, federated) == 50.0
    assert fairness_measures.incentivised_participation_rate(federated, local, federated) == 0.0
    negative = [{c: -v for c, v in group.items()} for group in (scores, local, federated)]
    assert fairness_measures.incentivised_participation_rate(*negative, higher_is_better=False) == 50.0


def test_appeal_and_opt_outs():
    scores, federated = {"x": 0.9, "y": 0.5}, {"x": 0.7, "y": 0.6}
    appeal = fairness_measures.personal_model_appeal(scores, federated)
    assert appeal == pytest.approx({"x": 0.2, "y": -0.1})
    assert fairness_measures.opt_outs(scores, federated) == 0.5
    assert fairness_measures.global_model_appeal({"x": 0.3, "y": 0.5}, {"x": 0.4, "y": 0.5}) == 1
    with pytest.raises(ValueError, match="'y' is not in both runs"):
        fairness_measures.opt_outs(scores, {"x": 0.7})
    with pytest.raises(ValueError, match="no finite score"):
        fairness_measures.spread({"x": float("nan")})
