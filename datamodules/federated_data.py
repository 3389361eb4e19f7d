"""The contract between data and the rest of the package."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from fedlightning.errors import listed

SPLITS = ("train", "val", "test")


class FederatedDataModule(LightningDataModule, ABC):
    """A `LightningDataModule` that knows its clients.

    The trainer calls `prepare_data` and `setup` as Lightning does, then asks for loaders by client and split. The
    splits are `"train"`, `"val"` and `"test"`. As a plain `LightningDataModule` it offers the pooled data, so the same
    object trains a central model in a `lightning.Trainer`.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule, FederatedDataModule
        >>> data = DigitsDataModule()
        >>> data.setup()
        >>> isinstance(data, FederatedDataModule), len(data.client_ids), data.num_classes
        (True, 10, 10)
        >>> len(data.train_dataloader().dataset) == sum(data.num_samples(client) for client in data.client_ids)
        True
        >>> data
        <DigitsDataModule: 10 clients, 1150 training samples>
    """

    common_options: ClassVar[Sequence[str]] = ()
    """Options by which inputs or targets mean something else, so that all sites have to have the same; the others are a
    site's own: where its data are, how they are divided."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Show those who ask for a class's signature the arguments that its constructor hands on to its base, too."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__signature__ = whole_signature(cls)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        """Return the class, and who holds how much once that is known; nothing is loaded for it."""
        try:
            clients = self.client_ids
            size = sum(self.num_samples(client) for client in clients)
        except Exception:  # before setup
            return f"<{type(self).__name__}: not set up>"
        return f"<{type(self).__name__}: {len(clients)} clients, {size} training samples>"

    def __str__(self) -> str:
        return repr(self)

    @property
    def original(self) -> LightningDataModule:
        """The data module whose samples the clients hold: this one, or the user's own that it divides among clients."""
        return self

    @property
    @abstractmethod
    def client_ids(self) -> list[str]:
        """Names of the clients, in the fixed order in which they are visited and summed."""

    @abstractmethod
    def client_dataloader(self, client: str, split: str) -> DataLoader[Any] | None:
        """Return one client's loader.

        Training loaders always exist (that of a client without samples has no batches), and their `sampler` is an
        `AddressedSampler`.

        Args:
            client: Name of the client.
            split: `"train"`, `"val"` or `"test"`.

        Returns:
            A loader, or `None` if the client has no samples in a `"val"` or `"test"` split.
        """

    @abstractmethod
    def pooled_dataloader(self, split: str) -> DataLoader[Any] | None:
        """Return a loader of all clients' samples of a split, in client order; `None` for an empty val or test split.

        Args:
            split: `"train"`, `"val"` or `"test"`.
        """

    @abstractmethod
    def num_samples(self, client: str, split: str = "train") -> int:
        """Return the number of samples that a client holds in a split."""

    def sizes_of(self, clients: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        """Return the samples that clients hold for training, validation and test.

        Args:
            clients: Names of clients.
        """
        return {
            client: (
                self.num_samples(client, "train"),
                self.num_samples(client, "val"),
                self.num_samples(client, "test"),
            )
            for client in clients
        }

    def class_counts(self, client: str, split: str = "train") -> list[int] | None:
        """Return a client's samples of each class, `num_classes` numbers; `None` if there are no labels."""
        return None

    def sample_groups(self, client: str, split: str = "train") -> np.ndarray | None:
        """Return the group (a patient) of each sample of a client, int64 `(samples,)`; `None` if nobody knows groups."""
        return None

    @property
    def underlying(self) -> LightningDataModule | None:
        """The data module that these data are made of; `None`: of no other. What it says of its records holds here too."""
        return None if self.original is self else self.original

    @property
    def coupled_records(self) -> str:
        """How features of a client's record depend on its other records, and a way out, in sentences; empty: they do not."""
        return str(getattr(self.underlying, "coupled_records", ""))

    @property
    def coupling(self) -> str:
        """How what a network gets of a record depends on others: by features, or by the numbers that words have."""
        if self.coupled_records or not self.named_by_file:
            return self.coupled_records
        return (
            f"which words and classes have a number is taken from all records here. Give {listed(self.named_by_file)}, which "
            "are then the same whatever the records are."
        )

    @property
    def public_is_compared(self) -> bool:
        """Whether samples of clients are left out of public data that are another data set."""
        return False

    @property
    def meaning(self) -> dict[str, list[str]]:
        """What a network's `inputs` and `targets` are, in order, as far as they have names; all clients have the same.

        Here: what `underlying` says, or the names of classes (`class_names`) and the `common_options`.
        """
        names = getattr(self.original, "class_names", None)
        named = {"targets": [str(name) for name in names]} if names else {}
        as_text = partial(json.dumps, sort_keys=True, default=lambda value: np.asarray(value).tolist())
        options = {name: [as_text(getattr(self, name))] for name in self.common_options}
        return dict(getattr(self.underlying, "meaning", named | options))

    @property
    def named_by_file(self) -> dict[str, Any]:
        """Options that the file here has decided, with their values: a site with another file may have others."""
        return dict(getattr(self.underlying, "named_by_file", {}))

    @property
    def drifts(self) -> bool:
        """Whether the clients' training data change from round to round."""
        return False

    def at_round(self, round: int) -> FederatedDataModule:
        """Return these data with the training samples that clients hold in a round (from 0), without copying any.

        All that a visit reads comes from here. What is asked for without a round is of all rounds.
        """
        return self

    def sizes_by_round(self, client: str) -> list[int]:
        """Return a client's training samples in rounds 0, 1, ..., where they drift; the last number holds from then on."""
        return [self.num_samples(client)]

    @property
    def wanted_statistics(self) -> dict[str, Any] | None:
        """What all clients are to agree on before round 1, in plain values, the same at every site; `None`: nothing."""
        return None

    def statistics_of(self, client: str) -> dict[str, Any]:
        """Return what a client gives for them: sums and counts over its training samples, and nothing else.

        Raises:
            NotImplementedError: Without `wanted_statistics`.
        """
        raise NotImplementedError

    def with_statistics(self, totals: Mapping[str, Any]) -> FederatedDataModule:
        """Return these data, prepared with the totals over the clients that train; these here stay as they are.

        Raises:
            NotImplementedError: Without `wanted_statistics`.
        """
        raise NotImplementedError

    def sample_values(self, client: str, split: str, column: str) -> list[str]:
        """Return what a column of the data says of each sample of a client's split, in the order of its loader.

        Raises:
            ValueError: If the samples have no columns, or none of that name.
        """
        raise ValueError(f"The samples of {type(self).__name__} have no columns such as {column!r}; tables have them.")

    @property
    def num_classes(self) -> int | None:
        """Number of classes; `None` if there are no class labels."""
        return None

    @property
    def partition_name(self) -> str:
        """The way the data were divided, in a few words."""
        return "natural"

    @property
    def planted_groups(self) -> dict[str, int] | None:
        """The group of each client that comes from one, where the clients were made so; `None` if nobody knows.

        What a method that finds groups is measured by; no method sees it.
        """
        return None

    def fingerprint(self, split: str) -> str:
        """Return a short hash of which client holds which samples of `split`: equal for two runs on the same split.

        This one is made of sizes and class counts, which every data module knows. Data held by index hash the indices
        and labels themselves.
        """
        counts_by_client = {
            client: [self.num_samples(client, split), self.class_counts(client, split)] for client in self.client_ids
        }
        return hashlib.sha256(json.dumps(counts_by_client).encode()).hexdigest()[:12]

    @property
    def common_batches(self) -> Mapping[str, Any] | None:
        """`batch_size`, `drop_last` and `shuffle` of all training loaders, where these are alike and known beforehand.

        `None`: each client's loader is made to look, before the first round of a run that is saved.
        """
        return None

    def public_dataloader(self) -> DataLoader[Any] | None:
        """Return a loader of public data (distillation, generalisation metrics); `None` if there is none."""
        return None

    def public_report(self) -> dict[str, Any] | None:
        """Return what is known of the public data, for reports: how many samples, from where; `None` if there are none."""
        loader = self.public_dataloader()
        if loader is None:
            return None
        dataset = getattr(loader, "dataset", loader)
        return {"samples": len(dataset) if hasattr(dataset, "__len__") else None}

    def train_dataloader(self) -> Any:
        """Return the pooled training data (Lightning's hook)."""
        return self._pooled("train")

    def val_dataloader(self) -> Any:
        """Return the pooled validation data (Lightning's hook), or an empty list, which Lightning skips."""
        return self._pooled("val")

    def test_dataloader(self) -> Any:
        """Return the pooled test data (Lightning's hook), or an empty list."""
        return self._pooled("test")

    def predict_dataloader(self) -> Any:
        """Return the pooled test data (Lightning's hook), or an empty list."""
        return self._pooled("test")

    def _pooled(self, split: str) -> Any:
        loader = self.pooled_dataloader(split)
        return [] if loader is None else loader


def whole_signature(kind: type) -> inspect.Signature:
    """Return the arguments of a class, with those of its base instead of `**options`.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule
        >>> list(whole_signature(DigitsDataModule).parameters)[:5]
        ['partitioner', 'batch_size', 'flatten', 'split_seed', 'val_fraction']
    """
    _, *parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    if not parameters or parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return inspect.Signature(parameters)
    named = {p.name for p in parameters}
    inherited = inspect.signature(kind.__mro__[1]).parameters.values()
    handed_on = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in inherited if p.name not in named]
    return inspect.Signature([*parameters[:-1], *handed_on])


def clients_here(owner: object, argument: str, wanted: Sequence[str] | None, clients: Sequence[str]) -> list[str]:
    """Return the natural clients whose data are here, in their order: all of them, or those that an argument names.

    Example:
        >>> from fedlightning.datamodules.federated_data import clients_here
        >>> clients_here("Hearts", "hospitals", ["va", "cleveland"], clients=("cleveland", "va", "zurich"))
        ['cleveland', 'va']
    """
    names = list(clients if wanted is None else map(str, wanted))
    if not names or len(set(names)) < len(names) or not set(names) <= set(clients):
        raise ValueError(
            f"{type(owner).__name__} got {argument}={wanted!r}; give some of {', '.join(clients)} as a list, each once, "
            "or None for all."
        )
    return [name for name in clients if name in names]


def refuse_drift(owner: object, source: object) -> None:
    """Refuse to be made of data whose drift would be lost."""
    if getattr(source, "drifts", False):
        raise ValueError(
            f"{type(owner).__name__} got a {type(source).__name__}, whose change from round to round it would lose. Make it "
            f"of the data themselves, and give it to {type(source).__name__} as source, where that takes it."
        )


def check_split(split: str) -> None:
    """Refuse what is not a split."""
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}; the splits are 'train', 'val' and 'test'.")


def sort_clients(clients: Iterable[str]) -> list[str]:
    """Return client names in the one order that sums, unions and files follow: by name, numbers by value.

    Example:
        >>> from fedlightning.datamodules.federated_data import sort_clients
        >>> sort_clients(["site10", "b", "site9", "3", "21", "a²"])
        ['3', '21', 'a²', 'b', 'site9', 'site10']
    """
    names = list(clients)
    if all(name.isdecimal() for name in names):  # nothing to take apart, which takes seconds for a hundred thousand
        return sorted(names, key=lambda name: (int(name), name))

    def key(client: str) -> list[tuple[bool, int, str]]:
        parts = [part for part in re.split(r"(\d+)", client) if part]
        return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]

    return sorted(names, key=key)
