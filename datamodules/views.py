"""Datasets held once, and clients as views of them.

Which datasets are rows of tensors in memory, so that a batch of them is an index and not a walk over samples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

Indices = np.ndarray
"""One-dimensional int64 array of sample indices."""


class ArrayDataset(Dataset[Any]):
    """A dataset of samples `(x, y)` in two tensors, read a batch at a time.

    Args:
        x: Inputs, shape `(samples, ...)`; may be kept as uint8 to save memory.
        y: Targets, shape `(samples, ...)`.
        transform: Maps a batch of inputs `(batch, ...)` to the model's inputs (to float, scaled, normalised).

    Raises:
        ValueError: If the numbers of inputs and targets differ.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import ArrayDataset
        >>> data = ArrayDataset(torch.arange(4, dtype=torch.uint8), torch.arange(4), transform=lambda x: x / 2)
        >>> data.rows(torch.tensor([3, 1]))
        [tensor([1.5000, 0.5000]), tensor([3, 1])]
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
        """Return the batch `[x, y]` of the given int64 indices, with the same values as stacked single samples."""
        x = self.x[indices]
        return [x if self.transform is None else self.transform(x), self.y[indices]]


class FileSamples(Dataset[Any]):
    """Base of datasets whose samples are read from files when they are asked for.

    Args:
        size: Number of samples.
        cache: Keep what is read in memory, in each process that reads it.
    """

    def __init__(self, size: int, cache: bool) -> None:
        self._size = size
        self._cache: dict[int, Any] | None = {} if cache else None

    def __len__(self) -> int:
        return self._size

    def read(self, index: int) -> Any:
        """Return what the files of a sample hold."""
        raise NotImplementedError

    def read_cached(self, index: int) -> Any:
        """Return what :meth:`read` returns, from memory where it is kept."""
        if self._cache is None:
            return self.read(index)
        if index not in self._cache:
            self._cache[index] = self.read(index)
        return self._cache[index]


class Rows(Sequence[Any]):
    """The samples of a batch before they are read.

    Any collate function sees a sequence of samples. `collate_rows` reads the whole batch at once.

    Args:
        dataset: An `ArrayDataset` or `TensorDataset`.
        indices: Indices of the batch, int64 of shape `(batch,)`.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import ArrayDataset
        >>> from fedlightning.datamodules.views import Rows
        >>> rows = Rows(ArrayDataset(torch.arange(4), torch.arange(4)), torch.tensor([3, 1]))
        >>> len(rows), rows[0], rows.batch()
        (2, (tensor(3), tensor(3)), [tensor([3, 1]), tensor([3, 1])])
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
        """Return the whole batch at once."""
        if isinstance(self.dataset, ArrayDataset):
            return self.dataset.rows(self.indices)
        assert isinstance(self.dataset, TensorDataset)
        return [tensor[self.indices] for tensor in self.dataset.tensors]


def collate_rows(samples: Sequence[Any]) -> Any:
    """Return a batch as `default_collate` does; for `Rows`, with the same values in a fraction of the time.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.views import collate_rows
        >>> collate_rows([(torch.zeros(2), 0), (torch.ones(2), 1)])
        [tensor([[0., 0.], [1., 1.]]), tensor([0, 1])]
    """
    return samples.batch() if isinstance(samples, Rows) else default_collate(list(samples))


class IndexView(Dataset[Any]):
    """The samples of `dataset` at `indices`, in that order. Nested `Subset` and views are flattened.

    Args:
        dataset: A map-style dataset.
        indices: One-dimensional integers into `dataset`.

    Attributes:
        whole: Whether batches can be read from tensors at once.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import ArrayDataset, IndexView
        >>> view = IndexView(ArrayDataset(torch.arange(10), torch.arange(10)), [7, 2])
        >>> len(view), view[0]
        (2, (tensor(7), tensor(7)))
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
        return samples_at(self.dataset, chosen.tolist())


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return how a loader reads its samples: its workers and its memory, as keyword arguments of a `DataLoader`.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> worker_options(DataLoader([1, 2]))["num_workers"]
        0
    """
    names = ["num_workers", "pin_memory", "timeout", "worker_init_fn"]
    names += ["prefetch_factor", "multiprocessing_context"] if loader.num_workers > 0 else []
    return {name: getattr(loader, name) for name in names}


def samples_at(dataset: Any, positions: Sequence[int]) -> Any:
    """Return samples as a `DataLoader` reads them: all at once where the dataset has `__getitems__`.

    Example:
        >>> from fedlightning.datamodules.views import samples_at
        >>> samples_at("abc", [2, 0])
        ['c', 'a']
    """
    fetch = getattr(dataset, "__getitems__", None)
    return fetch(list(positions)) if fetch else [dataset[position] for position in positions]


LARGEST_UNION = 2**30
"""Bytes up to which the parts of a `ConcatDataset` are joined in memory; larger ones are read sample by sample."""


def rows_of(dataset: Any) -> tuple[Any, Tensor | None] | None:
    """Return a dataset as rows of another one whose samples are rows of tensors, or `None` if it is not that.

    A `ConcatDataset` of such datasets is joined when its rows are first asked for, and kept as long as it lives.

    Example:
        >>> import torch
        >>> from torch.utils.data import Subset, TensorDataset
        >>> from fedlightning.datamodules.views import rows_of
        >>> data = TensorDataset(torch.zeros(5))
        >>> source, rows = rows_of(Subset(Subset(data, [4, 2, 0]), range(2)))
        >>> source is data, rows
        (True, tensor([4, 2]))
        >>> rows_of([1, 2]) is None
        True
    """
    if type(dataset) in (TensorDataset, ArrayDataset):
        return dataset, None
    if type(dataset) is ConcatDataset:
        joined = _joined(dataset)
        return None if joined is None else (joined, None)
    if type(dataset) not in (Subset, IndexView):
        return None
    source_rows = rows_of(dataset.dataset)
    if source_rows is None:
        return None
    source, rows = source_rows
    if type(dataset) is IndexView:
        indices = dataset.indices
    else:
        listed = np.asarray(dataset.indices)
        if listed.ndim != 1 or listed.dtype.kind not in "iu":
            return (source, torch.empty(0, dtype=torch.int64)) if not listed.size else None
        indices = torch.from_numpy(np.where(listed < 0, listed + len(dataset.dataset), listed).astype(np.int64))
    return source, indices if rows is None else rows[indices]


def tensors_of(source: Any) -> tuple[Tensor, ...]:
    """Return the tensors whose rows are the samples of `source`.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import ArrayDataset
        >>> from fedlightning.datamodules.views import tensors_of
        >>> [tuple(part.shape) for part in tensors_of(ArrayDataset(torch.zeros(5, 2), torch.zeros(5)))]
        [(5, 2), (5,)]
    """
    return (source.x, source.y) if isinstance(source, ArrayDataset) else source.tensors


def is_plain(part: Tensor) -> bool:
    """Return True if rows of `part` can be copied one by one with the values and strides that indexing gives.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.views import is_plain
        >>> is_plain(torch.zeros(3, 2)), is_plain(torch.zeros(3, 2).T)
        (True, False)
    """
    return type(part) is Tensor and part.layout == torch.strided and part.is_contiguous() and not part.requires_grad


_UNIONS: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def _joined(union: ConcatDataset[Any]) -> Any:
    """Return the parts of a union as one dataset in memory, or `None` if they do not fit together."""
    parts = [rows_of(part) for part in union.datasets]
    part_rows = [part for part in parts if part is not None]
    if len(part_rows) < len(parts):
        return None
    sources = [source for source, _ in part_rows]
    tensors = [tensors_of(source) for source in sources]
    first = tensors[0]
    alike = all(
        type(source) is type(sources[0])
        and getattr(source, "transform", None) is getattr(sources[0], "transform", None)
        and [(part.shape[1:], part.dtype, part.device) for part in columns]
        == [(part.shape[1:], part.dtype, part.device) for part in first]
        and all(map(is_plain, columns))
        for source, columns in zip(sources, tensors, strict=True)
    )
    if not alike or len(union) * sum(part[:1].nbytes for part in first) > LARGEST_UNION:
        return None
    made_of = [
        (part.data_ptr(), part.shape, part._version, None if rows is None else hash(rows.numpy().tobytes()))
        for columns, (_, rows) in zip(tensors, part_rows, strict=True)
        for part in columns
    ]
    cached = _UNIONS.get(union)
    if cached is not None and cached[0] == made_of:
        return cached[1]
    columns = [
        torch.cat(
            [
                columns[place] if rows is None else columns[place][rows]
                for columns, (_, rows) in zip(tensors, part_rows, strict=True)
            ]
        )
        for place in range(len(first))
    ]
    union_dataset: Any = TensorDataset(*columns)
    if type(sources[0]) is ArrayDataset:
        union_dataset = ArrayDataset(columns[0], columns[1], sources[0].transform)
    _UNIONS[union] = (made_of, union_dataset)
    return union_dataset
