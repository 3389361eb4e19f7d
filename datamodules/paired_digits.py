"""Two or more modalities from scikit-learn's digits, which need no files."""

from __future__ import annotations

from typing import Annotated

import torch

from fedlightning.datamodules.digits import DigitsDataModule
from fedlightning.datamodules.modalities import ModalityDataset, pair_by_class
from fedlightning.datamodules.multimodal import MultimodalDataModule
from fedlightning.datamodules.partition import Partitioner
from fedlightning.ranges import NonNegativeFloat, Range, checked
from fedlightning.seeding import generator


class PairedDigitsDataModule(MultimodalDataModule):
    """Digits seen in parts, each part of another image of the same digit: small modalities that need no files.

    A modality is a band of rows of the 8 x 8 images: with two, `upper` and `lower` have 4 rows each. The bands of a
    sample come from different images of its class, so that each modality has information that the other lacks. No image is
    in both training and test samples, and none is used twice in one modality. Inputs are float32 `(batch, 1, rows, 8)` in
    [0, 1], plus noise.

    Args:
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        batch_size: Number of samples in a batch.
        val_fraction: Share of every client's training samples for validation, in [0, 1).
        seed: Seed of the partition, the validation cut and the corruptions.
        modalities: Names of the modalities to use. `None`: all.
        sensors: Who has which modalities: see `MultimodalDataModule`.
        missing: Chance that a client lacks a modality: see `MultimodalDataModule`.
        missing_labels: Share of samples without a label, which are dropped.
        wrong_labels: Share of wrong labels in training and validation samples.
        names: Names of the bands, from above; 2, 4 or 8 of equal height, or 3 (rows 0-2, 3-4, 5-7).
        noise: Standard deviation of Gaussian noise on the pixels. Default 0.1: FedAvg is right in about 75 % of the
            cases with one half, and in 90 % with both.
        positive: Make it a binary task: label 1 for this digit, 0 for all others. `None`: ten classes.
        num_workers: Worker processes of every loader.
        pin_memory: Copy batches into page-locked memory (for a GPU).
        drop_last: Leave out the last incomplete training batch.
        max_train: Use only this many training samples, chosen by `seed`.
        max_test: Use only this many test samples, chosen by `seed`.
        val_seed: Seed of the validation cut alone. `None` is `seed`.

    Raises:
        ValueError: If the number of names or the noise is out of its range.

    Example:
        >>> from fedlightning.datamodules import PairedDigitsDataModule
        >>> data = PairedDigitsDataModule(names=["A", "D", "R"])
        >>> data.setup()
        >>> x, y = next(iter(data.client_dataloader("0", "train")))
        >>> {name: tuple(part.shape[1:]) for name, part in x.items()}
        {'A': (1, 3, 8), 'D': (1, 2, 8), 'R': (1, 3, 8)}
    """

    @checked
    def __init__(
        self,
        partitioner: Partitioner | None = None,
        batch_size: int = 32,
        val_fraction: float = 0.2,
        seed: int = 0,
        modalities: list[str] | None = None,
        sensors: dict[str, int] | None = None,
        missing: float = 0.0,
        missing_labels: float = 0.0,
        wrong_labels: float = 0.0,
        names: list[str] | None = None,
        noise: NonNegativeFloat = 0.1,
        positive: Annotated[int, Range("[0, 9]", "A digit; None is ten classes.")] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        max_train: int | None = None,
        max_test: int | None = None,
        val_seed: int | None = None,
    ) -> None:
        super().__init__(
            partitioner, batch_size, val_fraction, seed, modalities, sensors, missing, missing_labels, wrong_labels,
            num_workers, pin_memory, drop_last, max_train, max_test, val_seed,
        )  # fmt: skip
        self.names = ["upper", "lower"] if names is None else list(names)
        if len(self.names) not in HEIGHTS or len(set(self.names)) < len(self.names):
            raise ValueError(f"PairedDigitsDataModule got names={self.names}; give 2, 3, 4 or 8 different names.")
        self.noise, self.positive = noise, positive

    def load(self) -> tuple[ModalityDataset, ModalityDataset]:
        return tuple(  # type: ignore[return-value]
            self._paired(data.x, data.y, split)
            for data, split in zip(DigitsDataModule().load(), ("train", "test"), strict=True)
        )

    def _paired(self, x: torch.Tensor, y: torch.Tensor, split: str) -> ModalityDataset:
        labels = y.numpy()
        rows = pair_by_class([labels] * len(self.names), generator("paired digits", split))
        inputs = {}
        for name, chosen, band in zip(self.names, rows, x.split(HEIGHTS[len(self.names)], dim=2), strict=True):
            pixels = band[torch.from_numpy(chosen)]
            draw = generator("paired digits", split, name)
            inputs[name] = pixels + self.noise * torch.randn(pixels.shape, generator=draw)
        digits = y[torch.from_numpy(rows[0])]
        return ModalityDataset(inputs, digits if self.positive is None else (digits == self.positive).long())


HEIGHTS = {2: [4, 4], 3: [3, 2, 3], 4: [2] * 4, 8: [1] * 8}
"""Rows of each band, by the number of bands."""
