"""LEAF's federations (Caldas et al. 2018), from the files that its scripts write."""

from fedlightning.datamodules.leaf.base import LEAFDataModule
from fedlightning.datamodules.leaf.celeba import LEAFCelebADataModule
from fedlightning.datamodules.leaf.femnist import LEAFFEMNISTDataModule, LEAFSyntheticDataModule
from fedlightning.datamodules.leaf.reader import LEAFUser, read_leaf
from fedlightning.datamodules.leaf.sent140 import LEAFSent140DataModule
from fedlightning.datamodules.leaf.shakespeare import ShakespeareDataModule

__all__ = [
    "LEAFCelebADataModule",
    "LEAFDataModule",
    "LEAFFEMNISTDataModule",
    "LEAFSent140DataModule",
    "LEAFSyntheticDataModule",
    "LEAFUser",
    "ShakespeareDataModule",
    "read_leaf",
]
