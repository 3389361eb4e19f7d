"""Numbers as integers of a ring, so that sums are exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SIGNED = {16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Dtype in which integers of so many bits are sent. Their arithmetic is modulo a power of two: a sign means nothing."""
MOST_LEVELS = 2**52
"""Integers up to here are exact in float64, of which they are made."""


@dataclass(frozen=True)
class FixedPoint:
    """Numbers in ``[-clip, clip]``, times shares that add up to 1, as integers of which no sum overflows.

    A client's integers are ``round(levels * share * value / clip)``. Their sum over clients is at most ``levels`` and half a
    unit for each client, which ``levels = 2^(bits - 1) - 1 - clients`` leaves room for.

    Attributes:
        clip: Bound of the numbers.
        bits: Bits of an integer.
        clients: How many clients add up.

    Example:
        >>> FixedPoint(clip=1.0, bits=16, clients=3).levels
        32764
    """

    clip: float
    bits: int
    clients: int

    @property
    def levels(self) -> int:
        """The integer that stands for `clip` where one client has the whole share."""
        return min(2 ** (self.bits - 1) - 1 - self.clients, MOST_LEVELS)

    def encode(self, parts: Iterable[Tensor], share: float) -> np.ndarray:
        """Return a client's integers, unsigned; the last one says what part of the numbers was beyond the bound.

        Args:
            parts: The numbers, in pieces: those that fit into a cache take least time.
            share: The client's share.

        Raises:
            ValueError: If a number is not finite.
        """
        pieces, beyond, count = [], 0, 0
        for part in parts:
            values = part.detach().cpu().double().flatten()
            least, most = values.aminmax() if len(values) else (values.new_zeros(()),) * 2
            if not math.isfinite(float(most - least)):
                raise ValueError("a change holds NaN or infinite values")
            if float(torch.maximum(-least, most)) > self.clip:
                beyond += int((values.abs() > self.clip).sum())
                values = values.clamp(-self.clip, self.clip)
            pieces.append(values.mul(share / self.clip * self.levels).round_().to(SIGNED[self.bits]))
            count += len(values)
        last = torch.tensor([-(-beyond * self._most // max(count, 1))], dtype=SIGNED[self.bits])
        return from_wire(torch.cat([*pieces, last]), self.bits)

    def decode(self, total: np.ndarray) -> Tensor:
        """Return the sum of `share * value` that a sum of integers stands for, float64, without the last one."""
        signed = total[:-1].astype(f"<u{self.bits // 8}").view(f"<i{self.bits // 8}").astype(np.float64)
        return torch.from_numpy(signed * (self.clip / self.levels))

    def clipped(self, total: np.ndarray, clients: int) -> float:
        """Return what part of the numbers of so many clients was beyond the bound."""
        return int(total[-1]) / self._most / clients

    @property
    def _most(self) -> int:
        return self.levels // self.clients


def to_wire(integers: np.ndarray, bits: int) -> Tensor:
    """Return unsigned integers as a tensor of the same bits and memory."""
    return torch.from_numpy(np.ascontiguousarray(integers).view(f"<i{bits // 8}"))


def from_wire(sent: Tensor, bits: int) -> np.ndarray:
    """Return the unsigned integers of a tensor."""
    return np.asarray(sent.cpu().contiguous().numpy().view(f"<u{bits // 8}"))
