"""scikit-learn's handwritten digits: real data that need no files and no network."""

from __future__ import annotations

from typing import Any

import torch

from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.partition import Partitioner, cut
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import checked
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
        flatten: Return images as vectors of 64 numbers.
        split_seed: Seed of the division into training and test samples.
        options: The other arguments of `ArrayFederatedDataModule`, by name.

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

    @checked
    def __init__(
        self,
        partitioner: Partitioner | None = None,
        batch_size: int = 32,
        *,
        flatten: bool = False,
        split_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(partitioner, batch_size, **options)
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
