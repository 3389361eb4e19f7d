"""Any LightningDataModule, divided among clients without changing it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from fedlightning.datamodules.arrays import federate, keys_for, suited
from fedlightning.datamodules.federated_data import refuse_drift
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.labels import encode, read_keys
from fedlightning.datamodules.partitioners import NaturalPartitioner
from fedlightning.datamodules.plans import Partitioner
from fedlightning.datamodules.public_from_another import Public, share_of
from fedlightning.datamodules.views import worker_options
from fedlightning.ranges import ShareBelowOne, checked
from fedlightning.seeding import isolated

_LOADER_HOOKS = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


CUT_OFF = 0.2
"""Share of the samples that is cut off for testing where there are no test data."""


class Partitioned(IndexedFederatedDataModule):
    """A data module that divides the data of an existing data module among clients.

    Every loader keeps its `batch_size`, `collate_fn`, workers, `pin_memory` and `drop_last`. Training batches are
    shuffled if and only if the original training loader shuffled, in an order addressed by (seed, client, round,
    epoch). The wrapped module's batch transfer hooks stay in force.

    The plan is made on the training data and applied to the other splits. Without a validation loader each client's
    validation samples are cut from its training samples; without a test loader each client's test samples are, before
    validation. Both cuts are stratified by label if labels are known, and depend on `seed` only.

    Args:
        datamodule: The data module. Its `prepare_data` and `setup` are called here.
        partitioner: Divides the samples among clients.
        val_fraction: Share of a client's training samples for validation if there is no validation loader.
        test_fraction: Share of a client's samples for testing if there is no test loader; 0 means no test split. `None` is
            0.2, and says that samples were cut off.
        labels: An array, a function `dataset -> array`, a mapping from split to one of these, or the name of an
            attribute or item. `None` searches as `fedlightning.datamodules.labels.read_keys` describes; a pass over all
            samples is only made if the partitioner needs labels. `False` says that there are none (a regression).
        group: What samples belong to and never part from (a patient, a speaker, a lesion), given as `labels`: no group
            is at two clients or in two splits. Shares, sizes and stratification are then by group. `None`: samples are
            independent.
        seed: Seed of every random choice.
        batch_size: Batch size of every loader. `None` keeps each loader's own.
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        sampler: Function that makes the sampler (or batch sampler) of a client's training batches from the client's
            dataset, a view with `dataset` and `indices` as torch's `Subset`: `lambda data:
            WeightedRandomSampler(weights_of(data), len(data))`. It takes the place of the wrapped loader's own, which knows
            nothing of clients. Samplers draw from torch's global generator, which has an address in every visit.
        public_fraction: As `public`, for a share.
        public: Public data, which are in nobody's training, validation or test data: a share of every client's training
            samples, in [0, 1), or another data set, as a Dataset or a data module (its training data). What a client holds
            too is left out of that.
        public_labels: Whether public batches keep their labels.

    Raises:
        ValueError: At `setup`, if the loaders cannot be divided or labels are missing.

    Example:
        >>> import torch
        >>> from lightning import LightningDataModule
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules import IIDPartitioner, Partitioned
        >>> dataset = TensorDataset(torch.zeros(30, 4), torch.arange(3).repeat(10))
        >>> data = Partitioned(LightningDataModule.from_datasets(dataset, batch_size=4), IIDPartitioner(3))
        >>> data.setup()
        >>> data.batch_size, [data.num_samples("0", split) for split in ("train", "val", "test")]
        (4, [6, 2, 2])
    """

    @checked
    def __init__(
        self,
        datamodule: LightningDataModule,
        partitioner: Partitioner,
        val_fraction: ShareBelowOne = 0.2,
        test_fraction: ShareBelowOne | None = None,
        labels: Any = None,
        seed: int = 0,
        batch_size: int | None = None,
        val_seed: int | None = None,
        sampler: Callable[[Any], Sampler[Any]] | None = None,
        group: Any = None,
        public_fraction: ShareBelowOne = 0.0,
        public: Public = None,
        public_labels: bool = True,
    ) -> None:
        super().__init__(
            batch_size=1 if batch_size is None else batch_size, seed=seed, public=public, public_labels=public_labels
        )
        for value, kind in ((datamodule, "LightningDataModule"), (partitioner, "Partitioner")):
            if isinstance(value, type | str | int):
                described = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
                raise ValueError(f"Partitioned got {described} for its {kind}. Pass an instance.")
        if not hasattr(datamodule, "train_dataloader"):
            raise ValueError(
                f"Partitioned got {type(datamodule).__name__} as datamodule. Pass a LightningDataModule, then the "
                "partitioner; of a dataset: LightningDataModule.from_datasets(dataset, batch_size=32)."
            )
        refuse_drift(self, datamodule)
        self.public_fraction = share_of(self, public, public_fraction)
        self.datamodule, self.partitioner, self.labels = datamodule, partitioner, labels
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self._override, self.val_seed = batch_size, val_seed
        self._divides = partitioner
        self.sampler, self.group = sampler, group
        for hook in _BATCH_HOOKS:
            # Only where the wrapped module has its own: Lightning prefers the data module's hook to the model's.
            if getattr(type(datamodule), hook) is not getattr(LightningDataModule, hook):
                setattr(self, hook, getattr(datamodule, hook))

    @property
    def original(self) -> LightningDataModule:
        """The user's data module, whose samples are divided; this one, where it was made from datasets."""
        return self if isinstance(self.datamodule, _Datasets) else self.datamodule

    @classmethod
    def from_datasets(  # type: ignore[override]
        cls,
        train: Dataset[Any],
        val: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        *,
        partitioner: Partitioner,
        batch_size: int = 32,
        num_workers: int = 0,
        collate_fn: Any = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        shuffle: bool = True,
        **options: Any,
    ) -> Partitioned:
        """Divide plain map-style datasets among clients.

        Args:
            train: Training data.
            val: Validation data. `None` cuts them from each client's training samples.
            test: Test data. `None` cuts them from each client's training samples.
            partitioner: As for `Partitioned`.
            batch_size: As for `DataLoader`.
            num_workers: As for `DataLoader`.
            collate_fn: As for `DataLoader`.
            drop_last: As for `DataLoader`, of the training data.
            pin_memory: As for `DataLoader`.
            shuffle: Draw training batches in a new order every epoch.
            options: The other arguments of `Partitioned`, by name.

        Example:
            >>> import torch
            >>> from torch.utils.data import TensorDataset
            >>> from fedlightning.datamodules import IIDPartitioner, Partitioned
            >>> dataset = TensorDataset(torch.zeros(30, 4), torch.arange(3).repeat(10))
            >>> data = Partitioned.from_datasets(dataset, partitioner=IIDPartitioner(3), test_fraction=0)
            >>> data.setup()
            >>> [data.num_samples("0", split) for split in ("train", "val", "test")]
            [8, 2, 0]
        """
        common = {
            "batch_size": batch_size,
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
        }
        datasets = _Datasets({"train": train, "val": val, "test": test}, common, shuffle, drop_last)
        return cls(datasets, partitioner, **options)

    @property
    def partition_name(self) -> str:
        return self._divides.describe()

    def prepare_data(self) -> None:
        """Call the wrapped module's `prepare_data`."""
        self.datamodule.prepare_data()

    def teardown(self, stage: str) -> None:
        """Call the wrapped module's `teardown`."""
        self.datamodule.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped module's state."""
        return self.datamodule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped module's state."""
        self.datamodule.load_state_dict(state_dict)

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        owner = type(self.datamodule).__name__
        if self.trainer is not None:
            self.datamodule.trainer = self.trainer
        wrapped: dict[str, Any] = {}
        # A random_split without a seed in the wrapped setup() is given one.
        with isolated(self.seed, "partition", "setup"):
            self.datamodule.setup("fit")
            wrapped["train"], wrapped["val"] = (self._wrapped_loader("train"), self._wrapped_loader("val"))
            self.datamodule.setup("test")
            wrapped["test"] = self._wrapped_loader("test")
        if wrapped["train"] is None:
            raise ValueError(f"{owner} has no train_dataloader; Partitioned divides the training data among clients.")
        loaders = {split: loader for split, loader in wrapped.items() if loader is not None}
        options, shuffles = {}, {}
        for split, loader in loaders.items():
            options[split], shuffles[split] = loader_options(
                loader, split, owner, any_order=split == "train" and self.sampler is not None
            )
        datasets = {split: loader.dataset for split, loader in loaders.items()}
        labels, keys = self._keys(datasets)
        groups = None
        if self.group is not None:
            groups = {split: read_keys(data, split, self.group) for split, data in datasets.items()}
        ids, splits = federate(
            self._divides,
            datasets,
            labels,
            keys,
            self.seed,
            self.val_fraction,
            self._test_fraction("test" in datasets),
            self.val_seed,
            groups,
        )
        for name, federated_split in splits.items():
            federated_split.loader = dict(options.get(name, options["train"] | {"drop_last": False}))
            federated_split.shuffle, federated_split.sampler = shuffles["train"], self.sampler
            if self._override is not None:
                federated_split.loader["batch_size"] = self._override
        self.batch_size = splits["train"].loader["batch_size"]
        return ids, splits

    def _test_fraction(self, has_test: bool) -> float:
        """Return the share that is cut off for testing, and say so where nobody has asked for it."""
        if self.test_fraction is not None:
            return self.test_fraction
        if not has_test and multiprocessing.parent_process() is None:
            owner = "It" if isinstance(self.datamodule, _Datasets) else type(self.datamodule).__name__
            rank_zero_warn(
                f"{owner} has no test data: {CUT_OFF:.0%} of each client's training samples are cut off for testing. Say so "
                f"by test_fraction={CUT_OFF}, give test data, or leave the samples in training by test_fraction=0."
            )
        return CUT_OFF

    def _wrapped_loader(self, split: str) -> Any:
        """Return the wrapped module's loader of a split; `None` if it has none."""
        name = _LOADER_HOOKS[split]
        # LightningDataModule.from_datasets puts its loaders on the instance.
        is_overridden = name in vars(self.datamodule)
        is_overridden = is_overridden or getattr(type(self.datamodule), name) is not getattr(LightningDataModule, name)
        loader = getattr(self.datamodule, name)() if is_overridden else None
        if isinstance(loader, list | tuple) and len(loader) <= 1:
            loader = loader[0] if loader else None
        return loader

    def _keys(self, datasets: dict[str, Any]) -> tuple[dict[str, np.ndarray | None], dict[str, Any]]:
        """Return the class labels of every dataset, and what the partitioner divides by."""
        needs = self.partitioner.needs
        labels = encode(
            {split: read_keys(data, split, self.labels, walk=needs == "labels") for split, data in datasets.items()}
        )
        self._divides = suited(self.partitioner, labels, type(self.datamodule).__name__)
        natural = self.partitioner
        source: Any = "groups"
        if isinstance(natural, NaturalPartitioner):
            source = natural.column if natural.groups is None else natural.groups
        return labels, keys_for(self._divides, datasets, labels, lambda split, data: read_keys(data, split, source))


def loader_options(loader: Any, split: str, owner: str, any_order: bool = False) -> tuple[dict[str, Any], bool]:
    """Return the arguments that a `DataLoader` was made with, and whether it shuffles.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from fedlightning.datamodules.partitioned import loader_options
        >>> options, shuffles = loader_options(DataLoader(range(10), batch_size=4, shuffle=True), "train", "MyData")
        >>> options["batch_size"], shuffles
        (4, True)
    """
    what = f"{owner}'s {split} loader"
    hint = "pass sampler= to Partitioned, which makes one for each client"
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"{what} is a {type(loader).__name__}; Partitioned divides one torch DataLoader for each split: return one, "
            "over a ConcatDataset or a dataset of pairs if there are several."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"{what} reads an IterableDataset, whose samples have no index and cannot be divided among clients; use a "
            "map-style dataset (with __len__ and __getitem__), or write a FederatedDataModule with one loader a client."
        )
    own_batches = type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None
    if own_batches and not (any_order and loader.batch_sampler is not None):
        raise ValueError(
            f"{what} makes batches by {type(loader.batch_sampler or loader.sampler).__name__}, which knows nothing of "
            f"clients; use batch_size=... and shuffle=... instead of batch_sampler=... or batch_size=None, or {hint}."
        )
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not plain and not any_order:
        raise ValueError(
            f"{what} draws samples by {type(sampler).__name__}, which knows nothing of clients; use shuffle=True or "
            f"shuffle=False without a sampler (weight the loss instead of the sampling), or {hint}."
        )
    options = {
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1,
        # The default collate function has a fast path here; None chooses it.
        "collate_fn": None if loader.collate_fn is default_collate else loader.collate_fn,
        "drop_last": loader.drop_last,
        "persistent_workers": loader.persistent_workers,
    }
    return options | worker_options(loader), isinstance(sampler, RandomSampler)


class _Datasets(LightningDataModule):
    """The data module that `Partitioned.from_datasets` wraps."""

    def __init__(
        self, datasets: dict[str, Dataset[Any] | None], options: dict[str, Any], shuffle: bool, drop_last: bool
    ) -> None:
        super().__init__()
        self.datasets, self.options, self.shuffle, self.drop_last = datasets, options, shuffle, drop_last

    def train_dataloader(self) -> DataLoader[Any]:
        data = self.datasets["train"]
        assert data is not None
        if isinstance(data, IterableDataset):
            return DataLoader(data, **self.options)
        # DataLoader refuses to shuffle nothing; an empty dataset is refused with a better message later.
        shuffle = self.shuffle and len(data) > 0  # type: ignore[arg-type]
        return DataLoader(data, shuffle=shuffle, drop_last=self.drop_last, **self.options)

    def val_dataloader(self) -> Any:
        return [] if self.datasets["val"] is None else DataLoader(self.datasets["val"], **self.options)

    def test_dataloader(self) -> Any:
        return [] if self.datasets["test"] is None else DataLoader(self.datasets["test"], **self.options)
