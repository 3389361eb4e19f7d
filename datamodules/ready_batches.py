"""Loaders whose datasets give whole batches (`batch_size=None`), and the samples in any loader."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from fedlightning.datamodules.own_generators import kept
from fedlightning.seeding import isolated

_COUNTED: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()


def gives_batches(loader: Any) -> bool:
    """Return whether each item of a loader's dataset is a batch: it has neither a batch size nor a sampler of batches.

    Example:
        >>> from torch.utils.data import SequentialSampler
        >>> indices = BatchSampler(SequentialSampler(range(6)), 2, False)
        >>> gives_batches(DataLoader(range(6), batch_size=None)), gives_batches(DataLoader(range(6), batch_size=2))
        (True, False)
        >>> gives_batches(DataLoader(range(6), sampler=indices, batch_size=None))  # its dataset is of samples
        False
    """
    no_batches = isinstance(loader, DataLoader) and loader.batch_sampler is None
    return no_batches and not isinstance(loader.sampler, BatchSampler)


def samples_in(loader: DataLoader[Any] | None) -> int:
    """Return the samples of a loader: the size of its dataset, or where that gives batches, what one pass counts in them."""
    if loader is None:
        return 0
    if not gives_batches(loader):
        return len(loader.dataset)  # type: ignore[arg-type]
    if loader not in _COUNTED:
        with isolated(0, "samples"), kept(loader.dataset, loader.sampler):
            note_samples(loader, sum(samples_of(batch) for batch in islice(loader, len(loader))))
    return _COUNTED[loader]


def note_samples(loader: DataLoader[Any], count: int) -> None:
    """Note how many samples the batches of a loader have, where that is known, so that nobody counts them."""
    _COUNTED[loader] = count


def samples_of(batch: Any) -> int:
    """Return the samples in a batch: what most of its tensors have in their first dimension, or one.

    Example:
        >>> import torch
        >>> samples_of((torch.zeros(8, 3), torch.zeros(8))), samples_of((torch.zeros(3), torch.tensor(1)))
        (8, 1)
    """
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda leaf: sizes.append(len(leaf) if leaf.dim() else 1))
    size, count = Counter(sizes).most_common(1)[0] if sizes else (1, 1)
    return size if 2 * count > len(sizes) else 1
