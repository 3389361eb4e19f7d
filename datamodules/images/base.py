"""The base of image data sets: official files read as bytes, made floats batch by batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.partition import Partitioner
from fedlightning.datamodules.readers import check_images
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import checked


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
        download: Download missing files from the publisher, checked by SHA-256.
        normalize: Subtract the training set's mean and divide by its standard deviation, by channel. Otherwise pixels
            are in [0, 1].
        options: The other arguments of `ArrayFederatedDataModule`, by name.

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

    @checked
    def __init__(
        self,
        root: str = "data",
        partitioner: Partitioner | None = None,
        batch_size: int = 64,
        *,
        download: bool = False,
        normalize: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(partitioner, batch_size, **options)
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
