"""Test data in the place of validation data: :class:`ValidatedOnTest`, for papers that scored test data in every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.datamodules.wrapped import WrappedDataModule


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
