"""Batches of data in memory, made by indexing: equal to the loader's batches, without its overhead."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.datamodules.views import ArrayDataset, IndexView, collate_rows, is_plain, rows_of, tensors_of

WHOLE_ORDER = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw the order of an epoch when its first sample is asked for, and nothing later."""


def resident_batches(loader: Any, device: torch.device) -> ResidentBatches | SampledBatches | None:
    """Return the batches of `loader` made by indexing, or `None` if only the loader itself can make them.

    The loader must be a plain `DataLoader` over whole tensors in memory (`views.rows_of`), without workers and with
    this package's collate function or torch's. Its samplers may be any: they are asked for their indices as the loader
    asks them.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules import IIDPartitioner, Partitioned
        >>> from fedlightning.datamodules.resident_batches import resident_batches
        >>> dataset = TensorDataset(torch.arange(30))
        >>> data = Partitioned.from_datasets(dataset, partitioner=IIDPartitioner(3, stratified=False), batch_size=4)
        >>> data.setup()
        >>> loader = data.client_dataloader("0", "train")
        >>> all(torch.equal(a, b) for [a], [b] in zip(loader, resident_batches(loader, torch.device("cpu"))))
        True
    """
    if type(loader) is not DataLoader or loader.num_workers:
        return None
    view = loader.dataset
    if loader.collate_fn not in (collate_rows, default_collate):
        return None
    if loader.pin_memory and device.type == "cpu":
        return None
    if loader.batch_sampler is None or not isinstance(view, Dataset) or (rows := rows_of(view)) is None:
        return None
    if len(view) == 0 or not (type(view) is IndexView or all(map(is_plain, tensors_of(rows[0])))):  # type: ignore[arg-type]
        return None
    sampler = loader.sampler
    plain = type(loader.batch_sampler) is BatchSampler and type(sampler) in (AddressedSampler, SequentialSampler)
    # With a batch sampler of the user's, the loader's own sampler means nothing, and batch_size is None.
    plain = plain and loader.batch_size is not None and len(sampler) == len(view)  # type: ignore[arg-type]
    if not plain or loader.generator is None:
        return None if isinstance(sampler, AddressedSampler) else SampledBatches(loader, device, rows)
    if isinstance(sampler, AddressedSampler) and sampler.world_size != 1:
        return None
    return ResidentBatches(loader, device, rows)


class ResidentBatches:
    """The batches of a loader whose samples are rows of tensors in memory.

    Args:
        loader: A loader that `resident_batches` accepts.
        device: Device of the batches. Data without a transform are kept there. Transforms run where the data are, so
            that their results do not change by a bit.
        rows: The loader's dataset as `rows_of` returns it. `None` asks there.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import DigitsDataModule
        >>> from fedlightning.datamodules.resident_batches import ResidentBatches
        >>> data = DigitsDataModule()
        >>> data.setup()
        >>> x, y = next(iter(ResidentBatches(data.train_dataloader(), torch.device("cpu"))))
        >>> x.shape
        torch.Size([32, 1, 8, 8])
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device, rows: tuple[Any, Tensor | None] | None = None
    ) -> None:
        self._loader, self._device = loader, device
        source_rows = rows or rows_of(loader.dataset)
        assert source_rows is not None
        self.source, indices = source_rows
        self.indices = torch.arange(len(self.source)) if indices is None else indices

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Yield the batches of one epoch in the loader's order, each as the list of tensors that the loader gives."""
        loader = self._loader
        size, rows = loader.batch_size, self.indices
        assert size is not None
        if type(loader.sampler) is AddressedSampler:
            rows = rows.index_select(0, loader.sampler.permutation())
        count, rest = divmod(rows.shape[0], size)
        source, device = self.source, self._device
        if device.type != "cpu":
            rows = rows.to(device)
        batch_of = partial(rows_on_device, source, device) if device.type != "cpu" else gather(source)
        for chosen in rows[: count * size].view(count, size).unbind(0) if count else ():
            yield batch_of(chosen)
        if rest and not loader.drop_last:
            yield batch_of(rows[count * size :])


class SampledBatches:
    """The batches of a loader in memory whose samplers draw from global generators or are somebody's own.

    They are the loader's, and the same numbers are drawn from the same generators at the same times.

    Args:
        loader: A loader that `resident_batches` accepts.
        device: Device of the batches, as for `ResidentBatches`.
        rows: The loader's dataset as `rows_of` returns it.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from fedlightning.datamodules.resident_batches import resident_batches
        >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=4, shuffle=True)
        >>> found = []
        >>> for batches in (loader, resident_batches(loader, torch.device("cpu"))):
        ...     _ = torch.manual_seed(0)
        ...     found.append([x.tolist() for [x] in batches])
        >>> found[0] == found[1]
        True
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, rows: tuple[Any, Tensor | None]) -> None:
        self._loader, self._device = loader, device
        self.source, self.indices = rows

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Return the batches of one epoch. As with the loader, the workers' seed is drawn now and the order later."""
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return self._batches()

    def _batches(self) -> Iterator[list[Tensor]]:
        device, indices = self._device, self.indices
        batch_of = gather(self.source) if device.type == "cpu" else partial(rows_on_device, self.source, device)
        for chosen in self._positions():
            rows = chosen if indices is None else indices[chosen]
            yield batch_of(rows if device.type == "cpu" else rows.to(device))

    def _positions(self) -> Iterator[Tensor]:
        """Yield the samples of every batch, as positions in the loader's dataset."""
        loader = self._loader
        if loader.batch_size is None or type(loader.sampler) not in WHOLE_ORDER:
            for positions in loader.batch_sampler:  # type: ignore[union-attr]
                yield torch.as_tensor(positions, dtype=torch.int64)
            return
        size = loader.batch_size
        assert size is not None
        order = whole_order(loader.sampler)
        whole = len(order) // size * size
        yield from order[:whole].split(size) if whole else ()
        if whole < len(order) and not loader.drop_last:
            yield order[whole:]


def whole_order(sampler: Any) -> Tensor:
    """Return all that a sampler yields in an epoch, int64 `(samples,)`.

    Example:
        >>> from torch.utils.data import SequentialSampler
        >>> from fedlightning.datamodules.resident_batches import whole_order
        >>> whole_order(SequentialSampler(range(3)))
        tensor([0, 1, 2])
    """
    if type(sampler) is SequentialSampler:
        return torch.arange(len(sampler))
    return torch.tensor(list(sampler), dtype=torch.int64)


def gather(source: Any) -> Callable[[Tensor], list[Tensor]]:
    """Return the function from indices to a batch on the CPU.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.resident_batches import gather
        >>> gather(TensorDataset(torch.arange(10)))(torch.tensor([7, 2]))
        [tensor([7, 2])]
    """
    parts = tensors_of(source)
    by_index: Callable[[Tensor], list[Tensor]] = (
        source.rows if isinstance(source, ArrayDataset) else lambda chosen: [part[chosen] for part in parts]
    )
    if not all(map(is_plain, parts)):
        return by_index
    transform = source.transform if isinstance(source, ArrayDataset) else None

    def batch_of(chosen: Tensor) -> list[Tensor]:
        try:
            batch = [part.index_select(0, chosen) for part in parts]  # the same bits as indexing, several times faster
        except IndexError:  # a negative index counts from the end
            return by_index(chosen)
        return batch if transform is None else [transform(batch[0]), batch[1]]

    return batch_of


def rows_on_device(source: Any, device: torch.device, chosen: Tensor) -> list[Tensor]:
    """Return the batch of the given rows on a device other than the CPU.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.resident_batches import rows_on_device
        >>> rows_on_device(TensorDataset(torch.ones(4)), torch.device("meta"), torch.tensor([0, 2]))[0].device
        device(type='meta')
    """
    if isinstance(source, ArrayDataset) and source.transform is not None:
        return [part.to(device) for part in source.rows(chosen.cpu())]
    return [on_device(source, index, part, device)[chosen] for index, part in enumerate(tensors_of(source))]


_COPIES: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, Tensor]]] = weakref.WeakKeyDictionary()


def on_device(source: Any, index: int, part: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a dataset's tensor on `device`.

    It is made once and kept for as long as the dataset lives and its tensor does not change.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.resident_batches import on_device
        >>> data, device = TensorDataset(torch.ones(4)), torch.device("meta")
        >>> on_device(data, 0, data.tensors[0], device) is on_device(data, 0, data.tensors[0], device)
        True
    """
    copies = _COPIES.setdefault(source, {})
    made_of = (part.data_ptr(), part.shape, part._version)
    cached = copies.get((index, device))
    if cached is None or cached[0] != made_of:
        cached = copies[index, device] = (made_of, part.to(device))
    return cached[1]
