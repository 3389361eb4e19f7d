"""scikit-learn's handwritten digits: real data that need no files and no network.

Parts of the images make two or more modalities.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.modality_dataset import ModalityDataset, pair_by_class
from fedlightning.datamodules.multimodal_data import MultimodalDataModule
from fedlightning.datamodules.plans import Partitioner, cut
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import NonNegativeFloat, Range, checked
from fedlightning.seeding import generator


class DigitsDataModule(ArrayFederatedDataModule):
    """Handwritten digits: 1797 images of 8 x 8 grey pixels, 10 classes, from scikit-learn.

    They are the test part of UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998). `x` is float32
    in [0, 1] of shape `(batch, 1, 8, 8)`, or `(batch, 64)` with `flatten`; `y` is int64 of shape `(batch,)`. The test
    set is 359 samples (20 %, stratified), drawn by `split_seed` alone, so that every `seed` is tested on the same
    samples.

    Args:
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        batch_size: Number of samples in a batch.
        flatten: Return images as vectors of 64 numbers.
        split_seed: Seed of the division into training and test samples.
        options: The other arguments of `ArrayFederatedDataModule`, by name.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule, IIDPartitioner
        >>> data = DigitsDataModule(IIDPartitioner(num_clients=3))
        >>> data.setup()
        >>> [data.num_samples(client) for client in data.client_ids]
        [384, 383, 383]
        >>> x, y = next(iter(data.client_dataloader("0", "train")))
        >>> x.shape, y.shape
        (torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """

    @checked
    def __init__(
        self,
        partitioner: Partitioner | None = None,
        batch_size: int = 32,
        *,
        flatten: bool = False,
        split_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(partitioner, batch_size, **options)
        self.flatten, self.split_seed = flatten, split_seed

    def load(self) -> tuple[ArrayDataset, ArrayDataset]:
        from sklearn.datasets import load_digits

        images, digits = load_digits(return_X_y=True)
        x = torch.from_numpy(images).float().div_(16)
        y = torch.from_numpy(digits).long()
        if not self.flatten:
            x = x.view(-1, 1, 8, 8)
        train, test = cut(torch.arange(len(y)).numpy(), 0.2, generator(self.split_seed, "digits", "test"), digits)
        return ArrayDataset(x[train], y[train]), ArrayDataset(x[test], y[test])


class PairedDigitsDataModule(MultimodalDataModule):
    """Digits seen in parts, each part of another image of the same digit: small modalities that need no files.

    A modality is a band of rows of the 8 x 8 images: with two, `upper` and `lower` have 4 rows each. The bands of a
    sample come from different images of its class, so that each modality has information that the other lacks. No image is
    in both training and test samples, and none is used twice in one modality. Inputs are float32 `(batch, 1, rows, 8)` in
    [0, 1], plus noise.

    Args:
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        names: Names of the bands, from above; 2, 4 or 8 of equal height, or 3 (rows 0-2, 3-4, 5-7).
        noise: Standard deviation of Gaussian noise on the pixels. Default 0.1: FedAvg is right in about 75 % of the
            cases with one half, and in 90 % with both.
        positive: Make it a binary task: label 1 for this digit, 0 for all others. `None`: ten classes.
        options: The other arguments of `MultimodalDataModule`, by name.

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
        *,
        names: list[str] | None = None,
        noise: NonNegativeFloat = 0.1,
        positive: Annotated[int, Range("[0, 9]", "A digit; None is ten classes.")] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(partitioner, **options)
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
