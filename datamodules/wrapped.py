"""Data modules made of another one: those that hand on what it says, and those that change indexed data.

Test data instead of validation data: :class:`ValidatedOnTest`, for papers that scored test data in every round.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import DataLoader

from fedlightning.datamodules.federated_data import FederatedDataModule, refuse_drift
from fedlightning.datamodules.indexed import IndexedFederatedDataModule


class WrappedDataModule(FederatedDataModule):
    """Base of data modules that change a little of another one.

    Args:
        whole: The other data module.
    """

    def __init__(self, whole: FederatedDataModule) -> None:
        super().__init__()
        self.whole = whole

    def source_of(self, split: str) -> str:
        """Return the split of the other data module that stands for a split of this one."""
        return split

    @property
    def client_ids(self) -> list[str]:
        return self.whole.client_ids

    def client_dataloader(self, client: str, split: str) -> DataLoader[Any] | None:
        return self.whole.client_dataloader(client, self.source_of(split))

    def pooled_dataloader(self, split: str) -> DataLoader[Any] | None:
        return self.whole.pooled_dataloader(self.source_of(split))

    @property
    def underlying(self) -> FederatedDataModule:
        return self.whole

    @property
    def drifts(self) -> bool:
        return self.whole.drifts

    def at_round(self, round: int) -> FederatedDataModule:
        if not self.drifts:
            return self
        drifted = copy.copy(self)
        drifted.whole = self.whole.at_round(round)
        return drifted

    def sizes_by_round(self, client: str) -> list[int]:
        return self.whole.sizes_by_round(client)

    @property
    def wanted_statistics(self) -> dict[str, Any] | None:
        return self.whole.wanted_statistics

    def statistics_of(self, client: str) -> dict[str, Any]:
        return self.whole.statistics_of(client)

    def sample_values(self, client: str, split: str, column: str) -> list[str]:
        return self.whole.sample_values(client, self.source_of(split), column)

    def sample_groups(self, client: str, split: str = "train") -> np.ndarray | None:
        return self.whole.sample_groups(client, self.source_of(split))

    def num_samples(self, client: str, split: str = "train") -> int:
        return self.whole.num_samples(client, self.source_of(split))

    def class_counts(self, client: str, split: str = "train") -> list[int] | None:
        return self.whole.class_counts(client, self.source_of(split))

    @property
    def num_classes(self) -> int | None:
        return self.whole.num_classes

    @property
    def partition_name(self) -> str:
        return self.whole.partition_name

    @property
    def planted_groups(self) -> dict[str, int] | None:
        return self.whole.planted_groups

    @property
    def common_batches(self) -> Mapping[str, Any] | None:
        return self.whole.common_batches

    def public_dataloader(self) -> DataLoader[Any] | None:
        return self.whole.public_dataloader()

    @property
    def public_is_compared(self) -> bool:
        return self.whole.public_is_compared

    def public_report(self) -> dict[str, Any] | None:
        return self.whole.public_report()


class WrappedIndexedDataModule(IndexedFederatedDataModule):
    """Base of data modules that change what the clients of another one hold or see; a subclass has `build`.

    Args:
        source: The other data module.

    Raises:
        ValueError: If the source drifts or has public data; from `set_up_source`, if it waits for statistics.
    """

    no_public: ClassVar[str]
    """What the source's public data lack here: the end of a sentence."""
    no_statistics: ClassVar[str]
    """What is wrong with statistics that all clients agree on, and the way out: the end of a sentence."""

    def __init__(self, source: IndexedFederatedDataModule) -> None:
        refuse_drift(self, source)
        if source.public_fraction or source._public_given:
            raise ValueError(
                f"{type(self).__name__} got a source with public data, which have no {self.no_public}; leave them out."
            )
        super().__init__(source.batch_size, source.seed, source.num_workers, source.pin_memory, source.drop_last)
        self.source, self.collate_fn = source, source.collate_fn

    @property
    def underlying(self) -> FederatedDataModule:
        return self.source

    def prepare_data(self) -> None:
        """Call the source's `prepare_data`."""
        self.source.prepare_data()

    def set_up_source(self) -> None:
        """Call the source's `setup`; refuse statistics that are not there yet (`scale: federated`)."""
        self.source.setup()
        if self.source.wanted_statistics is not None:
            raise ValueError(f"{type(self).__name__} got a source with scale: federated, {self.no_statistics}")


class ValidatedOnTest(WrappedDataModule):
    """A data module whose validation samples are its test samples, so that a run's curve is on test data.

    Published curves and "rounds until 97 %" are often of test data, scored in every round. To compare with them a run has to
    do the same. Whatever such a run *selects* (checkpoints, early stopping, tuned values) is selected on test data: use it
    for such comparisons only. With `val_fraction: 0` the wrapped data module keeps no training samples for validation.

    Args:
        data: The data module.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule, ValidatedOnTest
        >>> data = ValidatedOnTest(DigitsDataModule(val_fraction=0))
        >>> data.setup()
        >>> data.num_samples("0", "val") == data.num_samples("0", "test") > 0
        True
    """

    def __init__(self, data: FederatedDataModule) -> None:
        super().__init__(data)
        if hasattr(data, "seed"):
            self.seed = data.seed

    def prepare_data(self) -> None:
        self.whole.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        self.whole.setup(stage)  # type: ignore[arg-type]

    def source_of(self, split: str) -> str:
        return "test" if split == "val" else split

    def with_statistics(self, totals: Mapping[str, Any]) -> FederatedDataModule:
        return ValidatedOnTest(self.whole.with_statistics(totals))

    def sizes_of(self, clients: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        return {client: (train, test, test) for client, (train, _, test) in self.whole.sizes_of(clients).items()}

    def fingerprint(self, split: str) -> str:
        return self.whole.fingerprint(self.source_of(split))
