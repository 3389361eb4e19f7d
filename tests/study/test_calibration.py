"""Calibration and decision curves against other implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from fedlightning.study.calibration import INTERVALS, calibration, calibration_intervals, curve, net_benefit, wilson


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.02, 0.98, 400)
    return (rng.random(400) < expit(0.4 + 0.6 * logit(p))).astype(float), p


def test_slope_and_intercept_are_the_unpenalised_logistic_regression_on_the_logit(drawn):
    y, p = drawn
    found = calibration(y, p)
    fitted = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(logit(p)[:, None], y)
    assert found.slope == pytest.approx(fitted.coef_[0, 0], abs=1e-5)
    assert found.intercept == pytest.approx(fitted.intercept_[0], abs=1e-5)
    assert expit(found.in_the_large + logit(p)).mean() == pytest.approx(y.mean(), abs=1e-9)


def test_errors_are_those_of_torchmetrics_and_scikit_learn(drawn):
    from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

    y, p = drawn
    found, tensors = calibration(y, p), (torch.from_numpy(p), torch.from_numpy(y).long())
    assert found.ece == pytest.approx(float(binary_calibration_error(*tensors, n_bins=15)), abs=1e-6)
    assert found.auroc == pytest.approx(float(binary_auroc(*tensors)), abs=1e-6)
    assert found.brier == pytest.approx(((p - y) ** 2).mean())


def test_intervals_hold_the_truth_and_are_wide_where_patients_are_few(drawn):
    y, p = drawn
    found = calibration_intervals([(y, p)])
    low, high = found["slope_ci95"]
    assert low < 0.6 < high and low < calibration(y, p).slope < high
    few = calibration_intervals([(y[:40], p[:40])])
    for name in INTERVALS:
        ends = few[f"{name}_ci95"]
        assert ends is None or ends[1] - ends[0] > found[f"{name}_ci95"][1] - found[f"{name}_ci95"][0]
    assert calibration_intervals([(y[:6], p[:6])])["slope_ci95"] is None
    assert calibration_intervals([(y, p), (y, p)]) == found  # a second seed of the same patients is no more patients


def test_wilson_is_statsmodels():
    assert wilson(0.9, 20) == pytest.approx((0.69897, 0.97214), abs=1e-4)  # proportion_confint(18, 20, method="wilson")


def test_perfect_probabilities_have_slope_one_and_lie_on_the_diagonal():
    p = np.repeat([0.2, 0.5, 0.8], 100)
    y = np.concatenate([np.arange(100) < 100 * q for q in (0.2, 0.5, 0.8)]).astype(float)
    found = calibration(y, p)
    assert (found.slope, found.intercept, found.in_the_large) == pytest.approx((1, 0, 0), abs=1e-8)
    assert curve(y, p, bins=3) == [pytest.approx(pair) for pair in [(0.2, 0.2), (0.5, 0.5), (0.8, 0.8)]]


@pytest.mark.parametrize(
    ("events", "probabilities"),
    [
        (np.arange(20) >= 10, np.linspace(0.1, 0.9, 20)),  # a probability parts them
        (np.arange(20) % 2, np.full(20, 0.5)),  # all alike
        (np.arange(20) == 3, np.linspace(0.1, 0.9, 20)),  # one event
    ],
)
def test_where_there_is_no_slope_none_is_given(events, probabilities):
    found = calibration(events.astype(float), probabilities)
    assert found.slope is None and found.intercept is None and found.in_the_large is not None


def test_net_benefit_counts_by_hand(drawn):
    y, p = drawn
    for t, gain, everybody in net_benefit(y, p, [0.1, 0.4]):
        treated = p >= t
        true, false = (treated & (y == 1)).sum(), (treated & (y == 0)).sum()
        assert gain == pytest.approx((true - false * t / (1 - t)) / len(y))
        assert everybody == pytest.approx((y.sum() - (len(y) - y.sum()) * t / (1 - t)) / len(y))


def test_a_number_that_is_no_probability_is_refused():
    with pytest.raises(ValueError, match="none in"):
        calibration(np.array([0.0, 1.0]), np.array([0.5, 1.5]))
