"""Federated data of several modalities, which clients may lack, with labels that may be missing or wrong."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from fedlightning.datamodules.arrays import federate, given_groups, keys_for, some_rows
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.modality_dataset import ModalityDataset, transition_matrix
from fedlightning.datamodules.plans import Partitioner
from fedlightning.datamodules.skew import DirichletPartitioner
from fedlightning.datamodules.views import Indices
from fedlightning.ranges import PositiveInt, Share, ShareBelowOne, at_most_one, checked
from fedlightning.seeding import generator

SPARSITY = 0.4
"""Share of wrong classes that a client never takes for a class (FedMultimodal)."""


class MultimodalDataModule(IndexedFederatedDataModule):
    """Base of data modules with several modalities; subclasses implement `load`.

    A batch is `({modality: inputs}, labels)`. What a client lacks is NaN (`ModalityDataset`), in all splits.

    The corruptions are those of Feng et al., "FedMultimodal: a benchmark for multimodal federated learning", KDD 2023. Each
    has randomness of its own, so that a rate of 0 gives the clean data bit for bit, and another rate the same partition.
    The authors' code draws the wrong label of a class once a client; here every sample has a draw of its own.

    Args:
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        batch_size: Number of samples in a batch.
        val_fraction: Share of every client's training samples for validation, in [0, 1).
        seed: Seed of the partition, the validation cut and the corruptions.
        modalities: Names of the modalities to use. `None`: all.
        sensors: Who has which modalities: number of clients by modalities with `+` between them, such as `{image: 2,
            image+audio: 8}`, dealt out in the order of the clients. `None`: everybody has all.
        missing: Chance that a client lacks a modality, for each client and modality. A client that lacks all of them is
            left out of the federation, with a warning.
        missing_labels: Share of training and validation samples without a label: they are dropped. Drawn for each sample.
        wrong_labels: Share of training and validation samples with a wrong label (`transition_matrix`; sparsity 0.4).
            Test labels are right.
        num_workers: Worker processes of every loader. Whole batches are gathered at once, so 0 is fastest.
        pin_memory: Copy batches into page-locked memory (for a GPU).
        drop_last: Leave out the last incomplete training batch.
        max_train: Use only this many training samples, chosen by `seed`.
        max_test: Use only this many test samples, chosen by `seed`.
        val_seed: Seed of the validation cut alone. `None` is `seed`.

    Raises:
        ValueError: If a value is out of its range; at `setup`, if `sensors` does not fit the clients or names an unknown
            modality.

    Example:
        >>> from fedlightning.datamodules import IIDPartitioner, PairedDigitsDataModule
        >>> data = PairedDigitsDataModule(IIDPartitioner(3), sensors={"upper": 1, "upper+lower": 2})
        >>> data.setup()
        >>> data.modalities_of("0"), data.modalities_of("1")
        (('upper',), ('upper', 'lower'))
        >>> x, y = next(iter(data.client_dataloader("0", "train")))
        >>> bool(x["lower"].isnan().all())
        True
    """

    @checked
    @at_most_one("sensors", "missing", why="either say who has what, or draw it.")
    def __init__(
        self,
        partitioner: Partitioner | None = None,
        batch_size: int = 32,
        val_fraction: ShareBelowOne = 0.2,
        seed: int = 0,
        modalities: list[str] | None = None,
        sensors: dict[str, int] | None = None,
        missing: ShareBelowOne = 0.0,
        missing_labels: ShareBelowOne = 0.0,
        wrong_labels: Share = 0.0,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        max_train: PositiveInt | None = None,
        max_test: PositiveInt | None = None,
        val_seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, pin_memory, drop_last)
        self.partitioner = partitioner if partitioner is not None else DirichletPartitioner(10, 0.5)
        self.val_fraction, self.val_seed = val_fraction, val_seed
        self.modalities, self.sensors = modalities, sensors
        self.missing, self.missing_labels, self.wrong_labels = missing, missing_labels, wrong_labels
        self.max_train, self.max_test = max_train, max_test
        self._modalities_by_client: dict[str, tuple[str, ...]] = {}

    @abstractmethod
    def load(self) -> tuple[ModalityDataset, ModalityDataset]:
        """Return the training and the test samples, with all modalities."""

    def groups(self, split: str, dataset: ModalityDataset) -> np.ndarray:
        """Return each sample's group for a natural partition: what `NaturalPartitioner(groups=...)` gives.

        Args:
            split: `"train"` or `"test"`.
            dataset: The samples of that split.

        Raises:
            ValueError: If the data have no groups and the partitioner brings none.
        """
        return given_groups(self, self.partitioner, split, dataset)

    def modalities_of(self, client: str) -> tuple[str, ...]:
        """Return the modalities that a client has.

        Args:
            client: Name of the client.
        """
        self.indices(client)  # refuses unknown names
        return self._modalities_by_client[str(client)]

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        datasets = {split: self._some(data, split) for split, data in zip(("train", "test"), self.load(), strict=True)}
        labels = {split: data.y.numpy() for split, data in datasets.items()}
        keys = keys_for(self.partitioner, datasets, labels, self.groups)
        ids, splits = federate(
            self.partitioner, dict(datasets), dict(labels), keys, self.seed, self.val_fraction, val_seed=self.val_seed
        )
        self._modalities_by_client = self._deal_out(ids, datasets["train"].modalities)
        without = [client for client in ids if not self._modalities_by_client[client]]
        if len(without) == len(ids):
            raise ValueError(
                f"{type(self).__name__}(missing={self.missing}) leaves no client a modality; use another seed."
            )
        if without:
            rank_zero_warn(
                f"{type(self).__name__}(missing={self.missing}) leaves client {', '.join(without)} no modality: left out.",
                category=UserWarning,
            )
        ids, splits = self._leave_out(without, ids, splits)
        for name in ("train", "val"):
            if name in splits:
                splits[name].indices = [
                    self._labelled(client, name, rows) for client, rows in zip(ids, splits[name].indices, strict=True)
                ]
        self._mislabel(ids, splits)
        for split in splits.values():
            self._hide(ids, split)
        return ids, splits

    def fingerprint(self, split: str) -> str:
        modalities = [(client, self._modalities_by_client[client]) for client in self.client_ids]
        return hashlib.sha256(f"{super().fingerprint(split)}{modalities}".encode()).hexdigest()[:12]

    @property
    def partition_name(self) -> str:
        rates = {"missing": self.missing, "missing labels": self.missing_labels, "wrong labels": self.wrong_labels}
        more = [f"{name} {rate:g}" for name, rate in rates.items() if rate]
        sensors = [] if self.sensors is None else [f"{count} {names}" for names, count in self.sensors.items()]
        return ", ".join([self.partitioner.describe(), *sensors, *more])

    def _some(self, dataset: ModalityDataset, split: str) -> ModalityDataset:
        """Return the modalities and the samples to use."""
        chosen = list(dataset.modalities) if self.modalities is None else self.modalities
        unknown = sorted(set(chosen) - set(dataset.modalities))
        if unknown or not chosen:
            raise ValueError(
                f"{type(self).__name__} got modalities={chosen}; it has {', '.join(dataset.modalities)}. Use some of them."
            )
        dataset = ModalityDataset({name: dataset.inputs[name] for name in chosen}, dataset.y)
        limit = {"train": self.max_train, "test": self.max_test}[split]
        rows = some_rows(len(dataset), limit, self.seed, split)
        return dataset if rows is None else dataset.subset(rows)

    def _deal_out(self, ids: list[str], modalities: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Return the modalities of every client."""
        if self.sensors is None:
            return {
                client: tuple(
                    name
                    for name in modalities
                    if float(torch.rand((), generator=generator(self.seed, "missing", client, name))) >= self.missing
                )
                for client in ids
            }
        sets = [names.split("+") for names, count in self.sensors.items() for _ in range(count)]
        unknown = sorted({name for names in sets for name in names} - set(modalities))
        if unknown or len(sets) != len(ids):
            wrong = f"it names {', '.join(unknown)}" if unknown else f"it is for {len(sets)} clients"
            raise ValueError(
                f"{type(self).__name__} got sensors={self.sensors}, but {wrong}; there are {len(ids)} clients, and the "
                f"modalities {', '.join(modalities)}."
            )
        return {
            client: tuple(name for name in modalities if name in names) for client, names in zip(ids, sets, strict=True)
        }

    @staticmethod
    def _leave_out(without: list[str], ids: list[str], splits: dict[str, Split]) -> tuple[list[str], dict[str, Split]]:
        kept = [place for place, client in enumerate(ids) if client not in without]
        for split in splits.values():
            split.indices = [split.indices[place] for place in kept]
        return [ids[place] for place in kept], splits

    def _labelled(self, client: str, split: str, indices: Indices) -> Indices:
        """Return a client's samples without those whose label is missing."""
        draws = torch.rand(len(indices), generator=generator(self.seed, "missing labels", client, split)).numpy()
        return np.asarray(indices)[draws >= self.missing_labels]

    def _mislabel(self, ids: list[str], splits: dict[str, Split]) -> None:
        """Give some training and validation samples wrong labels, by a transition matrix for each client."""
        train = splits["train"].dataset
        assert isinstance(train, ModalityDataset)
        y = train.y.numpy().copy()
        count = int(max(y.max(), splits["test"].dataset.y.max())) + 1 if len(y) else 0  # type: ignore[attr-defined]
        if self.wrong_labels == 0 or count < 2:
            return
        for place, client in enumerate(ids):
            matrix = transition_matrix(count, self.wrong_labels, SPARSITY, generator(self.seed, "noise", client))
            for name in ("train", "val"):
                if name not in splits:
                    continue
                indices = splits[name].indices[place]
                draws = torch.rand(len(indices), generator=generator(self.seed, "wrong labels", client, name)).numpy()
                passed = draws[:, None].astype(np.float64) >= matrix[train.y.numpy()[indices]].cumsum(1)
                y[indices] = np.minimum(passed.sum(1), count - 1)
        train.y = torch.from_numpy(y)
        for name in ("train", "val"):
            if name in splits:
                splits[name].labels = y

    def _hide(self, ids: list[str], split: Split) -> None:
        """Mark the modalities that clients lack as missing from their samples."""
        dataset = split.dataset
        assert isinstance(dataset, ModalityDataset)
        for name in dataset.modalities:
            is_present = dataset.present.get(name, torch.ones(len(dataset), dtype=torch.bool))
            for client, indices in zip(ids, split.indices, strict=True):
                if name not in self._modalities_by_client[client]:
                    is_present[torch.from_numpy(np.asarray(indices))] = False
            if not bool(is_present.all()):
                dataset.present[name] = is_present
