"""Which datasets are rows of tensors in memory, so that a batch of them is an index and not a walk over samples."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fedlightning.datamodules.views import ArrayDataset, IndexView

LARGEST_UNION = 2**30
"""Bytes up to which the parts of a `ConcatDataset` are joined in memory; larger ones are read sample by sample."""


def rows_of(dataset: Any) -> tuple[Any, Tensor | None] | None:
    """Return a dataset as rows of another one whose samples are rows of tensors, or `None` if it is not that.

    A `ConcatDataset` of such datasets is joined when its rows are first asked for, and kept as long as it lives.

    Example:
        >>> import torch
        >>> from torch.utils.data import Subset, TensorDataset
        >>> from fedlightning.datamodules.in_memory import rows_of
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
    found = rows_of(dataset.dataset)
    if found is None:
        return None
    source, rows = found
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
        >>> from fedlightning.datamodules.in_memory import tensors_of
        >>> [tuple(part.shape) for part in tensors_of(ArrayDataset(torch.zeros(5, 2), torch.zeros(5)))]
        [(5, 2), (5,)]
    """
    return (source.x, source.y) if isinstance(source, ArrayDataset) else source.tensors


def is_plain(part: Tensor) -> bool:
    """Return True if rows of `part` can be copied one by one with the values and strides that indexing gives.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.in_memory import is_plain
        >>> is_plain(torch.zeros(3, 2)), is_plain(torch.zeros(3, 2).T)
        (True, False)
    """
    return type(part) is Tensor and part.layout == torch.strided and part.is_contiguous() and not part.requires_grad


_UNIONS: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def _joined(union: ConcatDataset[Any]) -> Any:
    """Return the parts of a union as one dataset in memory, or `None` if they do not fit together."""
    parts = [rows_of(part) for part in union.datasets]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    sources = [source for source, _ in found]
    tensors = [tensors_of(source) for source in sources]
    first = tensors[0]
    alike = all(
        type(source) is type(sources[0])
        and getattr(source, "transform", None) is getattr(sources[0], "transform", None)
        and [(part.shape[1:], part.dtype, part.device) for part in own]
        == [(part.shape[1:], part.dtype, part.device) for part in first]
        and all(map(is_plain, own))
        for source, own in zip(sources, tensors, strict=True)
    )
    if not alike or len(union) * sum(part[:1].nbytes for part in first) > LARGEST_UNION:
        return None
    made_of = [
        (part.data_ptr(), part.shape, part._version, None if rows is None else hash(rows.numpy().tobytes()))
        for own, (_, rows) in zip(tensors, found, strict=True)
        for part in own
    ]
    known = _UNIONS.get(union)
    if known is not None and known[0] == made_of:
        return known[1]
    columns = [
        torch.cat(
            [own[place] if rows is None else own[place][rows] for own, (_, rows) in zip(tensors, found, strict=True)]
        )
        for place in range(len(first))
    ]
    made: Any = TensorDataset(*columns)
    if type(sources[0]) is ArrayDataset:
        made = ArrayDataset(columns[0], columns[1], sources[0].transform)
    _UNIONS[union] = (made_of, made)
    return made
