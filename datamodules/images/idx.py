"""Image data sets in MNIST's format (IDX): MNIST, FashionMNIST, EMNIST."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedlightning.datamodules.download import fetch, find, missing
from fedlightning.datamodules.images.base import ImageFederatedDataModule
from fedlightning.datamodules.partition import Partitioner
from fedlightning.datamodules.readers import read_idx
from fedlightning.ranges import checked


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
