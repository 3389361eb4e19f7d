"""Arithmetic over named tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlightning import tensors
from tests.helpers import same

FLOATS = st.floats(-1e6, 1e6, width=32)


def state(value):
    return {"w": torch.tensor([value], dtype=torch.float32)}


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


@pytest.mark.parametrize("options", [{}, {"dampening": 0.3}, {"nesterov": True}], ids=str)
def test_a_step_with_momentum_is_torchs_on_tensors_and_on_numbers(options):
    x, gradients = (
        torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)),
        torch.tensor([[1.0, 0.3, -7.1]] * 4).double(),
    )
    optimizer, steps = torch.optim.SGD([x], lr=1.0, momentum=0.7, **options), []
    buffer = number = None
    settings = 0.7, options.get("dampening", 0.0), options.get("nesterov", False)
    for gradient in gradients:
        before, x.grad = x.detach().clone(), gradient
        optimizer.step()
        step, buffer = tensors.momentum_step(buffer, gradient, *settings)
        assert torch.equal(before - step, x.detach()) and torch.equal(buffer, optimizer.state[x]["momentum_buffer"])
        on_ones, number = tensors.momentum_step(number, 1.0, *settings)
        steps.append((float(step[0]), on_ones))
    assert steps[-1][0] == pytest.approx(steps[-1][1], rel=1e-15) and len(set(steps)) > 2
