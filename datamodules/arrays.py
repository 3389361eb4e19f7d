"""Data sets that fit in memory and come with a training and a test part, divided by a partitioner.

From datasets, keys and a partitioner to every client's train, validation and test samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.datamodules.groups import codes_of, cut_groups, keys_of_groups, refuse_shared, rows_of_groups
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.labels import as_classes, encode, read_keys
from fedlightning.datamodules.plans import Partitioner
from fedlightning.datamodules.public_from_another import Public, share_of
from fedlightning.datamodules.skew import DirichletPartitioner
from fedlightning.datamodules.views import ArrayDataset, Indices
from fedlightning.ranges import PositiveInt, ShareBelowOne, at_most_one, checked
from fedlightning.seeding import generator


def suited(partitioner: Partitioner, labels: Mapping[str, np.ndarray | None], owner: str) -> Partitioner:
    """Return a partitioner that can divide samples with or without class labels.

    Example:
        >>> from fedlightning.datamodules import DirichletPartitioner
        >>> from fedlightning.datamodules.arrays import suited
        >>> suited(DirichletPartitioner(3, 0.5), {"train": None}, "Prices")
        Traceback (most recent call last):
        ValueError: DirichletPartitioner divides samples by label, and the train data of Prices have no class labels...
    """
    lacking = next((split for split, array in labels.items() if array is None), None)
    if partitioner.needs != "labels" or lacking is None:
        return partitioner
    name, other = type(partitioner).__name__, partitioner.without_labels()
    if other is None:
        raise ValueError(
            f"{name} divides samples by label, and the {lacking} data of {owner} have no class labels (none were found, "
            "or the targets are continuous); pass labels=... to Partitioned (an array, or a function dataset -> array), "
            "or divide by something else: IIDPartitioner, QuantitySkewPartitioner or NaturalPartitioner."
        )
    rank_zero_warn(
        f"The {lacking} data of {owner} have no class labels, so {name} cuts them at random instead of class by class. "
        f"{name}(stratified=False) does so without this warning.",
        category=UserWarning,
    )
    return other


def some_rows(size: int, limit: int | None, seed: int, split: str) -> Tensor | None:
    """Return the rows to use of a dataset, at random; `None` if all are used."""
    if limit is None or limit >= size:
        return None
    return torch.randperm(size, generator=generator(seed, "subset", split))[:limit]


def given_groups(owner: object, partitioner: Partitioner, split: str, dataset: Any) -> np.ndarray:
    """Return each sample's group as `NaturalPartitioner(groups=...)` gives it."""
    source = getattr(partitioner, "groups", None)
    if source is not None and (groups := read_keys(dataset, split, source)) is not None:
        return groups
    raise ValueError(
        f"{type(owner).__name__} has no natural groups; use a partitioner that divides by label or by size, such as "
        "DirichletPartitioner."
    )


def keys_for(
    partitioner: Partitioner,
    datasets: Mapping[str, Any],
    labels: Mapping[str, np.ndarray | None],
    groups: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """Return what a partitioner divides each dataset by: labels, groups, the number of samples, or the samples."""
    if partitioner.needs == "samples":
        return dict(datasets)
    if partitioner.needs == "groups":
        return {split: groups(split, data) for split, data in datasets.items()}
    if partitioner.needs == "labels":
        return dict(labels)
    return {split: len(data) for split, data in datasets.items()}


def federate(
    partitioner: Partitioner,
    datasets: dict[str, Dataset[Any]],
    labels: dict[str, np.ndarray | None],
    keys: dict[str, Any],
    seed: int,
    val_fraction: float = 0.2,
    test_fraction: float = 0.2,
    val_seed: int | None = None,
    groups: Mapping[str, Any] | None = None,
) -> tuple[list[str], dict[str, Split]]:
    """Divide datasets among clients by one plan.

    The plan is made on the training data and applied to every other split, so that a client's validation and test
    samples are mixed like its training samples. A split without a dataset is cut from each client's training samples,
    stratified by label: the test part first, then `val_fraction` of what is left.

    With `groups`, each sample's group by split, whole groups are divided and cut: a group (a patient) has the label that
    most of its samples have, and sizes are numbers of groups.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules import IIDPartitioner
        >>> from fedlightning.datamodules.arrays import federate
        >>> labels = {"train": np.arange(3).repeat(10)}
        >>> ids, splits = federate(IIDPartitioner(3), {"train": range(30)}, labels, labels, seed=0)
        >>> ids, {name: [len(held) for held in split.indices] for name, split in splits.items()}
        (['0', '1', '2'], {'train': [6, 6, 6], 'test': [2, 2, 2], 'val': [2, 2, 2]})
    """
    codes: dict[str, np.ndarray] = {}
    if groups is not None:
        refuse_shared(groups)
        codes = {name: codes_of(groups[name], len(cast(Sized, data)), name) for name, data in datasets.items()}
        keys = {name: keys_of_groups(keys[name], groups[name], partitioner.needs) for name in datasets}
    plan = partitioner.plan(keys["train"], generator(seed, "partition", "plan"))
    indices: dict[str, list[Indices]] = {
        name: plan.split(keys[name], generator(seed, "partition", name)) for name in datasets
    }
    if groups is not None:
        indices = {name: rows_of_groups(parts, codes[name]) for name, parts in indices.items()}
    splits = {name: Split(datasets[name], indices[name], labels[name], groups=codes.get(name)) for name in datasets}
    seeds = {"test": seed, "val": seed if val_seed is None else val_seed}
    for name, fraction in (("test", test_fraction), ("val", val_fraction)):
        if name not in datasets and fraction > 0:
            splits[name] = cut_off(splits["train"], plan.client_ids, name, fraction, seeds[name])
    return list(plan.client_ids), splits


def cut_off(train: Split, clients: Sequence[str], name: str, fraction: float, seed: int) -> Split:
    """Take a share of every client's training samples out of the training split, and return it as a split of its own."""
    pairs = [
        cut_groups(np.asarray(rows), fraction, generator(seed, "partition", name, client), train.labels, train.groups)
        for client, rows in zip(clients, train.indices, strict=True)
    ]
    train.indices = [rest for rest, _ in pairs]
    return Split(train.dataset, [part for _, part in pairs], train.labels, groups=train.groups)


class ArrayFederatedDataModule(IndexedFederatedDataModule):
    """Base of data modules over arrays; subclasses implement `load`.

    Training and test samples are divided by the same plan. Validation samples are cut from each client's training
    samples, stratified by label if the targets are classes.

    Targets may be classes or measurements. Where they are continuous, as in a regression, there are no class counts,
    and partitioners that divide by label are refused; IID, quantity-skewed and natural partitions work.

    Args:
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        batch_size: Number of samples in a batch.
        val_fraction: Share of every client's training samples for validation, in [0, 1).
        seed: Seed of the partition and of the validation cut.
        max_train: Use only this many training samples, chosen by `seed` (for a quick trial).
        max_test: Use only this many test samples, chosen by `seed`.
        val_seed: Seed of the validation cut alone, so that repetitions can change nothing else. `None` is `seed`.
        test_fraction: Join the training and test parts, divide all samples, and cut this share of every client's samples
            off for testing, as FedProx and pFedMe do. `None`: the test part stays the test part.
        group: What samples belong to and never part from (a patient, a speaker), as an array, a mapping from split to
            array, or a function `dataset -> array`; with the official test part, a group with samples in both parts is
            refused. Shares and sizes are then by group. `None`: samples are independent.
        public_fraction: As `public`, for a share.
        public: Public data, which are in nobody's training, validation or test data: a share of every client's training
            samples, in [0, 1), or another data set, as a Dataset or a data module (its training data). What a client holds
            too is left out of that.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If a number is out of its range.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import ArrayDataset, ArrayFederatedDataModule, IIDPartitioner
        >>> class Toy(ArrayFederatedDataModule):
        ...     def load(self):
        ...         x, y = torch.zeros(30, 4), torch.arange(3).repeat(10)
        ...         return ArrayDataset(x, y), ArrayDataset(x[:6], y[:6])
        >>> data = Toy(IIDPartitioner(3))
        >>> data.setup()
        >>> [data.num_samples("0", split) for split in ("train", "val", "test")]
        [8, 2, 2]
    """

    @checked
    @at_most_one("test_fraction", "max_test", why="there is no official test part then, so use max_train alone.")
    def __init__(
        self,
        partitioner: Partitioner | None = None,
        batch_size: int = 32,
        val_fraction: ShareBelowOne = 0.2,
        seed: int = 0,
        max_train: PositiveInt | None = None,
        max_test: PositiveInt | None = None,
        val_seed: int | None = None,
        test_fraction: ShareBelowOne | None = None,
        group: Any = None,
        public_fraction: ShareBelowOne = 0.0,
        public: Public = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, seed, public=public, **options)
        self.public_fraction = share_of(self, public, public_fraction)
        self.partitioner = partitioner if partitioner is not None else DirichletPartitioner(10, 0.5)
        self.val_fraction, self.max_train, self.max_test = val_fraction, max_train, max_test
        self.val_seed, self.test_fraction, self.group = val_seed, test_fraction, group
        self._divides = self.partitioner

    @abstractmethod
    def load(self) -> tuple[ArrayDataset, ArrayDataset]:
        """Return the training and the test samples.

        `y` holds classes 0, 1, ... as int64 of shape `(samples,)`, or continuous targets as floats of any shape
        `(samples, ...)`.
        """

    def labels(self, split: str, dataset: ArrayDataset) -> np.ndarray | None:
        """Return each sample's class, int64 `(samples,)`, or `None` if the targets are continuous.

        Whole numbers are classes. Floats are classes if they are whole numbers and few
        (`fedlightning.datamodules.labels.read_keys`); override this method where that is not so.

        Args:
            split: `"train"` or `"test"`.
            dataset: The samples of that split.
        """
        return as_classes(dataset.y)

    def groups(self, split: str, dataset: ArrayDataset) -> np.ndarray:
        """Return each sample's group for a natural partition: what `NaturalPartitioner(groups=...)` gives.

        With a function `dataset -> array` there, samples can be grouped by a feature: `lambda data: data.x[:, 0] > 0`.

        Args:
            split: `"train"` or `"test"`.
            dataset: The samples of that split.

        Raises:
            ValueError: If the data set has no groups and the partitioner brings none.
        """
        return given_groups(self, self.partitioner, split, dataset)

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        train, test = self.load()
        if self.test_fraction is not None:
            whole = ArrayDataset(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]), train.transform)
            datasets = {"train": self._some(whole, self.max_train, "train")}
        else:
            datasets = {
                "train": self._some(train, self.max_train, "train"),
                "test": self._some(test, self.max_test, "test"),
            }
        labels = encode({split: self.labels(split, data) for split, data in datasets.items()})
        if any(array is None for array in labels.values()):  # a few whole numbers in one part alone make no classes
            labels = dict.fromkeys(labels)
        self._divides = suited(self.partitioner, labels, type(self).__name__)
        keys = keys_for(self._divides, datasets, labels, self.groups)
        shares = self.val_fraction, self.test_fraction or 0.0
        groups = None
        if self.group is not None:
            groups = {split: read_keys(data, split, self.group) for split, data in datasets.items()}
        return federate(self._divides, dict(datasets), labels, keys, self.seed, *shares, self.val_seed, groups)

    @property
    def partition_name(self) -> str:
        return self._divides.describe()

    def _some(self, dataset: ArrayDataset, limit: int | None, split: str) -> ArrayDataset:
        chosen = some_rows(len(dataset), limit, self.seed, split)
        if chosen is None:
            return dataset
        chosen = chosen.sort().values
        return ArrayDataset(dataset.x[chosen], dataset.y[chosen], dataset.transform)
