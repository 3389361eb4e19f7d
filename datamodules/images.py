"""Image data sets read from their official files: MNIST, FashionMNIST, EMNIST, CIFAR-10."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.download import fetch, find, missing
from fedlightning.datamodules.partition import Partitioner
from fedlightning.datamodules.readers import check_images, cifar_batches, read_idx
from fedlightning.datamodules.views import ArrayDataset


class PixelScale:
    """uint8 images ``(b, channels, h, w)`` to float32 in [0, 1], then ``(x - mean) / std`` by channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        # (x / 255 - mean) / std in one multiplication and one addition
        deviation = torch.tensor(std).view(1, -1, 1, 1)
        self.factor = 1 / (255 * deviation)
        self.shift = -torch.tensor(mean).view(1, -1, 1, 1) / deviation

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().mul_(self.factor).add_(self.shift)


class ImageFederatedDataModule(ArrayFederatedDataModule):
    """Base of the image data modules. Pixels are kept once, as bytes, and scaled by the batch.

    ``x``: float32 ``(b, channels, height, width)``; ``y``: int64 ``(b,)``. The official test set is the test split.

    Args:
        root: folder that holds the files (or gets them).
        partitioner: how samples become clients; default ``DirichletPartitioner(num_clients=10, alpha=0.5)``.
        batch_size: samples in a batch.
        val_fraction: share of every client's training samples for validation.
        seed: seed of the partition and of the validation cut.
        download: fetch missing files from the publisher, checked by md5.
        normalize: subtract the training set's mean and divide by its standard deviation, by channel; otherwise pixels
            are in [0, 1].
        num_workers: worker processes of every loader; 0 is fastest unless the model waits for data.
        pin_memory: copy batches into page-locked memory (for a GPU).
        drop_last: leave out the last incomplete training batch.
        max_train: use only so many training samples, chosen by ``seed`` (for a quick trial).
        max_test: use only so many test samples.
        val_seed: seed of the validation cut alone; None: ``seed``.
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
    ) -> None:
        super().__init__(
            partitioner,
            batch_size,
            val_fraction,
            seed,
            num_workers,
            pin_memory,
            drop_last,
            max_train,
            max_test,
            val_seed,
        )
        self.root, self.download, self.normalize = Path(root), download, normalize

    @property
    def folders(self) -> list[Path]:
        """Where files are looked for, in this order; downloads go to the first, torchvision's place."""
        return [self.root / self.name / "raw", self.root / self.name, self.root / "raw", self.root]

    @abstractmethod
    def arrays(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        """uint8 images ``(n, channels, height, width)`` and labels ``(n,)`` of one part."""

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


class MNISTDataModule(ImageFederatedDataModule):
    """MNIST (LeCun, Cortes, Burges 1998): 60000 + 10000 grey images of 28 x 28, 10 digits.

    Reads ``train-images-idx3-ubyte`` and the other three, plain or ``.gz``; see :class:`ImageFederatedDataModule`.
    """

    name = "MNIST"
    classes = 10
    mean, std = (0.1307,), (0.3081,)
    mirrors: tuple[str, ...] = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
    checksums = {
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    }

    def prepare_data(self) -> None:
        """Lightning's hook, on one process of a machine: fetch or ask for what is missing."""
        lacking = [name for name in self.checksums if self._path(name) is None]
        if lacking and not self.download:
            raise missing(self, lacking, self.root, self.folders)
        for name in lacking:
            urls = [f"{mirror}{name}.gz" for mirror in self.mirrors]
            fetch(urls, self.folders[0] / f"{name}.gz", self.checksums[name])

    def arrays(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        part = "train" if train else "t10k"
        names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
        images, labels = self._path(names[0]), self._path(names[1])
        if images is None or labels is None:
            raise missing(self, names, self.root, self.folders)
        return read_idx(images, 3)[:, None], read_idx(labels, 1)

    def _path(self, name: str) -> Path | None:
        return find([name, f"{name}.gz"], self.folders)


class FashionMNISTDataModule(MNISTDataModule):
    """Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): MNIST's format and sizes, 10 kinds of clothing.

    Its files are named like MNIST's: keep the two under different roots, or in ``root/FashionMNIST``.
    """

    name = "FashionMNIST"
    mean, std = (0.2860,), (0.3530,)
    mirrors = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
    checksums = {
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    }


class EMNISTDataModule(ImageFederatedDataModule):
    """EMNIST (Cohen et al. 2017): handwritten letters and digits, 28 x 28 grey.

    The files hold every image transposed; here they stand upright, like MNIST. ``letters`` is labelled 1 to 26 in the
    file and 0 to 25 here.

    Args:
        split: ``"balanced"`` (47 classes), ``"byclass"`` (62), ``"bymerge"`` (47), ``"letters"`` (26), ``"digits"`` or
            ``"mnist"`` (10).
        others: see :class:`ImageFederatedDataModule`. ``download`` fetches 0.5 GB, of which only the chosen
            split is kept.
    """

    name = "EMNIST"
    mean, std = (0.1751,), (0.3332,)
    url = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
    checksum = "58c8d27c78d21e728a6bc7b3cc06412e"
    split_classes = {"balanced": 47, "byclass": 62, "bymerge": 47, "letters": 26, "digits": 10, "mnist": 10}

    def __init__(
        self,
        root: str = "data",
        split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced",
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
    ) -> None:
        super().__init__(
            root, partitioner, batch_size, val_fraction, seed, download, normalize, num_workers, pin_memory, drop_last,
            max_train, max_test, val_seed,
        )  # fmt: skip
        if split not in self.split_classes:
            raise ValueError(f"EMNISTDataModule got split={split!r}; use one of {', '.join(self.split_classes)}.")
        self.split, self.classes = split, self.split_classes[split]

    def _names(self, train: bool) -> list[str]:
        prefix = f"emnist-{self.split}-{'train' if train else 'test'}"
        return [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]

    def _path(self, name: str) -> Path | None:
        folders = [*self.folders, *(folder / "gzip" for folder in self.folders)]
        return find([name, f"{name}.gz"], folders)

    def prepare_data(self) -> None:
        """Lightning's hook, on one process of a machine: fetch or ask for what is missing."""
        lacking = [name for name in self._names(True) + self._names(False) if self._path(name) is None]
        if not lacking:
            return
        if not self.download:
            raise missing(self, lacking, self.root, self.folders)
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
        names = self._names(train)
        images, labels = self._path(names[0]), self._path(names[1])
        if images is None or labels is None:
            raise missing(self, names, self.root, self.folders)
        classes = read_idx(labels, 1).astype(np.int64) - (1 if self.split == "letters" else 0)
        return np.ascontiguousarray(read_idx(images, 3).transpose(0, 2, 1))[:, None], classes


class CIFAR10DataModule(ImageFederatedDataModule):
    """CIFAR-10 (Krizhevsky 2009): 50000 + 10000 colour images of 32 x 32, 10 classes.

    Reads the folder ``cifar-10-batches-py`` or the archive ``cifar-10-python.tar.gz``; see
    :class:`ImageFederatedDataModule`.
    """

    name = "CIFAR10"
    classes = 10
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    url = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    checksum = "c58f30108f718f92721af3b95e74349a"
    _files = ("cifar-10-batches-py", "cifar-10-python.tar.gz")

    @property
    def folders(self) -> list[Path]:
        return [self.root, self.root / self.name]

    def prepare_data(self) -> None:
        """Lightning's hook, on one process of a machine: fetch or ask for what is missing."""
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
