"""Batches of data in memory, made by indexing: equal to the loader's batches, without its overhead."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.datamodules.views import ArrayDataset, IndexView, collate_rows


def resident_batches(loader: Any, device: torch.device) -> ResidentBatches | None:
    """Return the batches of `loader` made by indexing, or `None` if only the loader itself can make them.

    The loader must be a plain `DataLoader` over whole tensors in memory, without workers, with this package's collate
    function, in the order of an `AddressedSampler` or in the data's own, and with a generator of its own (a loader
    without one draws a number from torch's global generator in every epoch).

    Args:
        loader: Any loader.
        device: Device of the batches.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules import IIDPartitioner, Partitioned
        >>> from fedlightning.datamodules.resident import resident_batches
        >>> dataset = TensorDataset(torch.arange(30))
        >>> data = Partitioned.from_datasets(dataset, partitioner=IIDPartitioner(3, stratified=False), batch_size=4)
        >>> data.setup()
        >>> loader = data.client_dataloader("0", "train")
        >>> all(torch.equal(a, b) for [a], [b] in zip(loader, resident_batches(loader, torch.device("cpu"))))
        True
    """
    if type(loader) is not DataLoader or loader.num_workers or loader.collate_fn is not collate_rows:
        return None
    view = loader.dataset
    if type(view) is not IndexView or not view.whole or loader.generator is None:
        return None
    if loader.pin_memory and device.type == "cpu":
        return None
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return None
    if type(loader.sampler) not in (AddressedSampler, SequentialSampler) or len(view) == 0:
        return None
    sampler = loader.sampler
    if isinstance(sampler, AddressedSampler) and (sampler.size != len(view) or sampler.world_size != 1):
        return None
    return ResidentBatches(loader, device)


class ResidentBatches:
    """The batches of a loader whose samples are rows of tensors in memory.

    Args:
        loader: A loader that `resident_batches` accepts.
        device: Device of the batches. Data without a transform are kept there. Transforms run where the data are, so
            that their results do not change by a bit.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import DigitsDataModule
        >>> from fedlightning.datamodules.resident import ResidentBatches
        >>> data = DigitsDataModule()
        >>> data.setup()
        >>> x, y = next(iter(ResidentBatches(data.train_dataloader(), torch.device("cpu"))))
        >>> x.shape
        torch.Size([32, 1, 8, 8])
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Yield the batches of one epoch in the loader's order, each as the list of tensors that the loader gives."""
        loader = self._loader
        view, size = loader.dataset, loader.batch_size
        assert isinstance(view, IndexView) and size is not None
        rows = view.indices
        if type(loader.sampler) is AddressedSampler:
            rows = rows[loader.sampler.permutation()]
        count, rest = divmod(rows.shape[0], size)
        source, device = view.dataset, self._device
        if device.type != "cpu":
            rows = rows.to(device)
        batch_of = partial(rows_on_device, source, device) if device.type != "cpu" else gather(source)
        for chosen in rows[: count * size].view(count, size).unbind(0) if count else ():
            yield batch_of(chosen)
        if rest and not loader.drop_last:
            yield batch_of(rows[count * size :])


def gather(source: Any) -> Callable[[Tensor], list[Tensor]]:
    """Return the function from indices to a batch on the CPU.

    Args:
        source: An `ArrayDataset` or `TensorDataset`.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.resident import gather
        >>> gather(TensorDataset(torch.arange(10)))(torch.tensor([7, 2]))
        [tensor([7, 2])]
    """
    parts = parts_of(source)
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

    Args:
        source: An `ArrayDataset` or `TensorDataset`.
        device: The device.
        chosen: Indices of the rows.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.resident import rows_on_device
        >>> rows_on_device(TensorDataset(torch.ones(4)), torch.device("meta"), torch.tensor([0, 2]))[0].device
        device(type='meta')
    """
    if isinstance(source, ArrayDataset) and source.transform is not None:
        return [part.to(device) for part in source.rows(chosen.cpu())]
    return [on_device(source, index, part, device)[chosen] for index, part in enumerate(parts_of(source))]


_COPIES: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, Tensor]]] = weakref.WeakKeyDictionary()


def on_device(source: Any, index: int, part: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a dataset's tensor on `device`.

    It is made once and kept for as long as the dataset lives and its tensor does not change.

    Args:
        source: The dataset.
        index: Position of the tensor in it.
        part: The tensor.
        device: The device.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.resident import on_device
        >>> data, device = TensorDataset(torch.ones(4)), torch.device("meta")
        >>> on_device(data, 0, data.tensors[0], device) is on_device(data, 0, data.tensors[0], device)
        True
    """
    copies = _COPIES.setdefault(source, {})
    made_of = (part.data_ptr(), part.shape, part._version)
    found = copies.get((index, device))
    if found is None or found[0] != made_of:
        found = copies[index, device] = (made_of, part.to(device))
    return found[1]


def parts_of(source: Any) -> tuple[Tensor, ...]:
    """Return the tensors whose rows are the samples of `source`.

    Args:
        source: An `ArrayDataset` or `TensorDataset`.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import ArrayDataset
        >>> from fedlightning.datamodules.resident import parts_of
        >>> [tuple(part.shape) for part in parts_of(ArrayDataset(torch.zeros(5, 2), torch.zeros(5)))]
        [(5, 2), (5,)]
    """
    return (source.x, source.y) if isinstance(source, ArrayDataset) else source.tensors


def is_plain(part: Tensor) -> bool:
    """Return True if rows of `part` can be copied one by one with the values and strides that indexing gives.

    Args:
        part: A tensor of samples.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.resident import is_plain
        >>> is_plain(torch.zeros(3, 2)), is_plain(torch.zeros(3, 2).T)
        (True, False)
    """
    return type(part) is Tensor and part.layout == torch.strided and part.is_contiguous() and not part.requires_grad
