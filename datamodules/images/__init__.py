"""Image data sets read from their official files: MNIST, FashionMNIST, EMNIST, CIFAR-10."""

from fedlightning.datamodules.images.base import ImageFederatedDataModule, PixelScale
from fedlightning.datamodules.images.cifar10 import CIFAR10DataModule
from fedlightning.datamodules.images.idx import EMNISTDataModule, FashionMNISTDataModule, MNISTDataModule
from fedlightning.datamodules.images.torchvision_sets import CIFAR100DataModule, SVHNDataModule, TorchvisionDataModule

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
