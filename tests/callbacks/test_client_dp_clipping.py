import numpy as np
import pytest
import torch

from fedlightning.callbacks import client_dp as clipping


def entries(dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"large": (3, clipping.PIECE // 2 + 1), "small": (2,), "number": ()}
    sent = {name: (10.0**seed * torch.randn(shape, generator=draw)).to(dtype) for name, shape in shapes.items()}
    return sent, {
        name: value + 0.01 * torch.randn(value.shape, generator=draw).to(dtype) for name, value in sent.items()
    }


def exact_length(sent, state):
    pairs = [(state[name].numpy().astype(np.longdouble), sent[name].numpy().astype(np.longdouble)) for name in sent]
    return np.sqrt(sum(((now - then) ** 2).sum() for now, then in pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [1e-2, 0.5, 1e6])
@pytest.mark.parametrize("seed", [-3, 0, 1])
def test_large_entries_are_clipped_as_one_vector(clip, seed, dtype):
    sent, state = entries(dtype, seed)
    length = exact_length(sent, state)

    factor, within = clipping.factor_of(list(sent), sent, state, clip)

    found = clipping.length_of_change(list(sent), sent, state)
    assert length <= found <= length * (1 + 4 * torch.finfo(dtype).eps + 1e-14)
    assert within is bool(found <= clip)
    lost = 4e-2 if clip < 0.1 else 1e-3  # to rounding, where the clip is hardly more than that of the entries
    assert factor == pytest.approx(min(1.0, clip / length), rel=lost) and factor * length <= clip
    cut = {name: clipping.clipped(sent[name], state[name], factor) for name in sent}
    assert {name: (one.shape, one.dtype) for name, one in cut.items()} == {n: (v.shape, dtype) for n, v in sent.items()}
    for name, value in cut.items():
        wide = sent[name].double() + factor * (state[name].double() - sent[name].double())
        torch.testing.assert_close(value.double(), wide, rtol=3 * torch.finfo(dtype).eps, atol=1e-9)
    assert exact_length(sent, cut) <= clip and clipping.length_of_change(list(sent), sent, cut) <= clip
    assert factor == 1.0 or exact_length(sent, cut) >= (1 - lost) * clip - 1e-2 * clip


def test_a_change_that_needs_no_cut_stays_as_it_is():
    sent, state = entries(torch.float32, 0)
    factor, _ = clipping.factor_of(list(sent), sent, state, 1e6)
    assert all(torch.equal(clipping.clipped(sent[name], state[name], factor), state[name]) for name in sent)


def test_entries_beyond_the_squares_of_single_precision_have_a_length():
    sent, state = {"w": torch.full((4,), 1e30)}, {"w": torch.full((4,), 1.5e30)}
    assert clipping.factor_of(["w"], sent, state, 1e30)[0] == pytest.approx(1.0, rel=1e-5)
    assert clipping.factor_of(["w"], sent, state, 1e29)[0] == pytest.approx(0.1, rel=1e-5)
