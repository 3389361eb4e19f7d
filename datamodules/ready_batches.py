"""Loaders whose datasets give whole batches (`batch_size=None`), and the samples in any loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from fedlightning.datamodules.own_generators import kept, readdress
from fedlightning.seeding import isolated

_COUNTED: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()


class CombinedBatches(IterableDataset[Any]):
    """The batches of a Lightning `CombinedLoader`, each a dict or list of its loaders' batches; all samples count.

    Args:
        combined: The loader. Its order is the epoch's, as that of any other: by torch's global generator.

    Example:
        >>> pairs = CombinedLoader({"x": DataLoader(range(4), batch_size=2), "u": DataLoader(range(6), batch_size=2)})
        >>> batches = CombinedBatches(pairs)
        >>> len(batches), [batch["x"].tolist() for batch in batches], batches.num_samples
        (2, [[0, 1], [2, 3]], 10)
    """

    def __init__(self, combined: CombinedLoader) -> None:
        self.iterables, self.loaders = combined.iterables, combined.flattened
        self.mode = combined._mode  # private: nothing public tells how loaders are combined

    @property
    def num_samples(self) -> int:
        """The samples of all loaders."""
        return sum(samples_in(loader) for loader in self.loaders)

    def __len__(self) -> int:
        return (min if self.mode == "min_size" else max)(len(loader) for loader in self.loaders)

    def __iter__(self) -> Iterator[Any]:
        for place, loader in enumerate(self.loaders):
            readdress(loader, int(torch.randint(2**31, ())), place)
        for batch, _, _ in CombinedLoader(self.iterables, self.mode):
            yield batch


def unchanged(batch: Any) -> Any:
    """Return a batch as it is: the `collate_fn` of loaders whose datasets give batches."""
    return batch


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
    if isinstance(loader.dataset, CombinedBatches):
        return loader.dataset.num_samples
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
