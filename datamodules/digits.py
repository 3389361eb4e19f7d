"""scikit-learn's handwritten digits: real data that needs no file and no network."""

from __future__ import annotations

import torch

from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.partition import Partitioner, cut
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.seeding import generator


class DigitsDataModule(ArrayFederatedDataModule):
    """1797 images of 8 x 8 grey pixels, 10 digits (the test part of UCI "Optical Recognition of Handwritten Digits",
    Alpaydin and Kaynak 1998, as scikit-learn ships it).

    ``x``: float32 in [0, 1], shape ``(b, 1, 8, 8)``, or ``(b, 64)`` with ``flatten``; ``y``: int64. 359 samples (20 %,
    stratified) are the test set, drawn by ``split_seed`` alone so that every ``seed`` is tested on the same samples.

    Args:
        partitioner: how samples become clients; default ``DirichletPartitioner(num_clients=10, alpha=0.5)``.
        batch_size: samples in a batch.
        val_fraction: share of every client's training samples for validation.
        seed: seed of the partition and of the validation cut.
        flatten: give images as vectors of 64 numbers.
        split_seed: seed of the division into training and test samples.
        num_workers: worker processes of every loader.
        pin_memory: copy batches into page-locked memory (for a GPU).
        drop_last: leave out the last incomplete training batch.
        max_train: use only so many training samples, chosen by ``seed``.
        max_test: use only so many test samples.
        val_seed: seed of the validation cut alone; None: ``seed``.
    """

    def __init__(
        self,
        partitioner: Partitioner | None = None,
        batch_size: int = 32,
        val_fraction: float = 0.2,
        seed: int = 0,
        flatten: bool = False,
        split_seed: int = 0,
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
        self.flatten, self.split_seed = flatten, split_seed

    def load(self) -> tuple[ArrayDataset, ArrayDataset]:
        from sklearn.datasets import load_digits

        images, digits = load_digits(return_X_y=True)
        x = torch.from_numpy(images).float().div_(16)
        y = torch.from_numpy(digits).long()
        if not self.flatten:
            x = x.view(-1, 1, 8, 8)
        train, test = cut(torch.arange(len(y)).numpy(), 0.2, generator(self.split_seed, "digits", "test"), digits)
        return ArrayDataset(x[train], y[train]), ArrayDataset(x[test], y[test])
