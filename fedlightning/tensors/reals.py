"""The real numbers of an entry, in which all arithmetic on entries is done.

A complex entry is as many pairs of real numbers, as torch's optimizers see it: lengths and products, an element's sign or
rank, its second moment and its noise are those of the real and of the imaginary parts. Sums are accumulated in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fedlightning.tensors.modules import State


def has_mean(entry: Tensor) -> bool:
    """Return True if an entry holds floating-point numbers, real or complex; integers and booleans are never averaged.

    Example:
        >>> has_mean(torch.zeros(1, dtype=torch.complex64)), has_mean(torch.zeros(1, dtype=torch.int64))
        (True, False)
    """
    return entry.is_floating_point() or entry.is_complex()


def as_reals(entry: Tensor) -> Tensor:
    """Return an entry, a complex one as a view of shape `(*shape, 2)`: its real and its imaginary parts.

    Example:
        >>> as_reals(torch.tensor([1 + 2j]))
        tensor([[1., 2.]])
        >>> as_reals(torch.tensor([3.0]))
        tensor([3.])
    """
    return torch.view_as_real(entry) if entry.is_complex() else entry


GradientT = TypeVar("GradientT", Tensor, Tensor | None)


def dense(gradient: GradientT) -> GradientT:
    """Return a gradient, a sparse one (`nn.Embedding(sparse=True)`) dense: little of torch's arithmetic takes others.

    Example:
        >>> dense(torch.tensor([0.0, 2.0]).to_sparse())
        tensor([0., 2.])
    """
    return gradient if gradient is None or gradient.layout == torch.strided else gradient.to_dense()


def widen(entry: Tensor) -> Tensor:
    """Return the real numbers of an entry in float64, or in float32 on Apple's GPUs, which have no float64.

    Those of a complex entry are a copy: torch saves no two views of one memory that have different types.

    Example:
        >>> widen(torch.tensor([1 + 2j]))
        tensor([[1., 2.]], dtype=torch.float64)
    """
    dtype = torch.float32 if entry.device.type == "mps" else torch.float64
    return as_reals(entry).to(dtype, copy=entry.is_complex())


def narrow(numbers: Tensor, like: Tensor) -> Tensor:
    """Return real numbers as an entry: what `widen` made of one, also in another shape, in the shape and dtype of `like`.

    Example:
        >>> narrow(torch.tensor([1.0, 2.0], dtype=torch.float64), torch.zeros(1, dtype=torch.complex64))
        tensor([1.+2.j])
    """
    if like.is_complex():
        numbers = torch.view_as_complex(numbers.reshape(*like.shape, 2).contiguous())
    return numbers.reshape(like.shape).to(like.dtype)


def to_row(state: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Tensor:
    """Return the real numbers of entries one after another, in float64.

    Args:
        state: Any state.
        names: Entries to take, in this order. `None`: all.

    Example:
        >>> to_row({"a": torch.tensor([1 + 2j]), "b": torch.tensor([[3.0]])})
        tensor([1., 2., 3.], dtype=torch.float64)
    """
    rows = [widen(state[name]).flatten() for name in (state if names is None else names)]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)


def add_row(state: Mapping[str, Tensor], row: Tensor) -> State:
    """Return entries with the numbers of a row added, as `to_row` has them.

    Example:
        >>> add_row({"a": torch.tensor([1.0]), "b": torch.tensor([0j])}, torch.tensor([1.0, 2.0, 3.0]))
        {'a': tensor([2.]), 'b': tensor([2.+3.j])}
    """
    parts = row.split([as_reals(entry).numel() for entry in state.values()])
    return {
        name: narrow(widen(entry).flatten() + part, entry)
        for (name, entry), part in zip(state.items(), parts, strict=True)
    }
