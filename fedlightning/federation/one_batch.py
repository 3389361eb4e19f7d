"""A loader of the user, looked at without iterating it: batches of the same shape, and their shapes in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fedlightning.datamodules.own_generators import kept


def spread(loader: Any, whole: bool = True) -> DataLoader[Any] | None:
    """Return a loader of the same batches' shape over the same dataset, without a random order or a state of its own."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    samples, size = len(loader.dataset), loader.batch_size  # type: ignore[arg-type]
    batches = max(samples // size, 1)
    order = [index for start in range(batches) for index in range(start, samples, batches)]
    return DataLoader(
        loader.dataset,
        batch_size=size,
        sampler=order if whole else order[:size],
        drop_last=loader.drop_last and whole,
        collate_fn=loader.collate_fn,
        num_workers=min(loader.num_workers, 1),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        generator=torch.Generator(),
    )


def shapes(loader: DataLoader[Any]) -> str:
    """Return the shapes of a loader's first batch in words."""

    def of(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key}: {of(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return (
                "(" + ", ".join(map(of, value)) + ")" if len(value) < 6 else f"{type(value).__name__} of {len(value)}"
            )
        return type(value).__name__

    with kept(loader.dataset):
        return of(next(iter(loader)))
