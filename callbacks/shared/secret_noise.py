"""Random numbers that nobody can guess without a secret.

A `torch.Generator` on the CPU has 2^32 streams, whatever its seed: noise from it could be found by trying them all, and
subtracted. These numbers are made of AES-256 in counter mode, whose key is a hash of secret and address: there are as many
streams as there are secrets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlightning.callbacks.shared.masks import stream
from fedlightning.tensors import State
from fedlightning.tensors.memory import PIECE

MAKER = "AES-256"
"""Part of the hashes that name what was released: another way to make noise would not make the same noise again."""


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
    draw, numbers = _uniforms(secret, address), np.empty(count)
    for start in range(0, count, PIECE):
        numbers[start : start + PIECE] = draw(min(count - start, PIECE))
    return numbers


def _uniforms(secret: str, address: str) -> Callable[[int], np.ndarray]:
    """Return what gives the next numbers in (0, 1) of an address, at most a piece: 53 bits of 64 each."""
    next_bytes = stream(hashlib.sha256(f"{secret}|{address}".encode()).digest())

    def draw(count: int) -> np.ndarray:
        numbers: np.ndarray = (next_bytes(8 * count).view("<u8") >> np.uint64(11)).astype(np.float64)
        numbers *= 2.0**-53
        numbers += 2.0**-54
        return numbers

    return draw


def normal(secret: str, address: str, shape: torch.Size) -> Tensor:
    """Return standard normal float64 numbers by Marsaglia's polar method: a point of the unit disk gives two.

    Args:
        secret: What nobody else knows.
        address: What the numbers are for.
        shape: Shape of the result.

    Example:
        >>> normal("a secret", "round 1", torch.Size([2, 3])).shape
        torch.Size([2, 3])
    """
    draw, numbers, done = _uniforms(secret, address), np.empty(shape.numel()), 0
    while done < len(numbers):
        points = min(2 * (len(numbers) - done) // 3 + 8, PIECE)  # of which 0.785 are in the disk
        across, up = (2.0 * draw(points) - 1.0 for _ in range(2))
        square = across * across + up * up
        inside = np.flatnonzero(square < 1.0)
        square = square[inside]
        length = np.sqrt(-2.0 * np.log(square) / square)
        for side in (across, up):
            part = numbers[done : done + len(inside)]
            np.multiply(side[inside[: len(part)]], length[: len(part)], out=part)
            done += len(part)
    return torch.from_numpy(numbers).reshape(shape)


def discrete_normal(secret: str, address: str, count: int, std: float) -> np.ndarray:
    """Return whole numbers, int64, of which `x` has a probability proportional to ``exp(-x^2 / (2 std^2))``.

    This is the discrete Gaussian of Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020,
    in float64. A rounded normal number `x` has the probability that a normal one has between ``x - 1/2`` and ``x + 1/2``:
    too much by ``m(x)``, the mean of ``exp(-(2 x v + v^2) / (2 std^2))`` over ``|v| < 1/2``. So it is taken with the
    probability ``m(0) / m(x)``, which is all but 1 where `std` is large.

    Args:
        secret: What nobody else knows.
        address: What the numbers are for.
        count: How many.
        std: The parameter; from 1 on it is the standard deviation but for 1e-6.

    Example:
        >>> discrete_normal("a secret", "round 1", 3, 10.0).dtype
        dtype('int64')
    """
    drawn = normal(secret, address, torch.Size([count])).mul_(std).round_().numpy()
    numbers, coins, refused = np.empty(count, np.int64), _uniforms(secret, f"{address}|coins"), [np.empty(0, np.int64)]
    for start in range(0, count, PIECE):
        piece = drawn[start : start + PIECE]
        numbers[start : start + PIECE] = piece
        refused.append(start + np.flatnonzero(~_accept(piece, std, coins(len(piece)))))
    if len(places := np.concatenate(refused)):
        numbers[places] = discrete_normal(secret, f"{address}|again", len(places), std)
    return numbers


def _accept(drawn: np.ndarray, std: float, coins: np.ndarray) -> np.ndarray:
    """Return which rounded normal numbers are taken, by coins in (0, 1): below ``m(0) / m(x)``."""
    taken: np.ndarray = coins < 1.0 - float(np.square(drawn).max(initial=0.0)) / (8.0 * std**4)  # less than all of them
    unsure = np.flatnonzero(~taken)
    taken[unsure] = coins[unsure] * _excess(drawn[unsure], std) < _excess(np.zeros(1), std)
    return taken


def _excess(drawn: np.ndarray, std: float) -> np.ndarray:
    """Return ``m(x)``: the mean of ``exp(-v^2 / (2 std^2)) cosh(x v / std^2)`` over ``0 < v < 1/2``."""
    nodes, weights = _quadrature()
    heights = np.exp(-(nodes**2) / (2.0 * std**2)) * np.cosh(np.outer(drawn, nodes) / std**2)
    excess: np.ndarray = heights @ weights
    return excess


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Return places in (0, 1/2) and weights of a mean, exact for polynomials up to degree 63 (Gauss and Legendre)."""
    nodes, weights = np.polynomial.legendre.leggauss(32)
    return 0.25 * (nodes + 1.0), 0.5 * weights


def digest_of(*values: Any) -> str:
    """Return a hash of trees of tensors and plain values, for the address of noise that is to cover them."""
    digest = hashlib.sha256(MAKER.encode())
    _add_to(digest, values)
    return digest.hexdigest()


def _add_to(digest: Any, value: Any) -> None:
    """Add a tree to a hash; of objects that are not plain values their class, which is the same in each process."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(f"|{name}=".encode())
            _add_to(digest, value[name])
    elif isinstance(value, list | tuple):
        for entry in value:
            _add_to(digest, entry)
    elif isinstance(value, Tensor):
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    else:
        plain = value is None or isinstance(value, bool | int | float | complex | str | bytes)
        digest.update(f"|{value!r}".encode() if plain else f"|{type(value).__qualname__}".encode())


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
    return {name: drawn[name].mul_(std).to(value.device).add_(value) for name, value in values.items()}
