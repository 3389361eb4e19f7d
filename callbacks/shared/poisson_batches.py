"""Batches into which every record falls with the same probability, drawn from a secret."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from fedlightning.algorithm import isolated
from fedlightning.callbacks.shared.secret_noise import uniform

RECORDS = (dict, list, tuple, np.ndarray, Tensor)
"""Types of a record of a list of which there is one object for each; equal numbers or words may be one object."""


class PoissonBatches(Sampler[list[int]]):
    """Batches of an epoch: each record is in each of them with probability 1 / batches, independently of all others.

    With groups each group is drawn so, with all of its records, or with some of them where it has many.

    A batch that nobody falls into holds the first record, whose gradient has to be left out: `sizes` says 0 then. A model's
    step may not be able to do with no record at all, and the step itself must not be left out, or whoever sees the model
    could tell.

    Args:
        records: Records of the data set.
        batches: Batches of an epoch.
        secret: What nobody else knows.
        address: What the draws are for.
        groups: Group of each record; `None`: each is drawn by itself.
        most: Records of a group in a batch at most, drawn anew for each batch.

    Attributes:
        units: Records, or groups, that are drawn.
        sizes: Records of the batches that this epoch has drawn so far.
        owners: With groups, the place among the batch's groups of each of its records, for each of these batches.
        epoch: Epochs begun.

    Example:
        >>> sampler = PoissonBatches(100, 4, "a secret", "visit 1")
        >>> len(list(sampler)), len(sampler.sizes), sampler.rate
        (4, 4, 0.25)
    """

    def __init__(
        self, records: int, batches: int, secret: str, address: str, groups: np.ndarray | None = None, most: int = 1
    ) -> None:
        self.records, self.batches, self.most = records, batches, most
        self._members = None if groups is None else [np.flatnonzero(groups == group) for group in np.unique(groups)]
        self.units = records if self._members is None else len(self._members)
        self.sizes: list[int] = []
        self.owners: list[np.ndarray] = []
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
        epoch, self.sizes, self.owners = self.epoch, [], []
        self.epoch += 1
        for index in range(self.batches):
            address = f"{self._address}|epoch {epoch}|batch {index}"
            coins = uniform(self._secret, address, self.units)
            drawn = np.flatnonzero(coins < self.rate).tolist()
            if self._members is not None:
                parts = [self._some(unit, address) for unit in drawn]
                self.owners.append(np.repeat(np.arange(len(parts)), [len(part) for part in parts]))
                drawn = [int(record) for part in parts for record in part]
            self.sizes.append(len(drawn))
            yield drawn or [0]

    def _some(self, unit: int, address: str) -> np.ndarray:
        """Return the records of a group, or as many of them as may be in a batch."""
        assert self._members is not None
        members = self._members[unit]
        if len(members) <= self.most:
            return members
        return members[np.argsort(uniform(self._secret, f"{address}|group {unit}", len(members)))[: self.most]]


def poisson_loader(
    loader: Any, owner: str, secret: str, address: str, groups: np.ndarray | None = None, most: int = 1
) -> tuple[DataLoader[Any], PoissonBatches]:
    """Return a loader over the same records with Poisson batches of the same expected size, and its sampler.

    Args:
        loader: The loader.
        owner: Who asks.
        secret: What nobody else knows.
        address: What the draws are for.
        groups: As for :class:`PoissonBatches`.
        most: As for :class:`PoissonBatches`.

    Raises:
        ValueError: If the records cannot be drawn one by one.
    """
    refuse_undrawable(loader, owner, grouped=groups is not None)
    count = len(loader.dataset)
    if count == 0 or len(loader) == 0:
        raise ValueError(f"{owner} got a loader without a batch.")
    if groups is not None and len(groups) != count:
        raise ValueError(f"{owner} got the groups of {len(groups)} samples for {count}. Give one for each sample.")
    sampler = PoissonBatches(count, len(loader), secret, address, groups, most)
    names = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, batch_sampler=sampler, **options), sampler


def refuse_undrawable(loader: Any, owner: str, grouped: bool) -> None:
    """Refuse a loader whose records cannot be drawn one by one.

    Args:
        loader: The loader.
        owner: Who asks.
        grouped: Whether groups are drawn: copies of a record are then one unit, if their groups say so.

    Raises:
        ValueError: With a way out.
    """
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if plain and loader.batch_size is not None and not isinstance(loader.dataset, IterableDataset):
        if _only_orders(loader.sampler, len(loader.dataset), owner):
            rows = _rows_of(loader.dataset, np.arange(len(loader.dataset)))
            copies = 0 if grouped else np.unique(rows, axis=0, return_counts=True)[1].max(initial=0)
            if copies > 1:
                raise ValueError(
                    f"{owner} hides a record that is drawn once, and the training data have one {copies} times, each drawn "
                    "by itself. Give each record once (to weigh some more, weigh them in the loss by numbers that do not "
                    "come from the data), or hide groups: unit='patient', with one for all copies."
                )
            return
    parts = (type(getattr(loader, name, None)).__name__ for name in ("sampler", "dataset"))
    raise ValueError(
        f"{owner} draws every record of a data set with the same probability, and cannot from {type(loader).__name__} "
        f"({', '.join(parts)}). Give a DataLoader with a batch_size over a map-style dataset, and no sampler that draws "
        "others or otherwise; for a part of the records, a Subset."
    )


def _only_orders(sampler: Any, count: int, owner: str) -> bool:
    """Return whether an epoch of a sampler has every record once, or would have (a RandomSampler with replacement)."""
    if type(sampler) in (RandomSampler, SequentialSampler):
        return True
    with isolated(0, owner, "sampler"):
        return sorted(sampler) == list(range(count))


def _rows_of(dataset: Any, places: np.ndarray) -> np.ndarray:
    """Return where some records come from, a data set and a place there each.

    Subset and ConcatDataset say so; a wrapper of as many records as its `dataset` has (an augmentation) gives each once. A
    list tells by its objects.
    """
    if isinstance(dataset, ConcatDataset):
        starts = zip(dataset.datasets, [0, *dataset.cumulative_sizes], strict=False)
        insides = ((part, places[(start <= places) & (places < start + len(part))] - start) for part, start in starts)  # type: ignore[arg-type]
        return np.concatenate([_rows_of(part, inside) for part, inside in insides])
    source: Any = getattr(dataset, "dataset", None)
    indices: Any = getattr(dataset, "indices", None)
    if hasattr(source, "__len__") and hasattr(indices, "__len__") and len(indices) == len(dataset):
        return _rows_of(source, np.asarray(indices)[places] % len(source))
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and len(source) == len(dataset):
        return _rows_of(source, places)
    if isinstance(dataset, list | tuple) and all(isinstance(dataset[place], RECORDS) for place in places):
        return np.stack([np.zeros_like(places), [id(dataset[place]) for place in places]], axis=1)
    return np.stack([np.full_like(places, id(dataset)), places], axis=1)
