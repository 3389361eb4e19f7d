"""Choices among computed numbers that rounding does not flip: values that differ by rounding only are ties.

The same sum in another order, on another processor or in another engine, differs in its last digits. Which of two equal
clusters, groups, rounds or bids comes first must not hang on that: the first in order does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLOSE = 1e-6
"""Relative difference up to which two numbers are equal: what rounding in single precision makes of one."""


def first_least(values: Tensor, dim: int = 0, floor: float = 0.0) -> Tensor:
    """Return the index of the least value, of values that differ by rounding the first.

    Example:
        >>> values = torch.tensor([0.5, 0.1 + 0.2, 0.3], dtype=torch.float64)
        >>> int(values.argmin()), int(first_least(values))
        (2, 1)
    """
    values = values.double().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least = values.min(dim, keepdim=True).values
    near = values - least <= CLOSE * least.abs() + floor
    return (near | (values == least)).to(torch.uint8).argmax(dim)


def first_largest(values: Tensor, dim: int = 0) -> Tensor:
    """Return the index of the largest value, of values that differ by rounding the first; NaN is never chosen.

    Example:
        >>> int(first_largest(torch.tensor([0.1, 1.0, 1.0 + 1e-7])))
        1
    """
    return first_least(-values.double(), dim)


def levelled(values: Tensor) -> Tensor:
    """Return numbers of which those that differ by rounding only are equal, so that a stable sort keeps their order.

    Neighbours in order are equal if they differ by no more than :data:`CLOSE` of the largest magnitude.

    Example:
        >>> levelled(torch.tensor([0.3, 0.1, 0.1 + 0.2], dtype=torch.float64)).tolist()
        [0.3, 0.1, 0.3]
    """
    flat, order = values.double().flatten().sort(stable=True)
    finite = flat[flat.isfinite()]
    if len(finite) < 2:
        return values.double()
    apart = flat.diff() > CLOSE * float(finite.abs().max())
    level = torch.cat([torch.zeros(1, dtype=torch.int64), apart.cumsum(0)])
    starts = torch.cat([torch.tensor([True]), apart]).nonzero().flatten()
    equal = torch.empty_like(flat)
    equal[order] = torch.where(flat.isfinite(), flat[starts[level]], flat)
    return equal.view(values.shape)


def representatives(rows: Tensor) -> list[int]:
    """Return for each row the first row that it differs from by rounding only: itself, if there is none before it.

    Example:
        >>> representatives(torch.tensor([[1.0], [2.0], [1.0 + 1e-7]]))
        [0, 1, 0]
    """
    close = CLOSE * float(rows.norm(dim=1).max()) if len(rows) else 0.0
    firsts: list[int] = []
    for place, row in enumerate(rows):
        same = (first for first in dict.fromkeys(firsts) if float((row - rows[first]).norm()) <= close)
        firsts.append(next(same, place))
    return firsts


def better_than_rounding(value: float, best: float) -> bool:
    """Return True if a value is above another by more than rounding.

    Example:
        >>> better_than_rounding(0.3 + 1e-9, 0.3), better_than_rounding(0.31, 0.3), better_than_rounding(0.3, -float("inf"))
        (False, True, True)
    """
    return value > best and (math.isinf(best) or value - best > CLOSE * abs(best))
