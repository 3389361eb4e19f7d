"""Batches of data that lies in memory, by index slices: the same batches as the loader's, without its machinery."""

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
    """The batches of ``loader`` by index slices, or ``None`` where only the loader itself can make them.

    It has to be a plain ``DataLoader`` over whole tensors in memory, without workers, with this package's collate
    function, in the order of an :class:`AddressedSampler` or in the data's own, and with a generator of its own (a
    loader without one draws a number from torch's global generator in every epoch).
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
    """Iterates over the batches of a loader whose samples are rows of tensors in memory.

    Args:
        loader: one that :func:`resident_batches` accepts.
        device: where the batches are wanted; data without a transform is kept there, transforms run where the
            data lies, so that their bits do not change.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device

    def __iter__(self) -> Iterator[list[Tensor]]:
        """One epoch in the loader's order; each batch is the list of tensors that the loader would give."""
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
    """The function from indices to a batch on the CPU."""
    parts = parts_of(source)
    by_index: Callable[[Tensor], list[Tensor]] = (
        source.rows if isinstance(source, ArrayDataset) else lambda chosen: [part[chosen] for part in parts]
    )
    if not all(map(is_plain, parts)):
        return by_index
    transform = source.transform if isinstance(source, ArrayDataset) else None

    def batch_of(chosen: Tensor) -> list[Tensor]:
        try:
            batch = [part.index_select(0, chosen) for part in parts]  # the bits of indexing, several times faster
        except IndexError:  # a negative index counts from the end
            return by_index(chosen)
        return batch if transform is None else [transform(batch[0]), batch[1]]

    return batch_of


def rows_on_device(source: Any, device: torch.device, chosen: Tensor) -> list[Tensor]:
    """The batch of the given rows on ``device``, another one than the CPU."""
    if isinstance(source, ArrayDataset) and source.transform is not None:
        return [part.to(device) for part in source.rows(chosen.cpu())]
    return [on_device(source, index, part, device)[chosen] for index, part in enumerate(parts_of(source))]


_COPIES: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, Tensor]]] = weakref.WeakKeyDictionary()


def on_device(source: Any, index: int, part: Tensor, device: torch.device) -> Tensor:
    """A copy of a dataset's tensor on ``device``, made once for as long as the dataset lives and stays what it is."""
    copies = _COPIES.setdefault(source, {})
    mark = (part.data_ptr(), part.shape, part._version)
    found = copies.get((index, device))
    if found is None or found[0] != mark:
        found = copies[index, device] = (mark, part.to(device))
    return found[1]


def parts_of(source: Any) -> tuple[Tensor, ...]:
    """The tensors whose rows are the samples of ``source``."""
    return (source.x, source.y) if isinstance(source, ArrayDataset) else source.tensors


def is_plain(part: Tensor) -> bool:
    """Whether rows of ``part`` can be copied one by one: what indexing gives then has the same values and strides."""
    return type(part) is Tensor and part.layout == torch.strided and part.is_contiguous() and not part.requires_grad
