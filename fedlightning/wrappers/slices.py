"""Arithmetic on sub-model states: take some rows and columns of each entry, and average them back in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedlightning.tensors import State, widen

Slices = dict[str, tuple[Tensor | None, ...]]
"""For each state entry and dimension the kept indices; `None` keeps all."""


def mesh(index: tuple[Tensor | None, ...], shape: torch.Size) -> tuple[Tensor, ...]:
    """Return an open mesh: indexing with it selects the kept indices of every dimension.

    Example:
        >>> import torch
        >>> from fedlightning.wrappers.slices import mesh
        >>> table = torch.arange(6).view(2, 3)
        >>> table[mesh((None, torch.tensor([0, 2])), table.shape)]
        tensor([[0, 2],
                [3, 5]])
    """
    chosen = [torch.arange(size) if kept is None else kept for kept, size in zip(index, shape, strict=True)]
    return tuple(part.view([-1 if d == k else 1 for k in range(len(shape))]) for d, part in enumerate(chosen))


def take(state: Mapping[str, Tensor], slices: Slices) -> State:
    """Return the sub-model's entries of a full state.

    Example:
        >>> import torch
        >>> from fedlightning.wrappers.slices import take
        >>> state = {"weight": torch.arange(6).view(2, 3), "bias": torch.ones(2)}
        >>> {name: tuple(value.shape) for name, value in take(state, {"weight": (None, torch.arange(2))}).items()}
        {'weight': (2, 2), 'bias': (2,)}
    """
    return {n: value[mesh(slices[n], value.shape)] if n in slices else value for n, value in state.items()}


class ElementMean:
    r"""Weighted mean of states that each hold a part of the entries: :math:`\sum_i n_i w_i / \sum_i n_i` per element.

    Each element is averaged over the states that hold it, accumulated in float64. An element that is identical in all
    of them stays exactly as it is.

    Example:
        >>> import torch
        >>> from fedlightning.wrappers.slices import ElementMean
        >>> full = {"w": torch.zeros(3)}
        >>> mean = ElementMean()
        >>> mean.add({"w": torch.tensor([1.0, 1.0])}, full, {"w": (torch.tensor([0, 1]),)}, weight=1)
        >>> mean.add({"w": torch.tensor([4.0])}, full, {"w": (torch.tensor([0]),)}, weight=2)
        >>> mean.result(full)["w"]
        tensor([3., 1., 0.])
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._integers: State = {}

    def add(self, state: Mapping[str, Tensor], like: Mapping[str, Tensor], slices: Slices, weight: float) -> None:
        """Add a sub-model to the mean."""
        for name, value in state.items() if weight > 0 else ():
            if not value.is_floating_point():
                self._integers.setdefault(name, value)
                continue
            shape = like[name].shape
            at = mesh(slices.get(name, (None,) * len(shape)), shape)
            if name not in self._sums:
                zeros = torch.zeros(shape, dtype=torch.float64)
                self._sums[name] = zeros, zeros.clone(), like[name].clone(), torch.ones(shape, dtype=torch.bool)
            total, weights, first, same = self._sums[name]
            unseen = weights[at] == 0
            first[at] = torch.where(unseen, value, first[at])
            same[at] &= first[at] == value
            total[at] += widen(value) * weight
            weights[at] += weight

    def result(self, old: Mapping[str, Tensor], total: float | None = None) -> State:
        """Return the mean."""
        mean: State = dict(self._integers)
        for name, (sums, weights, first, same) in self._sums.items():
            kept = torch.where(weights > 0, first, old[name])
            if total is not None:
                absent = (total - weights).clamp_min(0.0)
                same = same & ((absent == 0) | (first == old[name]))
                sums, weights = sums + absent * widen(old[name]), weights + absent
            mean[name] = torch.where(same | (weights == 0), kept, (sums / weights).to(kept.dtype))
        return mean
