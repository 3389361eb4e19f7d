"""CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedlightning.datamodules.download import fetch, find, missing
from fedlightning.datamodules.images.base import ImageFederatedDataModule
from fedlightning.datamodules.readers import cifar_batches


class CIFAR10DataModule(ImageFederatedDataModule):
    """CIFAR-10 (Krizhevsky 2009): 50000 + 10000 colour images of 32 x 32, 10 classes.

    Reads the folder `cifar-10-batches-py` or the archive `cifar-10-python.tar.gz`. The arguments are those of
    `ImageFederatedDataModule`.

    Example:
        >>> from fedlightning.datamodules import CIFAR10DataModule
        >>> data = CIFAR10DataModule(root="data")  # files are read by data.setup()
        >>> len(data.mean), data.classes
        (3, 10)
    """

    name = "CIFAR10"
    classes = 10
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    url = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    checksum = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
    _files = ("cifar-10-batches-py", "cifar-10-python.tar.gz")

    @property
    def folders(self) -> list[Path]:
        return [self.root, self.root / self.name]

    def prepare_data(self) -> None:
        """Download missing files (Lightning's hook, on one process of a machine).

        Raises:
            FileNotFoundError: If files are missing and `download` is off.
        """
        if find(self._files, self.folders) is not None:
            return
        if not self.download:
            raise missing(self, [" or ".join(self._files)], self.root, self.folders)
        fetch([self.url], self.root / self._files[1], self.checksum)

    def arrays(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        source = find(self._files, self.folders)
        if source is None:
            raise missing(self, [" or ".join(self._files)], self.root, self.folders)
        return cifar_batches(source, [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"])
