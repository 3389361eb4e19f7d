"""The base of image data sets: official files read as bytes, made floats batch by batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

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
        mean: Mean of each channel, in [0, 1], or of each pixel, `(channels, height, width)`.
        std: Standard deviation of each channel, or of each pixel.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.images import PixelScale
        >>> PixelScale(mean=[0.5], std=[0.5])(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
        tensor([[[[-1.,  1.]]]])
    """

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        # (x / 255 - mean) / std in one multiplication and one addition
        means, deviation = (_by_channel(values) for values in (mean, std))
        self.factor = 1 / (255 * deviation)
        self.shift = -means / deviation

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().mul_(self.factor).add_(self.shift)


def _by_channel(values: Sequence[float] | Tensor) -> Tensor:
    found = torch.as_tensor(values)
    return found.view(1, -1, 1, 1) if found.ndim == 1 else found.unsqueeze(0)


class ImageFederatedDataModule(ArrayFederatedDataModule):
    """Base of the image data modules. Pixels are kept once, as bytes, and each batch is scaled when it is made.

    `x` is float32 `(batch, channels, height, width)`, `y` int64 `(batch,)`. The official test set is the test split.

    Args:
        root: Folder that holds the files, or receives them.
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        batch_size: Number of samples in a batch.
        download: Download missing files from the publisher, checked by SHA-256.
        normalize: Subtract the training set's mean and divide by its standard deviation, by channel. Otherwise pixels
            are in [0, 1]. `"pixel"`: each pixel by the mean and deviation that it has in both parts together, 0.001 / 255
            added to the deviation, as FedProx and pFedMe prepare MNIST.
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
        normalize: bool | Literal["pixel"] = True,
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
        found = {train: self.arrays(train) for train in (True, False)}
        if self.normalize == "pixel":
            scale = scale_of_pixels([images for images, _ in found.values()])
        parts = []
        for train, (images, labels) in found.items():
            check_images(f"The {'training' if train else 'test'} part of {self.name}", images, labels, self.classes)
            parts.append(
                ArrayDataset(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), transform=scale)
            )
        return parts[0], parts[1]


def scale_of_pixels(parts: Sequence[np.ndarray]) -> PixelScale:
    """Return the scale by which each pixel of uint8 images has mean 0 and deviation 1 over all parts.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from fedlightning.datamodules.images.base import scale_of_pixels
        >>> images = np.array([0, 200], dtype=np.uint8).reshape(2, 1, 1, 1)
        >>> scale_of_pixels([images])(torch.from_numpy(images)).flatten()
        tensor([-1.0000,  1.0000])
    """
    total = sum(map(len, parts))
    # float64 sums of a few images at a time: the whole of MNIST as float64 would be 440 MB
    chunks = [chunk for part in parts for chunk in np.array_split(part, max(1, len(part) // 1000))]
    mean = sum(chunk.sum(axis=0, dtype=np.float64) for chunk in chunks) / total
    variance = sum(((chunk - mean) ** 2).sum(axis=0) for chunk in chunks) / total
    deviation = np.sqrt(variance) + 0.001  # FedProx, data/mnist/generate_niid.py, on pixels 0 ... 255
    return PixelScale(torch.from_numpy(mean / 255).float(), torch.from_numpy(deviation / 255).float())
