"""scikit-learn's handwritten digits: real data that need no files and no network."""

from __future__ import annotations

import torch

from fedlightning.datamodules.another import Public
from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.partition import Partitioner, cut
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.seeding import generator


class DigitsDataModule(ArrayFederatedDataModule):
    """Handwritten digits: 1797 images of 8 x 8 grey pixels, 10 classes, from scikit-learn.

    They are the test part of UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998). `x` is float32
    in [0, 1] of shape `(batch, 1, 8, 8)`, or `(batch, 64)` with `flatten`; `y` is int64 of shape `(batch,)`. The test
    set is 359 samples (20 %, stratified), drawn by `split_seed` alone, so that every `seed` is tested on the same
    samples.

    Args:
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        batch_size: Number of samples in a batch.
        val_fraction: Share of every client's training samples for validation, in [0, 1).
        seed: Seed of the partition and of the validation cut.
        flatten: Return images as vectors of 64 numbers.
        split_seed: Seed of the division into training and test samples.
        num_workers: Worker processes of every loader.
        pin_memory: Copy batches into page-locked memory (for a GPU).
        drop_last: Leave out the last incomplete training batch.
        max_train: Use only this many training samples, chosen by `seed`.
        max_test: Use only this many test samples, chosen by `seed`.
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        public_fraction: As `public`, for a share.
        public: Public data, which are in nobody's training, validation or test data: a share of every client's training
            samples, in [0, 1), or another data set, as a Dataset or a data module (its training data). What a client holds
            too is left out of that.
        public_labels: Whether public batches keep their labels.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule, IIDPartitioner
        >>> data = DigitsDataModule(IIDPartitioner(num_clients=3))
        >>> data.setup()
        >>> [data.num_samples(client) for client in data.client_ids]
        [384, 383, 383]
        >>> x, y = next(iter(data.client_dataloader("0", "train")))
        >>> x.shape, y.shape
        (torch.Size([32, 1, 8, 8]), torch.Size([32]))
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
        public_fraction: float = 0.0,
        public: Public = None,
        public_labels: bool = True,
    ) -> None:
        super().__init__(
            partitioner, batch_size, val_fraction, seed, num_workers, pin_memory, drop_last, max_train, max_test,
            val_seed, public_fraction, public, public_labels,
        )  # fmt: skip
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
