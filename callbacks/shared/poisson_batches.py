"""Batches into which every record falls with the same probability, drawn from a secret."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from fedlightning.algorithm import isolated
from fedlightning.callbacks.shared.secret_noise import uniform


class PoissonBatches(Sampler[list[int]]):
    """Batches of an epoch: each record is in each of them with probability 1 / batches, independently of all others.

    A batch that nobody falls into holds the first record, whose gradient has to be left out: `sizes` says 0 then. A model's
    step may not be able to do with no record at all, and the step itself must not be left out, or whoever sees the model
    could tell.

    Args:
        records: Records of the data set.
        batches: Batches of an epoch.
        secret: What nobody else knows.
        address: What the draws are for.

    Attributes:
        sizes: Records of the batches that this epoch has drawn so far.
        epoch: Epochs begun.

    Example:
        >>> sampler = PoissonBatches(100, 4, "a secret", "visit 1")
        >>> len(list(sampler)), len(sampler.sizes), sampler.rate
        (4, 4, 0.25)
    """

    def __init__(self, records: int, batches: int, secret: str, address: str) -> None:
        self.records, self.batches = records, batches
        self.sizes: list[int] = []
        self.epoch = 0
        self._secret, self._address = secret, address

    @property
    def rate(self) -> float:
        """Probability with which a record is in a batch."""
        return 1.0 / self.batches

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        """Draw the batches of the next epoch."""
        epoch, self.sizes = self.epoch, []
        self.epoch += 1
        for index in range(self.batches):
            coins = uniform(self._secret, f"{self._address}|epoch {epoch}|batch {index}", self.records)
            drawn = np.flatnonzero(coins < self.rate).tolist()
            self.sizes.append(len(drawn))
            yield drawn or [0]


def poisson_loader(loader: Any, owner: str, secret: str, address: str) -> tuple[DataLoader[Any], PoissonBatches]:
    """Return a loader over the same records with Poisson batches of the same expected size, and its sampler.

    Raises:
        ValueError: If the records cannot be drawn one by one.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        raise ValueError(
            f"{owner} draws each record with the same probability, and cannot from {type(loader).__name__} over "
            f"{type(getattr(loader, 'dataset', loader)).__name__}. Give a DataLoader with a batch_size over a "
            "map-style dataset."
        )
    count = len(loader.dataset)  # type: ignore[arg-type]
    orders = _only_orders(loader.sampler, count, owner)
    if not orders or type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            f"{owner} draws every record of the data set with the same probability, in the place of "
            f"{type(loader if orders else loader.sampler).__name__}, which draws others or otherwise. Give a DataLoader "
            "without it; for a part of the records, a Subset."
        )
    if count == 0 or len(loader) == 0:
        raise ValueError(f"{owner} got a loader without a batch.")
    sampler = PoissonBatches(count, len(loader), secret, address)
    made: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )
    return made, sampler


def _only_orders(sampler: Any, count: int, owner: str) -> bool:
    """Return whether an epoch of a sampler has every record once, or would have (a RandomSampler with replacement)."""
    if type(sampler) in (RandomSampler, SequentialSampler):
        return True
    with isolated(0, owner, "sampler"):
        return sorted(sampler) == list(range(count))
