"""Synthetic(alpha, beta): clients whose points and labels come from models of their own, as many as are wanted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from fedlightning.datamodules.base import SPLITS
from fedlightning.datamodules.lazy import LazyClients
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from fedlightning.seeding import generator


class SyntheticDataModule(LazyClients):
    """The synthetic clients of FedProx (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", section 5.1).

    Client *k* draws `x ~ N(v_k, S)` of 60 numbers, where `S` is diagonal with entries `j^-1.2`, and labels them
    `y = argmax(W_k x + b_k)`, 10 classes. The entries of `W_k` and `b_k` are drawn from `N(u_k, 1)` with `u_k ~ N(0, alpha)`;
    those of `v_k` from `N(B_k, 1)` with `B_k ~ N(0, beta)`. `alpha` says how much the clients' models differ, `beta` how much
    their points do; 0.5 and 1 are the values of the paper, as variances. Every client has the same number of samples, which
    in the paper follows a power law. Nothing is read, and a client is drawn when it is visited, from its own number: a
    hundred thousand cost no more than those that take part.

    With `labels="own"`, as in the paper, clients label by models that have nothing in common: `u_k` is added to the weights
    of all classes, which changes no label. A model for all of many such clients is no better than chance, so the default is
    one `W` and `b` for all (`labels="common"`), and clients differ in their points, and so in their classes.

    Args:
        num_clients: Number of clients.
        alpha: Variance of the mean of a client's weights, with `labels="own"`.
        beta: Variance of the mean of a client's points.
        labels: `"common"`: all clients label by one `W` and `b`; `"own"`: each by its own, as in the paper.
        iid: All clients have one `W`, one `b` and points around 0: the paper's Synthetic-IID. `alpha` and `beta` then mean
            nothing.
        samples: Training samples of every client.
        val_samples: Validation samples of every client.
        test_samples: Test samples of every client.
        batch_size: Number of samples in a batch.
        seed: Seed of all draws.

    Raises:
        ValueError: If a variance or a number of samples is below 0, there is no training sample, or `labels` is neither.

    Example:
        >>> from fedlightning.datamodules import SyntheticDataModule
        >>> data = SyntheticDataModule(num_clients=100_000, samples=20)
        >>> x, y = next(iter(data.client_dataloader("54321", "train")))
        >>> x.shape, y.shape, data.num_samples("0", "val")
        (torch.Size([10, 60]), torch.Size([10]), 5)
    """

    features = 60
    """Numbers of a point."""

    @checked
    def __init__(
        self,
        num_clients: int = 1000,
        alpha: NonNegativeFloat = 0.5,
        beta: NonNegativeFloat = 0.5,
        labels: Literal["common", "own"] = "common",
        iid: bool = False,
        samples: PositiveInt = 20,
        val_samples: NonNegativeInt = 5,
        test_samples: NonNegativeInt = 5,
        batch_size: int = 10,
        seed: int = 0,
    ) -> None:
        counts = {"train": samples, "val": val_samples, "test": test_samples}
        name = "Synthetic(iid)" if iid else f"Synthetic({alpha:g}, {beta:g}), {labels} labels"
        super().__init__(num_clients, sizes=counts, batch_size=batch_size, seed=seed, name=name)
        self.alpha, self.beta, self.labels, self.iid, self.counts = alpha, beta, labels, iid, counts

    @property
    def num_classes(self) -> int:
        return 10

    def fingerprint(self, split: str) -> str:
        """Return a short hash of what a split is drawn from: of the splits before it, too, which are drawn first."""
        found = super().fingerprint(split)
        for earlier in SPLITS[: SPLITS.index(split)]:
            found = hashlib.sha256((super().fingerprint(earlier) + found).encode()).hexdigest()[:12]
        return found

    def client(self, number: int) -> Mapping[str, Dataset[Any]]:
        """Draw a client: its model, its points and their labels.

        Args:
            number: The client's number, from 0.
        """
        drawn = generator(self.seed, "synthetic", number)
        common = self.iid or self.labels == "common"
        models = generator(self.seed, "synthetic", "one for all") if common else drawn
        u, b = (
            (0.0, 0.0) if self.iid else (torch.randn(2, generator=drawn) * _deviations(self.alpha, self.beta)).tolist()
        )
        weights = torch.randn(self.features + 1, self.num_classes, generator=models) + (0.0 if common else u)
        centre = torch.zeros(self.features) if self.iid else torch.randn(self.features, generator=drawn) + b
        spread = torch.arange(1, self.features + 1).float() ** -0.6  # deviations: the variances are j^-1.2
        found = {}
        for split, count in self.counts.items():
            x = centre + spread * torch.randn(count, self.features, generator=drawn)
            found[split] = ArrayDataset(x, (x @ weights[:-1] + weights[-1]).argmax(1))
        return found


def _deviations(alpha: float, beta: float) -> torch.Tensor:
    return torch.tensor([alpha, beta]).sqrt()
