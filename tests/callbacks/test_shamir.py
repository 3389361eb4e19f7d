"""Shamir's shares: as many as the threshold give a secret back, fewer tell nothing of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlightning.callbacks.shared import masking as shamir
from fedlightning.callbacks.shared.masking import LENGTH, PRIME, join, split


def is_prime(number, rounds=40):
    """Miller and Rabin's test."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    draw = random.Random(0)
    for _ in range(rounds):
        power = pow(draw.randrange(2, number - 1), odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def test_the_field_is_one_and_no_smaller_prime_would_do():
    assert is_prime(PRIME) and not any(is_prime(number, 5) for number in range(2**256, PRIME))
    assert PRIME < 2 ** (8 * LENGTH)


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(0, 6), st.randoms())
def test_any_shares_as_many_as_the_threshold_give_the_secret(secret, threshold, more, draw):
    shares = split(secret, threshold, range(1, threshold + more + 1))
    some = dict(draw.sample(sorted(shares.items()), threshold))
    assert join(some) == secret == join(shares)


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.integers(2, 7))
def test_one_share_fewer_fits_every_secret(secret, other, threshold):
    """Whatever `t - 1` shares somebody has, each secret has exactly one further share that fits."""
    shares = split(secret, threshold, range(1, threshold + 1))
    few = {place: shares[place] for place in range(1, threshold)}
    assert threshold == 2 or secret not in (attempt(few), bytes(32))
    # the polynomial through `few` and (0, other), at the last place, by Lagrange in plain rationals modulo the prime
    points = {0: int.from_bytes(other, "big")} | {place: int.from_bytes(value, "big") for place, value in few.items()}
    last = 0
    for place, value in points.items():
        term = value
        for one in points:
            if one != place:
                term = term * (threshold - one) * pow(place - one, -1, PRIME) % PRIME
        last = (last + term) % PRIME
    assert join({**few, threshold: last.to_bytes(LENGTH, "big")}) == other


def attempt(shares):
    try:
        return join(shares)
    except ValueError:
        return None


def test_shares_add_up():
    """The scheme is linear: an independent property of the polynomial at 0."""
    a, b = (number.to_bytes(32, "big") for number in (12345, 67890))
    first, second = (split(secret, 3, range(1, 6)) for secret in (a, b))
    both = {
        place: ((int.from_bytes(first[place], "big") + int.from_bytes(second[place], "big")) % PRIME).to_bytes(
            LENGTH, "big"
        )
        for place in (2, 4, 5)
    }
    assert int.from_bytes(join(both), "big") == 12345 + 67890


def test_shares_of_one_place_are_spread_over_the_field():
    """A single share of a fixed secret is uniform: chi-square over its leading 4 bits, 15 degrees of freedom."""
    counts = [0] * 16
    for _ in range(1600):
        counts[int.from_bytes(split(bytes(32), 2, [1])[1], "big") >> 252 & 15] += 1
    assert sum((count - 100) ** 2 / 100 for count in counts) < 60  # p below 1e-6


def test_what_is_no_share_of_the_secret_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="not enough shares"):
        join({1: (2**256 + 5).to_bytes(LENGTH, "big")})
    assert shamir.join({1: (7).to_bytes(LENGTH, "big")}) == (7).to_bytes(32, "big")
