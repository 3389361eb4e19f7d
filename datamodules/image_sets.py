"""The base of image data sets: official files read as bytes, made floats batch by batch.

MNIST, FashionMNIST and EMNIST (in the IDX format) and CIFAR-10 are read here, CIFAR-100 and SVHN by torchvision.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.download import fetch, find, missing
from fedlightning.datamodules.plans import Partitioner
from fedlightning.datamodules.readers import check_images, cifar_batches, read_idx
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import checked


class PixelScale:
    """A transform of uint8 images `(batch, channels, height, width)` to float32: `(x / 255 - mean) / std` by channel.

    Args:
        mean: Mean of each channel, in [0, 1], or of each pixel, `(channels, height, width)`.
        std: Standard deviation of each channel, or of each pixel.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.image_sets import PixelScale
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
    tensor = torch.as_tensor(values)
    return tensor.view(1, -1, 1, 1) if tensor.ndim == 1 else tensor.unsqueeze(0)


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

    common_options: ClassVar[Sequence[str]] = ("normalize",)
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
    def coupled_records(self) -> str:
        if self.normalize != "pixel":
            return ""
        return 'normalize="pixel" scales each pixel by its mean and deviation in all images. Take normalize: true or false.'

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
        parts_by_split = {train: self.arrays(train) for train in (True, False)}
        if self.normalize == "pixel":
            scale = scale_of_pixels([images for images, _ in parts_by_split.values()])
        parts = []
        for train, (images, labels) in parts_by_split.items():
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
        >>> from fedlightning.datamodules.image_sets import scale_of_pixels
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


class _IdxDataModule(ImageFederatedDataModule):
    """Data sets in MNIST's format: a file of images and a file of labels for each part."""

    most: tuple[int, int]
    """Samples of the training and of the test part; a file that claims more is refused before it is read."""

    @abstractmethod
    def _names(self, train: bool) -> list[str]:
        """Return the names of the two files of one part, without `.gz`."""

    def _path(self, name: str) -> Path | None:
        return find([name, f"{name}.gz"], self.folders)

    def _lacking(self) -> list[str]:
        """Return the names of missing files, or raise an error if they must not be downloaded."""
        names = [name for name in self._names(True) + self._names(False) if self._path(name) is None]
        if names and not self.download:
            raise missing(self, names, self.root, self.folders)
        return names

    def _read(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return images `(samples, height, width)` and labels `(samples,)` of one part, as they are in the files."""
        names = self._names(train)
        images, labels = self._path(names[0]), self._path(names[1])
        if images is None or labels is None:
            raise missing(self, names, self.root, self.folders)
        most = self.most[0 if train else 1]
        return read_idx(images, 3, most=(most, 28, 28)), read_idx(labels, 1, most=(most,))


class MNISTDataModule(_IdxDataModule):
    """MNIST (LeCun, Cortes, Burges 1998): 60000 + 10000 grey images of 28 x 28, 10 digits.

    Reads `train-images-idx3-ubyte` and the other three files, plain or `.gz`.

    Args:
        root: Folder that holds the files, or receives them.
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        batch_size: Number of samples in a batch.
        only: Classes whose images are kept; they become 0, 1, ... in this order. `None`: all.
        options: The other arguments of `ImageFederatedDataModule`, by name.

    Raises:
        ValueError: If `only` is empty, or names a class twice or one that there is not.

    Example:
        >>> from fedlightning.datamodules import MNISTDataModule
        >>> data = MNISTDataModule(root="data", only=[4, 9])  # files are read by data.setup()
        >>> data.folders[0].as_posix(), len(data.checksums), data.classes
        ('data/MNIST/raw', 4, 2)
    """

    common_options = ("normalize", "only")
    name = "MNIST"
    classes = 10
    mean, std = (0.1307,), (0.3081,)
    most = (60_000, 10_000)
    mirrors: tuple[str, ...] = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
    checksums = {
        "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    }

    @checked
    def __init__(
        self,
        root: str = "data",
        partitioner: Partitioner | None = None,
        batch_size: int = 64,
        *,
        only: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, partitioner, batch_size, **options)
        self.only = None if only is None else list(only)
        if self.only is not None:
            if not self.only or len({*self.only} & {*range(self.classes)}) != len(self.only):
                raise ValueError(
                    f"{type(self).__name__} got only={self.only}. Name classes from 0 to {self.classes - 1}, each once."
                )
            self.classes = len(self.only)

    def prepare_data(self) -> None:
        """Download missing files (Lightning's hook, on one process of a machine).

        Raises:
            FileNotFoundError: If files are missing and `download` is off.
        """
        for name in self._lacking():
            urls = [f"{mirror}{name}.gz" for mirror in self.mirrors]
            fetch(urls, self.folders[0] / f"{name}.gz", self.checksums[name])

    def arrays(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self._read(train)
        if self.only is not None:
            kept = np.isin(labels, self.only)
            place = {number: position for position, number in enumerate(self.only)}
            images, labels = images[kept], np.array([place[int(label)] for label in labels[kept]], dtype=np.int64)
        return images[:, None], labels

    def _names(self, train: bool) -> list[str]:
        part = "train" if train else "t10k"
        return [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]


class FashionMNISTDataModule(MNISTDataModule):
    """Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): MNIST's format and sizes, 10 kinds of clothing.

    Its files are named like MNIST's: keep the two under different roots, or in `root/FashionMNIST`. The arguments are
    those of `MNISTDataModule`.

    Example:
        >>> from fedlightning.datamodules import FashionMNISTDataModule
        >>> FashionMNISTDataModule(root="data").folders[0].as_posix()
        'data/FashionMNIST/raw'
    """

    name = "FashionMNIST"
    mean, std = (0.2860,), (0.3530,)
    mirrors = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
    checksums = {
        "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    }


class EMNISTDataModule(_IdxDataModule):
    """EMNIST (Cohen et al. 2017): handwritten letters and digits, 28 x 28 grey.

    The files hold every image transposed; here they stand upright, like MNIST. `letters` is labelled 1 to 26 in the
    file and 0 to 25 here. A download is 0.5 GB, of which only the chosen split is kept.

    Args:
        root: Folder that holds the files, or receives them.
        split: `"balanced"` (47 classes), `"byclass"` (62), `"bymerge"` (47), `"letters"` (26), `"digits"` or `"mnist"`
            (10).
        options: The other arguments of `ImageFederatedDataModule`, by name.

    Raises:
        ValueError: If there is no such `split`.

    Example:
        >>> from fedlightning.datamodules import EMNISTDataModule
        >>> EMNISTDataModule(root="data", split="letters").classes
        26
    """

    common_options = ("normalize", "split")
    name = "EMNIST"
    mean, std = (0.1751,), (0.3332,)
    most = (697_932, 116_323)  # of byclass, the largest split
    url = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
    checksum = "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e"
    split_classes = {"balanced": 47, "byclass": 62, "bymerge": 47, "letters": 26, "digits": 10, "mnist": 10}

    @checked
    def __init__(
        self,
        root: str = "data",
        split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced",
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.split, self.classes = split, self.split_classes[split]

    def _names(self, train: bool) -> list[str]:
        prefix = f"emnist-{self.split}-{'train' if train else 'test'}"
        return [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]

    def _path(self, name: str) -> Path | None:
        folders = [*self.folders, *(folder / "gzip" for folder in self.folders)]
        return find([name, f"{name}.gz"], folders)

    def prepare_data(self) -> None:
        """Download missing files (Lightning's hook, on one process of a machine).

        Raises:
            FileNotFoundError: If files are missing and `download` is off.
        """
        lacking = self._lacking()
        if not lacking:
            return
        target = self.folders[0]
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            archive = fetch([self.url], Path(scratch) / "gzip.zip", self.checksum)
            with zipfile.ZipFile(archive) as members:
                for name in lacking:
                    unpacked = Path(scratch) / f"{name}.gz"
                    with members.open(f"gzip/{name}.gz") as packed, unpacked.open("wb") as file:
                        shutil.copyfileobj(packed, file)
                    unpacked.replace(target / f"{name}.gz")

    def arrays(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self._read(train)
        classes = labels.astype(np.int64) - (1 if self.split == "letters" else 0)
        return np.ascontiguousarray(images.transpose(0, 2, 1))[:, None], classes


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
        dataset = self._dataset(train, False)
        labels = dataset.labels if hasattr(dataset, "labels") else dataset.targets
        images = np.asarray(dataset.data, dtype=np.uint8)
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


__all__ = [
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "SVHNDataModule",
    "TorchvisionDataModule",
    "EMNISTDataModule",
    "FashionMNISTDataModule",
    "ImageFederatedDataModule",
    "MNISTDataModule",
    "PixelScale",
]
