"""Noise from a secret: its distribution, its addresses, and that its streams are not those of a torch generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from fedlightning.callbacks.shared.secret_noise import normal, uniform


def test_it_is_uniform_and_normal():
    assert stats.kstest(uniform("secret", "a", 100_000), "uniform").pvalue > 1e-3
    drawn = normal("secret", "a", torch.Size([333, 301])).flatten().numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert float(np.abs(drawn).max()) < 9


def test_an_address_gives_the_same_numbers_and_others_give_others():
    one = normal("secret", "a", torch.Size([10_000]))
    assert torch.equal(one, normal("secret", "a", torch.Size([10_000])))
    for other in (normal("secret", "b", one.shape), normal("Secret", "a", one.shape)):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.05
    assert normal("secret", "a", torch.Size([])).shape == () and normal("secret", "a", torch.Size([0])).shape == (0,)


def test_torch_has_too_few_streams_for_secrets():
    """Why it is made: of a seed 32 bits count, so that whoever sees a released model could try all of them."""
    draws = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32)]
    assert torch.equal(*draws)


@pytest.mark.parametrize("bits", [32, 40, 64, 127])
def test_every_bit_of_a_secret_counts(bits):
    assert not np.array_equal(uniform(f"{5:032x}", "a", 4), uniform(f"{5 + 2**bits:032x}", "a", 4))


def test_no_number_comes_twice():
    assert len(normal("secret", "a", torch.Size([10_000])).unique()) == 10_000


@pytest.mark.parametrize("count", [0, 1, 7, 2**16 - 1, 2**16 + 1, 150_000])
def test_pieces_hold_the_numbers_of_the_whole_formula(count):
    half = (count + 1) // 2
    first, second = np.split(uniform("secret", "round 1", 2 * half), 2)
    length, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * np.pi * second
    whole = np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count]
    assert np.array_equal(normal("secret", "round 1", torch.Size([count])).numpy(), whole)
