"""Shamir's secret sharing: any `threshold` shares give a secret back, and fewer tell nothing of it.

Shamir, "How to share a secret", Communications of the ACM 22(11), 1979.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache, reduce

PRIME = 2**256 + 297
"""The field is that of the integers modulo this prime, the first one beyond all secrets of 32 bytes."""
LENGTH = 33
"""Bytes of a share."""


def split(secret: bytes, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """Return the shares of a secret by place: values of a random polynomial, which is the secret at 0.

    Args:
        secret: At most 32 bytes.
        threshold: Shares that give it back.
        places: Different whole numbers from 1.

    Example:
        >>> shares = split(b"a secret of at most 32 bytes", 2, [1, 2, 3])
        >>> join({1: shares[1], 3: shares[3]}).lstrip(bytes(1))
        b'a secret of at most 32 bytes'
    """
    drawn = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    highest_first = [*drawn, int.from_bytes(secret, "big")]
    values = {place: reduce(lambda sum, next: (sum * place + next) % PRIME, highest_first, 0) for place in places}
    return {place: value.to_bytes(LENGTH, "big") for place, value in values.items()}


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of some shares, as 32 bytes: Lagrange's interpolation at 0.

    Args:
        shares: By place, as many as the threshold, or more.

    Raises:
        ValueError: If they are not shares of one secret, as far as can be seen.
    """
    factors = zip(shares.values(), _factors(tuple(shares)), strict=True)
    secret = sum(int.from_bytes(share, "big") * factor for share, factor in factors) % PRIME
    if secret >= 2**256:
        raise ValueError("these are not enough shares of one secret, or they were changed")
    return secret.to_bytes(32, "big")


@lru_cache(maxsize=64)  # all secrets of a round have shares at the same places
def _factors(places: tuple[int, ...]) -> tuple[int, ...]:
    """Return what the values at some places count in the value at 0."""
    factors = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
