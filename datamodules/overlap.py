"""Samples that two data sets share, bit for bit in what a model reads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.in_memory import rows_of
from fedlightning.datamodules.own_generators import kept
from fedlightning.datamodules.public import without_labels
from fedlightning.datamodules.views import IndexView, samples_at
from fedlightning.seeding import isolated

MOST_READ = 20_000
"""Samples up to which data that are not tensors in memory are read for the comparison."""
AT_ONCE = 512


def is_cheap(dataset: Any, count: int) -> bool:
    """Return True if so many samples of a dataset may be read to compare them.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.overlap import is_cheap
        >>> is_cheap(TensorDataset(torch.zeros(3)), 10**6), is_cheap([1, 2], 10**6)
        (True, False)
    """
    return count <= MOST_READ or rows_of(dataset) is not None


def digests(dataset: Any, positions: np.ndarray, collate: Callable[[Any], Any]) -> list[bytes] | None:
    """Return a hash of the inputs of each sample, without labels; `None` if they are no tensors.

    Example:
        >>> import numpy as np, torch
        >>> from torch.utils.data import TensorDataset, default_collate
        >>> from fedlightning.datamodules.overlap import digests
        >>> data = TensorDataset(torch.tensor([[1.0], [2.0], [1.0]]), torch.arange(3))
        >>> one, other, third = digests(data, np.arange(3), default_collate)
        >>> one == third, one == other
        (True, False)
    """
    view, found = IndexView(dataset, positions), list[bytes]()
    with isolated("overlap"), kept(dataset):
        for size, batch in _batches(view, collate):
            rows = _rows(without_labels(batch), size)
            if rows is None:
                return None
            found += rows
    return found


def _batches(view: IndexView, collate: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """Yield all samples in batches, with their number."""
    for start in range(0, len(view), AT_ONCE):
        places = range(start, min(start + AT_ONCE, len(view)))
        yield len(places), collate(samples_at(view, places))


def _rows(inputs: Any, size: int) -> list[bytes] | None:
    """Return a hash of each row of a batch's inputs."""
    parts = [inputs[key] for key in sorted(inputs, key=str)] if isinstance(inputs, Mapping) else [inputs]
    if not parts or not all(isinstance(part, Tensor) and part.ndim and len(part) == size for part in parts):
        return None
    tables = [part.detach().cpu().contiguous().reshape(size, -1).view(torch.uint8).numpy() for part in parts]
    kinds = repr([(part.dtype, tuple(part.shape[1:])) for part in parts]).encode()
    return [hashlib.blake2b(kinds + b"".join(table[row].tobytes() for table in tables), digest_size=16).digest()
            for row in range(size)]  # fmt: skip


def content_hash(dataset: Any, collate: Callable[[Any], Any], most: int = 64) -> str | None:
    """Return a short hash of what a dataset holds; `None` if that is no tensors, or different at every look.

    Data in memory are read whole, others at `most` positions spread over them.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset, default_collate
        >>> from fedlightning.datamodules.overlap import content_hash
        >>> one, other = (content_hash(TensorDataset(torch.full((9, 2), x)), default_collate) for x in (0.0, 1.0))
        >>> one == other
        False
    """
    size = len(dataset)
    whole = rows_of(dataset) is not None
    positions = np.arange(size) if whole or size <= most else np.linspace(0, size - 1, most).astype(np.int64)
    looks = [_content(dataset, positions, collate) for _ in range(1 if whole else 2)]
    return looks[0] if all(look == looks[0] for look in looks) else None


def look(dataset: Any, samples: int = 4, values: int = 16) -> str | None:
    """Return a short hash of a few samples of data in memory, to tell other data; `None` if they are elsewhere.

    Fractions count to a sixteenth of the largest of them, so that the last bits, which may differ from one machine to
    another where data are standardised, do not count.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.overlap import look
        >>> x = torch.linspace(0.1, 0.9, 12).reshape(6, 2)
        >>> one, other, third = (look(TensorDataset(data)) for data in (x, x * (1 + 1e-6), x + 1.0))
        >>> one == other, one == third
        (True, False)
    """
    if rows_of(dataset) is None or not len(dataset):
        return None
    digest, size = hashlib.sha256(), len(dataset)
    for place in np.linspace(0, size - 1, min(samples, size)).astype(np.int64).tolist():
        for part in _tensors(dataset[place]):
            flat = part.detach().cpu().reshape(-1)
            some = flat[torch.linspace(0, max(len(flat) - 1, 0), min(values, len(flat))).long()]
            digest.update(repr((str(part.dtype), tuple(part.shape), _coarse(some))).encode())
    return digest.hexdigest()[:12]


def _coarse(some: Tensor) -> list[int]:
    """Return values as integers: fractions in steps of about a sixteenth of the largest, whose exponent comes first."""
    if not some.is_floating_point():
        return [int(value) for value in some.tolist()] if not some.is_complex() else []
    found = torch.nan_to_num(some.double(), nan=-7.7, posinf=7.7, neginf=-7.7)
    exponent = math.frexp(1.37 * float(found.abs().max()))[1] if len(found) else 0
    return [exponent, *torch.round(found * 15.7 / 2.0**exponent).long().tolist()]


def _content(dataset: Any, positions: np.ndarray, collate: Callable[[Any], Any]) -> str | None:
    view, digest = IndexView(dataset, positions), hashlib.sha256(str(len(dataset)).encode())
    with isolated("content"), kept(dataset):
        for _, batch in _batches(view, collate):
            tensors = list(_tensors(batch))
            if not tensors:
                return None
            for part in tensors:
                digest.update(repr((part.dtype, tuple(part.shape))).encode())
                digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
