"""Image sets that torchvision reads: CIFAR-100 and SVHN."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedlightning.datamodules.images.base import ImageFederatedDataModule


class TorchvisionDataModule(ImageFederatedDataModule):
    """Base of image sets of which torchvision has a class; subclasses name it.

    torchvision checks files by their MD5, and downloads them if `download` is on. The arguments are those of
    `ImageFederatedDataModule`.

    Attributes:
        source: Name of the class in `torchvision.datasets`.
    """

    source: str

    def prepare_data(self) -> None:
        """Download missing files (Lightning's hook), or say which folder they belong in.

        Raises:
            FileNotFoundError: If files are missing or damaged and `download` is off.
        """
        for train in (True, False):
            self._dataset(train, self.download)

    def arrays(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        found = self._dataset(train, False)
        labels = found.labels if hasattr(found, "labels") else found.targets
        images = np.asarray(found.data, dtype=np.uint8)
        if images.shape[-1] == 3:
            images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        return images, np.asarray(labels, dtype=np.int64)

    def part(self, train: bool) -> dict[str, Any]:
        """Return the keyword arguments by which the class tells its parts apart.

        Args:
            train: The training part, else the test part.
        """
        return {"train": train}

    def _dataset(self, train: bool, download: bool) -> Any:
        import torchvision.datasets

        try:
            return getattr(torchvision.datasets, self.source)(str(self.root), download=download, **self.part(train))
        except RuntimeError as error:
            raise FileNotFoundError(
                f"{type(self).__name__}: the files of torchvision.datasets.{self.source} are not whole in {self.root} "
                f"({error}); set download=True, or put them there."
            ) from error


class CIFAR100DataModule(TorchvisionDataModule):
    """CIFAR-100 (Krizhevsky 2009): 50000 + 10000 colour images of 32 x 32, 100 classes. No formal licence.

    Needs torchvision (the extra `vision`). Reads the folder `cifar-100-python` under `root`. The arguments are those of
    `ImageFederatedDataModule`.

    Example:
        >>> from fedlightning.datamodules import CIFAR100DataModule
        >>> CIFAR100DataModule(root="data").classes  # files are read by data.setup()
        100
    """

    name = "CIFAR100"
    classes = 100
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    source = "CIFAR100"


class SVHNDataModule(TorchvisionDataModule):
    """SVHN (Netzer et al. 2011): 73257 + 26032 colour images of house numbers, 32 x 32, 10 digits. For non-commercial use.

    Needs torchvision (the extra `vision`). Reads `train_32x32.mat` and `test_32x32.mat` under `root`. The arguments are
    those of `ImageFederatedDataModule`.

    Example:
        >>> from fedlightning.datamodules import SVHNDataModule
        >>> SVHNDataModule(root="data").classes  # files are read by data.setup()
        10
    """

    name = "SVHN"
    classes = 10
    mean, std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
    source = "SVHN"

    def part(self, train: bool) -> dict[str, Any]:
        return {"split": "train" if train else "test"}
