"""Noise of whole numbers: its distribution, its divergence against a Gaussian's, and what a client moves a sum by."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from fedlightning.callbacks.shared import secret_noise
from fedlightning.callbacks.shared.fixed_point import FixedPoint
from fedlightning.callbacks.shared.secret_noise import discrete_normal
from fedlightning.callbacks.shared.sum_noise import LEAST_STD, SumNoise


def probabilities(std, reach):
    """The discrete Gaussian from its definition."""
    there = np.arange(-reach, reach + 1)
    weights = np.exp(-(there.astype(float) ** 2) / (2 * std**2))
    return there, weights / weights.sum()


@pytest.mark.parametrize("std", [0.6, 1.0, 3.7, LEAST_STD, 12.0])
def test_numbers_have_the_probabilities_of_the_definition(std):
    found = discrete_normal("a secret", f"std {std}", 200_000, std)
    there = np.arange(-int(3 * std) - 1, int(3 * std) + 2)
    counts = np.array([(found == one).sum() for one in there])
    whole = probabilities(std, int(12 * std) + 12)
    inside = dict(zip(*whole, strict=True))
    expected = np.array([inside[one] for one in there]) * len(found)
    rest = [len(found) - counts.sum(), len(found) - expected.sum()]
    assert stats.chisquare([*counts, rest[0]], [*expected, rest[1]]).pvalue > 1e-3


@pytest.mark.parametrize("std", [0.6, 1.0, 3.7, LEAST_STD, 250.0])
def test_what_is_taken_of_rounded_normal_numbers_is_the_discrete_gaussian(std):
    """Without drawing: the probability of a rounded number, times that with which it is taken, over their sum."""
    reach = int(8 * std) + 1
    there, wanted = probabilities(std, reach)
    rounded = stats.norm.sf((np.abs(there) - 0.5) / std) - stats.norm.sf((np.abs(there) + 0.5) / std)
    exact = secret_noise._excess(np.zeros(1), std) / secret_noise._excess(there.astype(float), std)
    assert exact.max() <= 1 + 1e-15
    made = rounded * exact
    assert np.allclose(made / made.sum(), wanted, rtol=1e-10, atol=0)
    for coins in (exact * (1 - 1e-12), exact * (1 + 1e-12)):  # what is sure without the integral is sure with it
        assert np.array_equal(secret_noise._accept(there.astype(float), std, coins), coins < exact)


def test_wide_noise_has_its_deviation_and_is_symmetric():
    found = discrete_normal("a secret", "wide", 100_000, 3.0e6)
    assert found.std() == pytest.approx(3.0e6, rel=0.01) and abs(found.mean()) < 4 * 3.0e6 / 316
    assert stats.kstest(found / 3.0e6, "norm").pvalue > 1e-3
    assert abs(found[found != 0] % 2).mean() == pytest.approx(0.5, abs=0.01)  # no lattice of its own


def test_it_is_the_same_for_one_secret_and_address():
    first = discrete_normal("a secret", "round 1", 1000, 50.0)
    assert np.array_equal(first, discrete_normal("a secret", "round 1", 1000, 50.0))
    for secret, address in (("another", "round 1"), ("a secret", "round 2")):
        assert abs(np.corrcoef(first, discrete_normal(secret, address, 1000, 50.0))[0, 1]) < 0.15


@pytest.mark.parametrize("order", [1.5, 2, 8, 40])
@pytest.mark.parametrize("shares", [1, 3, 5])
def test_sums_of_shares_diverge_no_more_than_a_gaussian(order, shares):
    """Rényi divergence of the sum's own distribution (by convolution) and the same moved by 20, against 20^2 a / 2 n s^2."""
    _, one = probabilities(LEAST_STD, 160)
    total = one
    for _ in range(shares - 1):
        total = np.convolve(total, one)
    moved, there = total[:-20], total[20:]
    fine = (moved > 1e-250) & (there > 1e-250)
    power = order * np.log(moved[fine]) - (order - 1) * np.log(there[fine])
    divergence = np.logaddexp.reduce(power) / (order - 1)
    assert divergence <= order * 20**2 / (2 * shares * LEAST_STD**2) * (1 + 1e-6)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("kind", ["even", "spiked", "random"])
def test_a_client_moves_a_sum_by_no_more_than_the_distance(bits, kind):
    count, length, clients = 1000, 0.7, 7
    point, noise = FixedPoint(4.0, bits, clients), SumNoise(1.0, 4, length)
    change = {
        "even": torch.ones(count),
        "spiked": torch.eye(1, count).flatten(),
        "random": torch.randn(count, generator=torch.Generator().manual_seed(0)),
    }[kind].double()
    integers = point.encode([change * (length / change.norm())], 1 / clients)
    signed = integers.view(f"<i{bits // 8}").astype(float)
    assert np.linalg.norm(signed) <= noise.distance(point, count)
    assert np.linalg.norm(signed) >= 0.9 * noise.distance(point, count) or bits == 16


def test_the_last_integer_gets_no_noise_and_shares_add_up():
    point, clients = FixedPoint(8.0, 32, 5), 5
    plain = point.encode([torch.zeros(50_000)], 1 / clients)
    parts = [plain.copy() for _ in range(clients)]
    for one, part in enumerate(parts):
        SumNoise(1.5, 4, 0.2, f"secret {one}", "round 1").add(part, point, "bound")
    assert all(part[-1] == 0 for part in parts)
    mean = point.decode(sum(parts[1:], start=parts[0]))
    assert float(mean.std()) == pytest.approx(1.5 * 0.2 / clients * (5 / 4) ** 0.5, rel=0.02)
    other = plain.copy()
    SumNoise(1.5, 4, 0.2, "secret 0", "round 1").add(other, point, "another change")
    assert (other[:-1] != parts[0][:-1]).mean() > 0.99


def test_elements_beyond_the_bound_are_cut_to_it():
    point = FixedPoint(clip=1.0, bits=32, clients=2)
    sums = point.decode(point.encode([torch.tensor([2.0, -4.5, 0.25])], 1.0))
    assert sums.tolist() == pytest.approx([1.0, -1.0, 0.25], abs=1e-6)
