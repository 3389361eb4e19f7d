"""Noise from a secret: its distribution, its addresses, and that its streams are not those of a torch generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("cryptography", reason="noise is made by cryptography: pip install opacus cryptography")
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedlightning.callbacks.shared.masks import stream
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


@pytest.mark.parametrize("count", [0, 1, 7, 2**15 - 1, 2**15 + 1, 150_000])
def test_any_count_is_filled_to_its_last_number(count):
    """A long draw goes by pieces, each of which gives as many numbers as points of it are in the disk."""
    drawn, coins = normal("secret", "round 1", torch.Size([count])), uniform("secret", "round 1", count)
    assert len(drawn) == len(coins) == count == len(set(drawn.tolist())) == len(set(coins.tolist()))
    assert all(stats.kstest(drawn[start : start + 1000], "norm").pvalue > 1e-4 for start in range(0, count, 10_000))


def test_the_numbers_are_those_of_the_formula():
    """Marsaglia's, from the uniform numbers of the same secret and address."""
    across, up = np.split(2.0 * uniform("secret", "a", 2 * 14) - 1.0, 2)  # (2 * 10) // 3 + 8 points for ten numbers
    square = across**2 + up**2
    inside = square < 1.0
    length = np.sqrt(-2.0 * np.log(square[inside]) / square[inside])
    whole = np.concatenate([across[inside] * length, up[inside] * length])[:10]
    assert np.allclose(normal("secret", "a", torch.Size([10])).numpy(), whole, rtol=1e-14)


def test_bits_are_those_of_aes_in_counter_mode():
    """The stream of a key, whatever the lengths in which it is taken: block by block, by the cipher without a mode."""
    cipher = Cipher(algorithms.AES(bytes(range(32))), modes.ECB()).encryptor()
    blocks = b"".join(cipher.update(number.to_bytes(16, "big")) for number in range(8))
    next_bytes = stream(bytes(range(32)))
    assert b"".join(next_bytes(count).tobytes() for count in (8, 40, 16, 64)) == blocks
