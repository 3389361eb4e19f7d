import numpy as np
import pytest
import torch

from fedlightning.callbacks import client_dp as clipping


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_large_entries_are_clipped_as_one_vector_of_float64(clip):
    draw = torch.Generator().manual_seed(0)
    shapes = {"large": (3, clipping.PIECE // 2 + 1), "small": (2,), "number": ()}
    sent = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    state = {name: value + 0.01 * torch.randn(value.shape, generator=draw) for name, value in sent.items()}
    change = {name: state[name].numpy().astype(float) - sent[name].numpy().astype(float) for name in sent}
    length = np.sqrt(sum((value**2).sum() for value in change.values()))

    factor, within = clipping.factor_of(list(sent), sent, state, clip)

    assert clipping.length_of_change(sent, sent, state) == pytest.approx(length, rel=1e-12)
    assert within is bool(length <= clip)
    assert factor == pytest.approx(min(1.0, clip / length), rel=1e-3) and factor * length <= clip
    cut = {name: clipping.clipped(sent[name], state[name], factor) for name in sent}
    assert {name: value.shape for name, value in cut.items()} == {name: value.shape for name, value in sent.items()}
    for name, value in cut.items():
        np.testing.assert_array_equal(
            value, (sent[name].numpy().astype(float) + factor * change[name]).astype("float32")
        )
    assert clipping.length_of_change(sent, sent, cut) <= clip
