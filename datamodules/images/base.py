"""The base of image data sets: official files read as bytes, made floats batch by batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.another import Public
from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.partition import Partitioner
from fedlightning.datamodules.readers import check_images
from fedlightning.datamodules.views import ArrayDataset


class PixelScale:
    """A transform of uint8 images `(batch, channels, height, width)` to float32: `(x / 255 - mean) / std` by channel.

    Args:
        mean: Mean of each channel, in [0, 1].
        std: Standard deviation of each channel.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.images import PixelScale
        >>> PixelScale(mean=[0.5], std=[0.5])(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
        tensor([[[[-1.,  1.]]]])
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        # (x / 255 - mean) / std in one multiplication and one addition
        deviation = torch.tensor(std).view(1, -1, 1, 1)
        self.factor = 1 / (255 * deviation)
        self.shift = -torch.tensor(mean).view(1, -1, 1, 1) / deviation

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().mul_(self.factor).add_(self.shift)


class ImageFederatedDataModule(ArrayFederatedDataModule):
    """Base of the image data modules. Pixels are kept once, as bytes, and each batch is scaled when it is made.

    `x` is float32 `(batch, channels, height, width)`, `y` int64 `(batch,)`. The official test set is the test split.

    Args:
        root: Folder that holds the files, or receives them.
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        batch_size: Number of samples in a batch.
        val_fraction: Share of every client's training samples for validation, in [0, 1).
        seed: Seed of the partition and of the validation cut.
        download: Download missing files from the publisher, checked by SHA-256.
        normalize: Subtract the training set's mean and divide by its standard deviation, by channel. Otherwise pixels
            are in [0, 1].
        num_workers: Worker processes of every loader; 0 is fastest unless the model waits for data.
        pin_memory: Copy batches into page-locked memory (for a GPU).
        drop_last: Leave out the last incomplete training batch.
        max_train: Use only this many training samples, chosen by `seed` (for a quick trial).
        max_test: Use only this many test samples, chosen by `seed`.
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        public_fraction: As `public`, for a share.
        public: Public data, which are in nobody's training, validation or test data: a share of every client's training
            samples, in [0, 1), or another data set, as a Dataset or a data module (its training data). What a client holds
            too is left out of that.
        public_labels: Whether public batches keep their labels.

    Attributes:
        name: Name of the data set and of its folder.
        classes: Number of classes.
        mean: Mean of each channel of the training set, in [0, 1].
        std: Standard deviation of each channel of the training set.

    Example:
        >>> from fedlightning.datamodules import CIFAR10DataModule, ImageFederatedDataModule
        >>> data = CIFAR10DataModule(root="data")
        >>> isinstance(data, ImageFederatedDataModule), data.name, data.classes
        (True, 'CIFAR10', 10)
    """

    name: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(
        self,
        root: str = "data",
        partitioner: Partitioner | None = None,
        batch_size: int = 64,
        val_fraction: float = 0.2,
        seed: int = 0,
        download: bool = False,
        normalize: bool = True,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        max_train: int | None = None,
        max_test: int | None = None,
        val_seed: int | None = None,
        public_fraction: float = 0.0,
        public: Public = None,
        public_labels: bool = True,
    ) -> None:
        super().__init__(
            partitioner, batch_size, val_fraction, seed, num_workers, pin_memory, drop_last, max_train, max_test,
            val_seed, public_fraction, public, public_labels,
        )  # fmt: skip
        self.root, self.download, self.normalize = Path(root), download, normalize

    @property
    def folders(self) -> list[Path]:
        """Folders that are searched for files, in this order; downloads go to the first, which is torchvision's."""
        return [self.root / self.name / "raw", self.root / self.name, self.root / "raw", self.root]

    @abstractmethod
    def arrays(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return uint8 images `(samples, channels, height, width)` and labels `(samples,)` of one part.

        Args:
            train: The training part, else the test part.
        """

    def load(self) -> tuple[ArrayDataset, ArrayDataset]:
        channels = len(self.mean)
        scale = PixelScale(self.mean, self.std) if self.normalize else PixelScale([0.0] * channels, [1.0] * channels)
        parts = []
        for train in (True, False):
            images, labels = self.arrays(train)
            check_images(f"The {'training' if train else 'test'} part of {self.name}", images, labels, self.classes)
            parts.append(
                ArrayDataset(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), transform=scale)
            )
        return parts[0], parts[1]
