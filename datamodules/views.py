"""Datasets held once, and clients as light views of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

Indices = np.ndarray
"""One-dimensional int64 array of sample indices."""


class ArrayDataset(Dataset[Any]):
    """Samples ``(x, y)`` of two tensors, fetched a batch at a time.

    Args:
        x: inputs, shape ``(n, ...)``; may be kept as uint8 to save memory.
        y: targets, shape ``(n, ...)``.
        transform: maps a batch of inputs ``(b, ...)`` to what the model sees (to float, scaled, normalised).
    """

    def __init__(self, x: Tensor, y: Tensor, transform: Callable[[Tensor], Tensor] | None = None) -> None:
        if len(x) != len(y):
            raise ValueError(f"ArrayDataset got {len(x)} inputs and {len(y)} targets; give one target for each input.")
        self.x, self.y, self.transform = x, y, transform

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.rows(torch.tensor([int(index)]))
        return x[0], y[0]

    def rows(self, indices: Tensor) -> list[Tensor]:
        """The batch ``[x, y]`` of the given int64 indices, the same values as stacking single items."""
        x = self.x[indices]
        return [x if self.transform is None else self.transform(x), self.y[indices]]


class Rows(Sequence[Any]):
    """The samples of a batch, not yet fetched: a sequence of samples for any collate function, and one gather for
    :func:`collate_rows`.
    """

    def __init__(self, dataset: Dataset[Any], indices: Tensor) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self.dataset[int(i)] for i in self.indices[position]]
        return self.dataset[int(self.indices[position])]

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[int(i)] for i in self.indices)

    def batch(self) -> list[Tensor]:
        """The whole batch at once."""
        if isinstance(self.dataset, ArrayDataset):
            return self.dataset.rows(self.indices)
        assert isinstance(self.dataset, TensorDataset)
        return [tensor[self.indices] for tensor in self.dataset.tensors]


def collate_rows(samples: Sequence[Any]) -> Any:
    """``default_collate``, or one gather where the samples are :class:`Rows` (same values, a fraction of the time)."""
    return samples.batch() if isinstance(samples, Rows) else default_collate(list(samples))


class IndexView(Dataset[Any]):
    """The samples of ``dataset`` at ``indices``, in that order. Nested ``Subset`` and views are flattened.

    Args:
        dataset: a map-style dataset.
        indices: one-dimensional integers into ``dataset``.
    """

    def __init__(self, dataset: Dataset[Any], indices: Any) -> None:
        index = np.ascontiguousarray(indices, dtype=np.int64).reshape(-1)
        base: Any = dataset
        while type(base) in (Subset, IndexView):
            index, base = np.asarray(base.indices, dtype=np.int64)[index], base.dataset
        self.dataset: Any = base
        self.indices = torch.from_numpy(index if index.flags.writeable else index.copy())
        # Exact types only: a subclass may change what an item is.
        self.whole = type(base) in (ArrayDataset, TensorDataset)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]

    def __getitems__(self, positions: list[int]) -> Sequence[Any]:
        chosen = self.indices[torch.tensor(positions, dtype=torch.int64)]
        if self.whole:
            return Rows(self.dataset, chosen)
        fetch = getattr(self.dataset, "__getitems__", None)
        items: Sequence[Any] = fetch(chosen.tolist()) if fetch else [self.dataset[i] for i in chosen.tolist()]
        return items
