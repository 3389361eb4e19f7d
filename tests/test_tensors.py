"""Arithmetic over named tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedlightning import tensors
from fedlightning.tensors import WeightedMean, entry_kinds, load_state, module_state
from tests.helpers import NormNet, Toy, same

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


# -- modules and states ----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(1, dtype=torch.bool))
        self.register_buffer("hidden", torch.ones(1), persistent=False)


def test_four_kinds_of_entries():
    assert entry_kinds(Mixed()) == {
        "a.weight": "trainable",
        "a.bias": "trainable",
        "b.weight": "trainable",
        "b.bias": "frozen",
        "mean": "float_buffer",
        "wave": "float_buffer",
        "count": "int_buffer",
        "mask": "int_buffer",
    }


def test_loading_copies_into_what_is_named():
    module, other = NormNet(), NormNet()
    kept = module_state(module)["net.0.bias"].clone()
    given_state = {name: value for name, value in module_state(other).items() if name != "net.0.bias"}
    load_state(module, given_state)
    same({n: v for n, v in module_state(module).items() if n != "net.0.bias"}, given_state)
    assert torch.equal(module_state(module)["net.0.bias"], kept)
    assert module.net[0].weight.data_ptr() != other.net[0].weight.data_ptr()


def test_loading_refuses_unknown_names_and_shapes():
    with pytest.raises(ValueError, match=r"'net.9.bias' is not in Toy"):
        load_state(Toy(), {"net.9.bias": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'net.0.bias' has shape \(1,\), but Toy holds \(8,\)"):
        load_state(Toy(), {"net.0.bias": torch.zeros(1)})


@given(FLOATS, FLOATS)
def test_interpolation_is_exact_at_its_ends(a, b):
    one, other = state(a), state(b)
    same(tensors.interpolate(one, other, 1.0), one)
    same(tensors.interpolate(one, other, 0.0), other)
    torch.testing.assert_close(tensors.interpolate(one, other, 0.25)["w"], 0.25 * one["w"] + 0.75 * other["w"])


def test_integers_are_not_interpolated():
    a, b = {"n": torch.tensor(3)}, {"n": torch.tensor(7)}
    assert int(tensors.interpolate(a, b, 0.9)["n"]) == int(tensors.interpolate(a, b, 1.0)["n"]) == 7


def test_arithmetic_by_name():
    a, b = {"x": torch.tensor([3.0]), "y": torch.tensor([1.0])}, {"x": torch.tensor([1.0])}
    same(tensors.subtract(a, b), {"x": torch.tensor([2.0])})
    same(tensors.add(a, b, alpha=2.0), {"x": torch.tensor([5.0]), "y": torch.tensor([1.0])})
    same(tensors.select(a, ["y", "z"]), {"y": torch.tensor([1.0])})
    assert tensors.distance({"x": torch.tensor([3.0, 4.0])}, {"x": torch.zeros(2)}) == 5.0
    assert tensors.zeros_like({"h": torch.ones(2, dtype=torch.float16)})["h"].dtype == torch.float32
    assert not tensors.equal(a, b)
    assert tensors.equal(b, tensors.clone(b))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_first_name_that_is_not_finite(bad):
    assert tensors.first_nonfinite({"a": torch.ones(2), "n": torch.ones(1).long(), "b": torch.tensor([bad])}) == "b"
    assert tensors.first_nonfinite({"a": torch.ones(2)}) is None
