"""Test data in the place of validation data: :class:`ValidatedOnTest`, for papers that scored test data in every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlightning.datamodules.base import FederatedDataModule


class ValidatedOnTest(FederatedDataModule):
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
        super().__init__()
        self.data = data
        if hasattr(data, "seed"):
            self.seed = data.seed

    def prepare_data(self) -> None:
        self.data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        self.data.setup(stage)  # type: ignore[arg-type]

    @property
    def client_ids(self) -> list[str]:
        return self.data.client_ids

    def client_dataloader(self, client: str, split: str) -> Any:
        return self.data.client_dataloader(client, _source(split))

    def pooled_dataloader(self, split: str) -> Any:
        return self.data.pooled_dataloader(_source(split))

    @property
    def wanted_statistics(self) -> dict[str, Any] | None:
        return self.data.wanted_statistics

    def statistics_of(self, client: str) -> dict[str, Any]:
        return self.data.statistics_of(client)

    def with_statistics(self, totals: Mapping[str, Any]) -> FederatedDataModule:
        return ValidatedOnTest(self.data.with_statistics(totals))

    def sample_values(self, client: str, split: str, column: str) -> list[str]:
        return self.data.sample_values(client, _source(split), column)

    def num_samples(self, client: str, split: str = "train") -> int:
        return self.data.num_samples(client, _source(split))

    def sizes_of(self, clients: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        return {client: (train, test, test) for client, (train, _, test) in self.data.sizes_of(clients).items()}

    def class_counts(self, client: str, split: str = "train") -> list[int] | None:
        return self.data.class_counts(client, _source(split))

    @property
    def num_classes(self) -> int | None:
        return self.data.num_classes

    @property
    def partition_name(self) -> str:
        return self.data.partition_name

    @property
    def planted_groups(self) -> dict[str, int] | None:
        return self.data.planted_groups

    def fingerprint(self, split: str) -> str:
        return self.data.fingerprint(_source(split))

    @property
    def common_batches(self) -> Mapping[str, Any] | None:
        return self.data.common_batches

    def public_dataloader(self) -> Any:
        return self.data.public_dataloader()

    def public_report(self) -> dict[str, Any] | None:
        return self.data.public_report()


def _source(split: str) -> str:
    """Return the split of the wrapped data module that stands for a split of this one."""
    return "test" if split == "val" else split
