"""Noise that clients add to whole numbers of which a server sees only the sum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedlightning.callbacks.shared.fixed_point import FixedPoint
from fedlightning.callbacks.shared.secret_noise import discrete_normal

PLACE = "noise of sums"
"""Where a client's `scratch` has its noise, from `on_send` on, for who encodes the update."""
LEAST_STD = 8.0
"""Standard deviation of a share, in units of the integers, from which on sums of shares are as good as one number."""
TAIL_DEVIATIONS = 12.0
"""Standard deviations that a sum has room for: an element is beyond them with a probability below 1e-30."""


@dataclass(frozen=True)
class SumNoise:
    """A client's share of the noise of a sum.

    Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism for federated learning with secure aggregation", ICML
    2021, theorem 1: `shares` numbers of discrete Gaussians of variance ``s^2 >= 1/4``, added to a sum of whole numbers of
    which one client moves it by `distance` (Euclidean), have at every order at most the Rényi divergence of a Gaussian of
    variance ``shares s^2``, but for ``10 shares exp(-pi^2 s^2)`` an element: from :data:`LEAST_STD` on that is below 1e-200.

    Attributes:
        multiplier: Standard deviation of `shares` shares, over `distance`.
        shares: How many shares together are the noise.
        length: Bound of the Euclidean length of a client's change.
        secret: The client's secret.
        address: What the noise is for.
        bound: Whether other integers get other noise; noise of a fixed seed is the same whatever it covers.
    """

    multiplier: float
    shares: int
    length: float
    secret: str = ""
    address: str = ""
    bound: bool = True

    def distance(self, point: FixedPoint, elements: int) -> float:
        """Return the most by which one client of equal share moves a sum: its length, and what rounding adds to it."""
        whole = self.length / point.clip * point.levels / point.clients
        return (whole + 0.5 * math.sqrt(elements)) * (1.0 + 1e-6)

    def std(self, point: FixedPoint, elements: int) -> float:
        """Return the standard deviation of a share, in units of the integers."""
        return self.multiplier * self.distance(point, elements) / math.sqrt(self.shares)

    def clip_for(self, point: FixedPoint, elements: int) -> float:
        """Return the least bound of an element with which no sum overflows, for what it is worth at this resolution."""
        spread = TAIL_DEVIATIONS * self.std(point, elements) * math.sqrt(point.clients)
        return self.length * (1.0 + 1e-3) + spread * point.clip / point.levels

    def add(self, integers: np.ndarray, point: FixedPoint, digest: str) -> None:
        """Add the noise, which is bound to the integers; the last one, the part beyond the bound, is 0 for all."""
        std = self.std(point, len(integers) - 1)
        address = f"{self.address}|{std!r}|{digest}" if self.bound else self.address
        integers[:-1] += discrete_normal(self.secret, address, len(integers) - 1, std).astype(integers.dtype)
