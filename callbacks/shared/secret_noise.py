"""Random numbers that nobody can guess without a secret.

A `torch.Generator` on the CPU has 2^32 streams, whatever its seed: noise from it could be found by trying them all, and
subtracted. These numbers are made of the output of SHAKE-256, which has as many streams as there are secrets.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from fedlightning.tensors import State
from fedlightning.tensors.memory import PIECE


def uniform(secret: str, address: str, count: int) -> np.ndarray:
    """Return float64 numbers in (0, 1), the same for the same secret and address.

    Args:
        secret: What nobody else knows.
        address: What the numbers are for.
        count: How many.

    Example:
        >>> uniform("a secret", "round 1", 2).round(4).tolist() == uniform("a secret", "round 1", 2).round(4).tolist()
        True
    """
    return _between_0_and_1(_bits(secret, address, count))


def _bits(secret: str, address: str, count: int) -> np.ndarray:
    """Return 64 bits for each number."""
    return np.frombuffer(hashlib.shake_256(f"{secret}|{address}".encode()).digest(8 * count), dtype="<u8")


def _between_0_and_1(bits: np.ndarray) -> np.ndarray:
    """Return the numbers that 64 bits each stand for."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54


def normal(secret: str, address: str, shape: torch.Size) -> Tensor:
    """Return standard normal float64 numbers by Box and Muller's transform.

    Args:
        secret: What nobody else knows.
        address: What the numbers are for.
        shape: Shape of the result.

    Example:
        >>> normal("a secret", "round 1", torch.Size([2, 3])).shape
        torch.Size([2, 3])
    """
    half = (shape.numel() + 1) // 2
    stream, found = _bits(secret, address, 2 * half), np.empty(2 * half)
    for start in range(0, half, PIECE):
        end = min(start + PIECE, half)
        length = np.sqrt(-2.0 * np.log(_between_0_and_1(stream[start:end])))
        angle = 2.0 * np.pi * _between_0_and_1(stream[half + start : half + end])
        found[start:end], found[half + start : half + end] = length * np.cos(angle), length * np.sin(angle)
    return torch.from_numpy(found[: shape.numel()]).reshape(shape)


def discrete_normal(secret: str, address: str, count: int, std: float) -> np.ndarray:
    """Return whole numbers, int64, of which `x` has a probability proportional to ``exp(-x^2 / (2 std^2))``.

    Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020, algorithm 3, in float64: a
    discrete Laplace number of scale ``t`` is taken with probability ``exp(-(|x| - std^2 / t)^2 / (2 std^2))``.

    Args:
        secret: What nobody else knows.
        address: What the numbers are for.
        count: How many.
        std: The parameter; from 1 on it is the standard deviation but for 1e-6.

    Example:
        >>> discrete_normal("a secret", "round 1", 3, 10.0).dtype
        dtype('int64')
    """
    scale, found, tries = math.floor(std) + 1, np.empty(count, np.int64), 0
    missing = np.arange(count)
    while len(missing):
        bits = _bits(secret, f"{address}|{tries}", 2 * len(missing)).reshape(2, -1)
        size = np.floor(-scale * np.log(_between_0_and_1(bits[0])))
        negative = (bits[0] & np.uint64(1)).astype(bool)  # of the bits that the size is not made of
        kept = _between_0_and_1(bits[1]) < np.exp(-((size - std**2 / scale) ** 2) / (2.0 * std**2))
        kept &= ~(negative & (size == 0))  # or 0 would be drawn twice as often
        found[missing[kept]] = np.where(negative, -size, size)[kept]
        missing, tries = missing[~kept], tries + 1
    return found


def digest_of(name: str, values: State) -> str:
    """Return a hash of a name and of what noise is to cover, for its address."""
    found = hashlib.sha256(name.encode())
    for entry in sorted(values):
        found.update(entry.encode() + values[entry].detach().double().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def with_noise(values: State, std: float, secret: str, address: str, bound: str = "") -> State:
    """Return float64 values with noise of a standard deviation; 0 leaves them as they are.

    Args:
        values: The values.
        std: The standard deviation.
        secret: What nobody else knows.
        address: What the noise is for.
        bound: A further part of the address.
    """
    if std == 0.0:
        return values
    drawn = {name: normal(secret, f"{address} {name}|{bound}", value.shape) for name, value in values.items()}
    return {name: value.double() + std * drawn[name].to(value.device) for name, value in values.items()}
