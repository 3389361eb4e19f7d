"""The weighted mean of states."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlightning.tensors import WeightedMean
from tests.helpers import same

FLOATS = st.floats(-1e6, 1e6, width=32)
WEIGHTS = st.integers(1, 10**6)


def state(*values, dtype=torch.float32):
    return {"w": torch.tensor(values, dtype=dtype)}


@given(st.lists(st.tuples(FLOATS, WEIGHTS), min_size=1, max_size=8))
def test_the_mean_is_the_float64_mean_rounded_once(pairs):
    mean = WeightedMean()
    for value, weight in pairs:
        mean.add(state(value), weight)
    total = sum(weight for _, weight in pairs)
    expected = (sum(torch.tensor(v).double() * w for v, w in pairs) / total).float()
    assert torch.equal(mean.result()["w"], expected.reshape(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@given(st.lists(WEIGHTS, min_size=1, max_size=6), st.lists(FLOATS, min_size=3, max_size=3))
def test_one_state_and_identical_states_are_passed_on_bit_for_bit(dtype, weights, values):
    value = state(*values).copy()["w"].clamp(-6e4, 6e4).to(dtype) / 3
    mean = WeightedMean()
    for weight in weights:
        mean.add({"w": value.clone()}, weight / 7)
    assert torch.equal(mean.result()["w"], value)
    assert mean.result()["w"].dtype == dtype


@given(st.lists(st.tuples(FLOATS, WEIGHTS), min_size=1, max_size=8))
def test_the_mean_lies_between(pairs):
    mean = WeightedMean()
    for value, weight in pairs:
        mean.add(state(value), weight)
    values = [torch.tensor(v).float() for v, _ in pairs]
    assert min(values) <= mean.result()["w"][0] <= max(values)


def test_a_name_that_some_miss_is_averaged_over_the_others():
    mean = WeightedMean()
    mean.add({"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}, 1)
    mean.add({"a": torch.tensor([4.0])}, 2)
    same(mean.result(), {"a": torch.tensor([3.0]), "b": torch.tensor([2.0])})


def test_weight_zero_adds_nothing_and_bad_weights_are_refused():
    mean = WeightedMean()
    mean.add(state(float("nan")), 0.0)
    assert mean.result() == {}
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cannot be averaged"):
            mean.add(state(1.0), weight)


def test_integers_are_the_first_ones():
    mean = WeightedMean()
    for value in (3, 5, 9):
        mean.add({"n": torch.tensor(value), "flag": torch.tensor([value > 3])}, value)
    assert int(mean.result()["n"]) == 3
    assert mean.result()["flag"].tolist() == [False]
    assert mean.result()["n"].dtype == torch.int64


def test_shapes_must_agree():
    mean = WeightedMean()
    mean.add(state(1.0), 1)
    with pytest.raises(ValueError, match=r"'w' has shape \(2,\) in one update and \(1,\)"):
        mean.add(state(1.0, 2.0), 1)


def test_what_was_added_may_change_afterwards():
    """A result never aliases an update, nor does adding change one."""
    first = state(1.0)
    mean = WeightedMean()
    mean.add(first, 2)
    result = mean.result()
    result["w"] += 1
    assert first["w"].item() == 1.0


def test_one_accumulator_whatever_the_number_of_states():
    mean = WeightedMean()
    sizes = []
    for value in range(5):
        mean.add(state(float(value)), 1)
        sizes.append(sum(len(part) for part in (mean._sums, mean._like)))
    assert sizes == [2] * 5


@pytest.mark.parametrize("wide", [torch.float64, torch.complex128])
def test_a_narrower_value_counts_where_the_first_is_wide(wide):
    mean = WeightedMean()
    mean.add({"w": torch.tensor([1.0], dtype=wide)}, 1)
    mean.add({"w": torch.tensor([3.0])}, 1)
    assert torch.equal(mean.result()["w"], torch.tensor([2.0], dtype=wide))
