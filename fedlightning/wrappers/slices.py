"""Entries of which only some rows and columns are held: taking them out, and averaging them back in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedlightning.tensors import State

Slices = dict[str, tuple[Tensor | None, ...]]
"""Per state entry and dimension the kept indices; ``None``: all."""


def mesh(index: tuple[Tensor | None, ...], shape: torch.Size) -> tuple[Tensor, ...]:
    """An open mesh: indexing with it picks the kept indices of every dimension."""
    chosen = [torch.arange(size) if kept is None else kept for kept, size in zip(index, shape, strict=True)]
    return tuple(part.view([-1 if d == k else 1 for k in range(len(shape))]) for d, part in enumerate(chosen))


def take(state: Mapping[str, Tensor], slices: Slices) -> State:
    """The sub-model's entries of a full state."""
    return {n: value[mesh(slices[n], value.shape)] if n in slices else value for n, value in state.items()}


class ElementMean:
    r"""Weighted mean of states that each hold a part of the entries: :math:`\sum_i n_i w_i / \sum_i n_i` per element,
    over those that hold it. Accumulated in float64; what is identical everywhere stays exactly what it is.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._integers: State = {}

    def add(self, state: Mapping[str, Tensor], like: Mapping[str, Tensor], slices: Slices, weight: float) -> None:
        """Fold in the sub-model ``state``, whose entries are ``slices`` of entries shaped as in ``like``."""
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
            total[at] += value.double() * weight
            weights[at] += weight

    def result(self, old: Mapping[str, Tensor]) -> State:
        """The mean; elements that nobody held are ``old``'s. Integer entries are the first state's."""
        mean: State = dict(self._integers)
        for name, (total, weights, first, same) in self._sums.items():
            kept = torch.where(weights > 0, first, old[name])
            mean[name] = torch.where(same | (weights == 0), kept, (total / weights).to(kept.dtype))
        return mean
