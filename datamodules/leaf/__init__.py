"""LEAF's federations (Caldas et al. 2018), from the files that its scripts write."""

from fedlightning.datamodules.leaf.datasets import (
    LEAFCelebADataModule,
    LEAFFEMNISTDataModule,
    LEAFSent140DataModule,
    LEAFSyntheticDataModule,
    ShakespeareDataModule,
)
from fedlightning.datamodules.leaf.leaf_users import LEAFDataModule, LEAFUser, read_leaf

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
