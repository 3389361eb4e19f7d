"""Data held once and indexed: the base of most federated data modules."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from fedlightning.datamodules.federated_data import FederatedDataModule, check_split, sort_clients
from fedlightning.datamodules.groups import cut_groups
from fedlightning.datamodules.public_from_another import Another, Public, another, loader_of, share_of
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.datamodules.views import IndexView, Indices, collate_rows
from fedlightning.ranges import NonNegativeInt, PositiveInt, checked
from fedlightning.seeding import generator


def check_each(owner: Any, count: int, **arrays: Any) -> None:
    """Refuse labels or groups (by name; `None`: there are none) that are not an array of one whole number for each sample.

    Example:
        >>> check_each("Mine", 2, labels=np.array([0, 1]), groups=None)
    """
    for name, values in arrays.items():
        if values is None:
            continue
        array = np.asarray(values)
        listed = not isinstance(values, np.ndarray | Tensor)
        if listed or array.shape != (count,) or (count and array.dtype.kind not in "iu"):
            kind = f"kind {type(values).__name__}" if listed else f"{array.dtype} of shape {array.shape}"
            raise ValueError(
                f"{type(owner).__name__} has {name} of {kind} for {count} samples. Give an array of one whole "
                "number for each sample of the dataset, as in numpy.array([0, 1, 1]), or None."
            )


MOST_CLASSES = 2**24
"""Classes that are counted at each client."""


@dataclass
class Split:
    """One split of all clients.

    Attributes:
        dataset: Map-style dataset that holds the samples of all clients (and perhaps of other splits).
        indices: Each client's samples in `dataset`, in client order.
        labels: Class (0, 1, ...) of every sample of `dataset`, int64 of shape `(samples,)`, or `None`.
        loader: Keyword arguments of this split's `DataLoader`.
        shuffle: Whether training batches are drawn in a new order every epoch.
        sampler: Function that makes the sampler, or batch sampler, of a client's training batches from the client's
            dataset. `None`: an `AddressedSampler`.
        groups: Group (a patient) of every sample of `dataset`, int64 of shape `(samples,)`, or `None`. Public samples are
            taken from the clients by whole groups.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules import Split
        >>> split = Split(TensorDataset(torch.zeros(5, 2)), indices=[[0, 1, 2], [3, 4]])
        >>> [len(held) for held in split.indices]
        [3, 2]
    """

    dataset: Dataset[Any]
    indices: Sequence[Indices]
    labels: np.ndarray | None = None
    loader: dict[str, Any] = field(default_factory=dict)
    shuffle: bool = True
    sampler: Callable[[Dataset[Any]], Any] | None = None
    groups: np.ndarray | None = None

    def __post_init__(self) -> None:
        # A view of the dataset's own tensors would end with their memory: torch moves it into shared memory when it sends
        # them to a loader's worker that is not forked, and the view then shows whatever comes to lie in the old place.
        for name in ("labels", "groups"):
            array = getattr(self, name)
            if isinstance(array, np.ndarray) and not array.flags.owndata:
                setattr(self, name, array.copy())


class IndexedFederatedDataModule(FederatedDataModule):
    """Base of federated data modules over datasets that are held once; a client is a view by index.

    Subclasses implement `build`, which runs once, at the first `setup`.

    Attributes:
        public_fraction: Share of every client's training samples, in [0, 1), that is taken from the clients at `setup` and
            becomes public data (`public_dataloader`); 0 by default. Data modules that have it as an argument set it.
        collate_fn: Makes a batch of a list of samples. `None` is `default_collate`, with a fast path for tensors.

    Args:
        batch_size: Number of samples in a batch, in every split.
        seed: Seed of the split into clients, and of the batch order until the trainer starts a visit with its own seed.
        num_workers: Worker processes of every loader; 0 loads in the training process.
        pin_memory: Copy batches into page-locked memory (for a GPU).
        drop_last: Leave out the last incomplete training batch. A client with less than one batch then has none.
        public: Public data, which are in nobody's training, validation or test data: a share of every client's training
            samples, in [0, 1), or another data set, as a Dataset or a data module (its training data). What a client holds
            too is left out of that.
        public_labels: Whether public batches keep their labels.

    Raises:
        ValueError: If `batch_size` is below 1 or `num_workers` below 0.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules import IndexedFederatedDataModule, Split
        >>> class TwoClients(IndexedFederatedDataModule):
        ...     def build(self):
        ...         return ["a", "b"], {"train": Split(TensorDataset(torch.arange(5.0)), [[0, 1, 2], [3, 4]])}
        >>> data = TwoClients(batch_size=2)
        >>> data.setup()
        >>> data.num_samples("a"), len(data.client_dataloader("a", "train"))
        (3, 2)
    """

    public_fraction: float = 0.0
    collate_fn: Callable[[Any], Any] | None = None

    @checked
    def __init__(
        self,
        batch_size: PositiveInt = 32,
        seed: int = 0,
        num_workers: NonNegativeInt = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        public: Public = None,
        public_labels: bool = True,
    ) -> None:
        super().__init__()
        self.batch_size, self.seed, self.num_workers = int(batch_size), int(seed), int(num_workers)
        self.pin_memory, self.drop_last = pin_memory, drop_last
        self._client_ids: list[str] | None = None
        self._places: dict[str, int] = {}
        self._splits: dict[str, Split] = {}
        self._public_given, self._public_labels = public, bool(public_labels)  # `public` may be a subclass's own
        self.public_fraction = share_of(self, public, self.public_fraction)
        self._public: dict[str, Indices] = {}  # by client that they were taken from
        self._another: Another | None = None
        self._num_classes: int | None = None

    @abstractmethod
    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        """Read the data and divide them. Return the client ids and a `Split` for each split that exists."""

    def setup(self, stage: str | None = None) -> None:
        """Build every split at the first call (Lightning's hook); later calls change nothing.

        Raises:
            ValueError: If `build` returns an unknown split, or one without an index list for each client.
        """
        if self._client_ids is not None:
            return
        client_ids, splits = self.build()
        for name, split in splits.items():
            check_split(name)
            if len(split.indices) != len(client_ids):
                raise ValueError(f"Split {name!r} has {len(split.indices)} index lists for {len(client_ids)} clients.")
            self._check_rows(name, split, client_ids)
        if not 0 <= self.public_fraction < 1:
            raise ValueError(
                f"{type(self).__name__} got public_fraction={self.public_fraction}. Use a share of the samples in [0, 1)."
            )
        if self.public_fraction > 0 and "train" in splits:
            splits = {**splits, "train": self._without_public(client_ids, splits)}
        if not isinstance(self._public_given, int | float | None):
            source = splits["train"].loader if "train" in splits else {}
            options = {"batch_size": self.batch_size, "collate_fn": self.collate_fn} | source
            self._another = another(self, self._public_given, options, splits, self.seed)
        labels = [split.labels for split in splits.values() if split.labels is not None and len(split.labels)]
        largest = max((int(values.max()) for values in labels), default=-1)
        if largest >= MOST_CLASSES:
            raise ValueError(
                f"{type(self).__name__} has the label {largest}, and classes are counted from 0: that would be as many. "
                "Number the classes 0, 1, ..., or correct the label."
            )
        self._num_classes = 1 + largest if labels else None
        self._client_ids, self._splits = list(client_ids), dict(splits)
        self._places = {client: place for place, client in enumerate(self._client_ids)}

    def _check_rows(self, name: str, split: Split, client_ids: Sequence[str]) -> None:
        """Refuse labels, groups and rows that do not go with the samples of a split."""
        count = len(split.dataset)  # type: ignore[arg-type]
        check_each(self, count, labels=split.labels, groups=split.groups)
        for client, rows in zip(client_ids, split.indices, strict=True):
            array = np.asarray(rows)
            if len(array) and (array.dtype.kind not in "iu" or array.max() >= count or array.min() < -count):
                wrong = array.dtype if array.dtype.kind not in "iu" else max(array.max(), array.min(), key=abs)
                raise ValueError(
                    f"{type(self).__name__}: client {client!r} has the row {wrong} in its {name} split, and there are "
                    f"{count} samples. Give whole numbers, counted from 0."
                )

    def _without_public(self, client_ids: list[str], splits: Mapping[str, Split]) -> Split:
        """Take the public samples from the clients; return the training split without them."""
        train, rests = splits["train"], []
        dataset: Any = train.dataset
        for client, indices in zip(client_ids, train.indices, strict=True):
            draw = generator(self.seed, "partition", "public", client)
            rest, self._public[client] = cut_groups(
                np.asarray(indices), self.public_fraction, draw, train.labels, train.groups
            )
            rests.append(rest)
        taken = np.zeros(len(dataset), dtype=bool)
        for part in self._public.values():
            taken[part] = True
        for name, split in splits.items():
            if split.dataset is not dataset:
                continue
            for client, indices in zip(client_ids, rests if name == "train" else split.indices, strict=True):
                places = np.asarray(indices, np.int64)
                both = places[taken[places]]
                if len(both):
                    raise ValueError(
                        f"{type(self).__name__}(public_fraction={self.public_fraction}) would make sample {both[0]} "
                        f"public, which client {client!r} holds in its {name} data. Give every sample to one client and "
                        "one split, or use public_fraction=0."
                    )
        return replace(train, indices=rests)

    def public_dataloader(self) -> DataLoader[Any] | None:
        """Return a loader of the public samples, taken from the clients or another data set; `None` if there are none."""
        if self._another is not None:
            other, options = self._another, self._another.options | {"drop_last": False}
            return loader_of(other.dataset, other.positions, options, self.seed, self._public_labels)
        parts = [self._public[client] for client in self.client_ids if client in self._public]
        if not sum(map(len, parts)):
            return None
        source = self._splits["train"]
        options = {"batch_size": self.batch_size, "collate_fn": self.collate_fn} | source.loader | {"drop_last": False}
        positions = np.sort(np.concatenate(parts))
        return loader_of(source.dataset, positions, options, self.seed, self._public_labels)

    @property
    def public_is_compared(self) -> bool:
        return self._another is not None and self._another.checked

    def public_report(self) -> dict[str, Any] | None:
        report = super().public_report()
        if report is None:
            return None
        report["labels"] = self._public_labels
        if self._another is None:
            return report | {"from": f"{self.public_fraction:g} of every client's training samples"}
        left_out = {"left_out": self._another.left_out} if self._another.checked else {}
        return report | {"from": self._another.name, "compared": self._another.checked, **left_out}

    @property
    def client_ids(self) -> list[str]:
        """Names of the clients, as `build` returns them.

        Raises:
            RuntimeError: Before `setup`.
        """
        if self._client_ids is None:
            raise RuntimeError(f"{type(self).__name__} has no clients yet; call prepare_data() and setup() first.")
        return list(self._client_ids)

    @property
    def num_classes(self) -> int | None:
        return self._num_classes

    def indices(self, client: str, split: str = "train") -> Indices:
        """Return a client's samples as indices into the split's dataset, shape `(samples,)`.

        Raises:
            ValueError: If there is no such client or split.
        """
        check_split(split)
        place = self._places.get(str(client))
        if place is None:
            ids = self.client_ids
            raise ValueError(f"There is no client {client!r}; the clients are {', '.join(ids[:20])}.")
        if split not in self._splits:
            return np.zeros(0, np.int64)
        return np.asarray(self._splits[split].indices[place], dtype=np.int64)

    def num_samples(self, client: str, split: str = "train") -> int:
        return len(self.indices(client, split))

    def class_counts(self, client: str, split: str = "train") -> list[int] | None:
        indices = self.indices(client, split)
        if self._num_classes is None or split not in self._splits:
            return None
        labels = self._splits[split].labels
        if labels is None:
            return None
        chosen = labels[indices]
        return np.bincount(
            chosen[chosen >= 0], minlength=self._num_classes
        ).tolist()  # -100: a sample that losses ignore

    def sample_groups(self, client: str, split: str = "train") -> np.ndarray | None:
        groups = self._splits[split].groups if split in self._splits else None
        return None if groups is None else np.asarray(groups)[np.asarray(self.indices(client, split))]

    def fingerprint(self, split: str) -> str:
        digest = hashlib.sha256(json.dumps(self.client_ids).encode())
        for client in self.client_ids:
            rows = self.indices(client, split)
            labels = self._splits[split].labels if split in self._splits else None
            digest.update(rows.tobytes() if labels is None else rows.tobytes() + np.asarray(labels[rows]).tobytes())
            digest.update(b"|")
        return digest.hexdigest()[:12]

    def client_dataloader(self, client: str, split: str) -> DataLoader[Any] | None:
        return self._loader(str(client), split, self.indices(client, split))

    def pooled_dataloader(self, split: str) -> DataLoader[Any] | None:
        parts = [self.indices(client, split) for client in sort_clients(self.client_ids)]
        return self._loader("pooled", split, np.concatenate(parts) if parts else np.zeros(0, np.int64))

    def _loader(self, client: str, split: str, indices: Indices) -> DataLoader[Any] | None:
        if split not in self._splits or (split != "train" and not len(indices)):
            return None
        source = self._splits[split]
        training = split == "train"
        options: dict[str, Any] = {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "drop_last": self.drop_last and training,
            "collate_fn": self.collate_fn,
        } | source.loader
        options["collate_fn"] = options["collate_fn"] or collate_rows
        if training and source.sampler is not None:
            return self._sampled(source, client, indices, options)
        # Evaluation needs no permutation, but its workers' seeds must not come from the global generator either.
        view = IndexView(source.dataset, indices)
        if not training:
            return DataLoader(view, generator=generator(self.seed, "workers", client, split), **options)
        sampler = AddressedSampler(len(indices), client, shuffle=source.shuffle, seed=self.seed)
        return DataLoader(view, sampler=sampler, generator=sampler.generator, **options)

    def _sampled(self, source: Split, client: str, indices: Indices, options: dict[str, Any]) -> DataLoader[Any]:
        """Return a training loader whose sampler the user makes. It draws from the global generator of the visit."""
        view, seeds = IndexView(source.dataset, indices), generator(self.seed, "workers", client, "train")
        assert source.sampler is not None
        if not len(view):
            return DataLoader(view, batch_size=1)
        try:
            sampler = source.sampler(view)
        except AttributeError as error:
            raise ValueError(
                f"The sampler of client {client!r} cannot be made: {error}. It is given a view of the client's samples, with "
                "`dataset` (yours) and `indices`, as torch's Subset has them."
            ) from error
        if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
            raise ValueError(
                f"The sampler made for client {client!r} is a {type(sampler).__name__} without __iter__ or __len__; return a "
                "torch.utils.data.Sampler over the client's dataset."
            )
        if isinstance(sampler, BatchSampler) or hasattr(sampler, "batch_size"):
            options = {name: value for name, value in options.items() if name not in ("batch_size", "drop_last")}
            return DataLoader(view, batch_sampler=sampler, generator=seeds, **options)
        return DataLoader(view, sampler=sampler, generator=seeds, **options)

    def __getstate__(self) -> dict[str, Any]:
        # A Trainer is not part of the data, and cannot be sent to another process.
        return self.__dict__ | {"trainer": None}
