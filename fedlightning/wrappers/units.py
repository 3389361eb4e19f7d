"""Choices of the units of a sub-model: a prefix, a rolling window, a random set."""

from __future__ import annotations

import math

import torch

from fedlightning.seeding import generator
from fedlightning.wrappers.submodel import Units


def num_units(rate: float, width: int) -> int:
    """Return `max(1, floor(rate * width))`, where a product that is a whole number is taken as one.

    Example:
        >>> from fedlightning.wrappers.units import num_units
        >>> num_units(0.5, 5), num_units(0.1, 5), num_units(0.29, 100)
        (2, 1, 29)
    """
    return max(1, math.floor(rate * width + 1e-9))  # 0.29 * 100 is 28.999999999999996


def prefix_units(rate: float) -> Units:
    """Return the choice of the first `ceil(rate * width)` units, where a product that is a whole number is taken as one.

    Example:
        >>> from fedlightning.wrappers.units import prefix_units
        >>> prefix_units(0.2)("fc1", 6), len(prefix_units(0.2)("fc1", 35))
        (tensor([0, 1]), 7)
    """
    return lambda path, width: torch.arange(math.ceil(rate * width - 1e-9))  # 0.2 * 35 is 7.000000000000001


def rolling_units(rate: float, start: int) -> Units:
    """Return the choice of a cyclic window: `num_units` units from unit `start` on, modulo the width, in ascending order.

    Example:
        >>> from fedlightning.wrappers.units import rolling_units
        >>> rolling_units(0.5, start=8)("fc1", 5), rolling_units(0.5, start=9)("fc1", 5)
        (tensor([3, 4]), tensor([0, 4]))
    """
    return lambda path, width: ((torch.arange(num_units(rate, width)) + start) % width).sort().values


def random_units(rate: float, *seed: object) -> Units:
    """Return the choice of `num_units` random units of every layer, in ascending order.

    Layers of equal width keep the same units, so that residual sums and tied weights of theirs fit together.

    Example:
        >>> from fedlightning.wrappers.units import random_units
        >>> draws = [random_units(0.5, 0, round, "client 3")("fc1", 8).tolist() for round in (0, 0, 1)]
        >>> len(draws[0]), draws[0] == draws[1], draws[0] == draws[2]
        (4, True, False)
    """

    def choose(path: str, width: int) -> torch.Tensor:
        order = torch.randperm(width, generator=generator(*seed, "units", width))
        return order[: num_units(rate, width)].sort().values

    return choose
