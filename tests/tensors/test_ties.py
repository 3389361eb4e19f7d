"""Choices that rounding does not flip."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlightning.tensors import ties

INF, NAN = float("inf"), float("nan")
ULPS = (1 - 2e-7, 1.0, 1 + 2e-7)


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e6])
def test_of_equal_values_the_first_is_chosen_whatever_their_rounding(size):
    for by in itertools.product(ULPS, repeat=3):
        values = torch.tensor([5.0, *by, 7.0], dtype=torch.float64) * size
        assert int(ties.first_least(values)) == 1
        assert int(ties.first_largest(-values)) == 1
        assert ties.levelled(values).argsort(stable=True).tolist() == [1, 2, 3, 0, 4]
        assert ties.representatives(values[:, None]) == [0, 1, 1, 1, 4]


def test_real_differences_decide():
    values = torch.tensor([0.3, 0.1 + 1e-5, 0.1], dtype=torch.float64)
    assert int(ties.first_least(values)) == 2 and int(ties.first_largest(-values)) == 2
    assert torch.equal(ties.levelled(values), values)


def test_what_is_no_number_is_never_chosen():
    assert int(ties.first_least(torch.tensor([NAN, INF, 3.0]))) == 2
    assert int(ties.first_largest(torch.tensor([NAN, -INF, 3.0]))) == 2
    assert int(ties.first_least(torch.tensor([NAN, INF]))) == 0  # nothing to choose from: the first
    assert ties.levelled(torch.tensor([INF, 1.0, -INF, 1.0])).tolist() == [INF, 1.0, -INF, 1.0]


def test_distances_of_equal_models_are_a_tie():
    """A squared distance of 0 and one of what rounding leaves of 0."""
    squares = torch.tensor([3e-14, 0.0, 4.0], dtype=torch.float64)
    assert int(ties.first_least(squares)) == 1
    assert int(ties.first_least(squares, floor=(ties.CLOSE * 2.0) ** 2)) == 0


def test_a_dimension_is_searched():
    table = torch.tensor([[1.0, 5.0], [1.0 - 1e-9, 2.0]], dtype=torch.float64)
    assert ties.first_least(table).tolist() == [0, 1]
    assert ties.first_least(table, dim=1).tolist() == [0, 0]


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20))
def test_the_choice_is_as_good_as_the_least(values):
    table = torch.tensor(values, dtype=torch.float64)
    least = table.min()
    chosen = table[ties.first_least(table)]
    assert float(chosen - least) <= ties.CLOSE * abs(float(least))
    order = ties.levelled(table).argsort(stable=True)
    assert sorted(order.tolist()) == list(range(len(values)))
    assert bool((table[order].diff() >= -ties.CLOSE * len(values) * table.abs().max()).all())


@pytest.mark.parametrize(
    "value, best, better", [(0.3 + 1e-9, 0.3, False), (0.31, 0.3, True), (0.3, -INF, True), (-1.0, -1.0 - 1e-9, False)]
)
def test_better_than_rounding(value, best, better):
    assert ties.better_than_rounding(value, best) is better
