"""Image data sets read from their official files: MNIST, FashionMNIST, EMNIST, CIFAR-10."""

from fedlightning.datamodules.images.base import ImageFederatedDataModule, PixelScale
from fedlightning.datamodules.images.cifar10 import CIFAR10DataModule
from fedlightning.datamodules.images.idx import EMNISTDataModule, FashionMNISTDataModule, MNISTDataModule

__all__ = [
    "CIFAR10DataModule",
    "EMNISTDataModule",
    "FashionMNISTDataModule",
    "ImageFederatedDataModule",
    "MNISTDataModule",
    "PixelScale",
]
