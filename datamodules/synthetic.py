"""Synthetic(alpha, beta): clients whose points and labels come from models of their own, as many as are wanted.

FedProx and LEAF publish it with thirty devices of log-normal sizes. Beside it there are samples that are written in the
configuration: a few numbers for each client, for runs whose result is known on paper.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from fedlightning.datamodules.federated_data import SPLITS
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.lazy import LazyClients
from fedlightning.datamodules.plans import cut
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import (
    Length,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ShareBelowOne,
    at_most_one,
    checked,
)
from fedlightning.seeding import generator

FEATURES = 60
CLASSES = 10


class SyntheticDevicesDataModule(IndexedFederatedDataModule):
    """Synthetic(alpha, beta) with the sizes and the draws of its authors' script.

    Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020; the script is
    `data/synthetic_1_1/generate_synthetic.py` of their repository (MIT licence), `generate_iid.py` for `iid`. Nothing
    is read: the data are drawn, and all clients are in memory, with a union to score on. For very many clients of one
    size there is `SyntheticDataModule`.

    Device k holds `50 + floor(s)` samples, s from LogNormal(4, 2). It draws `x ~ N(v_k, S)` of 60 numbers, S diagonal with
    entries `j^-1.2`, and `y = argmax(W_k x + b_k)` of 10 classes. The entries of `W_k` and `b_k` come from `N(u_k, 1)` with
    `u_k ~ N(0, alpha^2)`, those of `v_k` from `N(B_k, 1)` with `B_k ~ N(0, beta^2)`. (The paper writes `N(0, alpha)`; in the
    script alpha is the standard deviation. The values 0 and 1 of the published curves mean the same in both.) `x` is float32
    `(batch, 60)`, `y` int64 `(batch,)`. `configs/models/synthetic_logistic.yaml` is the papers' multinomial regression.

    Draws are made in the script's order by numpy's `RandomState(seed)`, whose stream is fixed for good.

    Args:
        alpha: Standard deviation of the mean of a device's weights: how much their models differ.
        beta: Standard deviation of the mean of a device's points: how much their points differ.
        iid: One `W` and `b` for all devices, and points around 0. `alpha` and `beta` must then be 0.
        num_clients: Number of devices.
        batch_size: Number of samples in a batch (FedProx: 10).
        val_fraction: Share of the training samples for validation, in [0, 1); the script has none.
        test_fraction: Share of a device's samples for testing (the script: 0.1).
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If a value is out of its range, or `iid` comes with an alpha or beta other than 0.

    Example:
        >>> from fedlightning.datamodules import SyntheticDevicesDataModule
        >>> data = SyntheticDevicesDataModule(alpha=1, beta=1)
        >>> data.setup()
        >>> len(data.client_ids), data.num_classes, min(data.num_samples(client) for client in data.client_ids) >= 36
        (30, 10, True)
    """

    @checked
    @at_most_one("iid", "alpha", why="alpha says how clients differ. Leave it out, or use iid=False.")
    @at_most_one("iid", "beta", why="beta says how clients differ. Leave it out, or use iid=False.")
    def __init__(
        self,
        alpha: NonNegativeFloat = 0.0,
        beta: NonNegativeFloat = 0.0,
        iid: bool = False,
        num_clients: PositiveInt = 30,
        batch_size: int = 10,
        val_fraction: ShareBelowOne = 0.2,
        test_fraction: ShareBelowOne = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        self.alpha, self.beta, self.iid = float(alpha), float(beta), iid
        self.num_clients, self.val_fraction, self.test_fraction = int(num_clients), val_fraction, test_fraction

    @property
    def partition_name(self) -> str:
        return "Synthetic(iid)" if self.iid else f"Synthetic({self.alpha:g}, {self.beta:g})"

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        x, y, sizes = draw_devices(self.alpha, self.beta, self.iid, self.num_clients, self.seed)
        ids = [str(device) for device in range(self.num_clients)]
        parts: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
        for device, device_rows in zip(ids, np.split(np.arange(len(y)), np.cumsum(sizes)[:-1]), strict=True):
            rest, test = cut(device_rows, self.test_fraction, generator(self.seed, "partition", "test", device))
            train, val = cut(rest, self.val_fraction, generator(self.seed, "partition", "val", device))
            for split, indices in (("train", train), ("val", val), ("test", test)):
                parts[split].append(indices)
        data = ArrayDataset(torch.from_numpy(x).float(), torch.from_numpy(y))
        return ids, {split: Split(data, client_rows, y) for split, client_rows in parts.items()}


def draw_devices(
    alpha: float, beta: float, iid: bool, devices: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points float64 `(samples, 60)`, labels int64 `(samples,)` and samples of each device `(devices,)`.

    Example:
        >>> from fedlightning.datamodules.synthetic import draw_devices
        >>> points, labels, sizes = draw_devices(alpha=0, beta=0, iid=True, devices=2, seed=0)
        >>> points.shape == (sizes.sum(), 60), bool(sizes.min() >= 50)
        (True, True)
    """
    rng = np.random.RandomState(seed)
    sizes = rng.lognormal(4, 2, devices).astype(np.int64) + 50
    covariance = np.diag(np.arange(1.0, FEATURES + 1) ** -1.2)
    models, centres = np.zeros(devices), np.zeros((devices, FEATURES))
    if not iid:
        models, shifts = rng.normal(0, alpha, devices), rng.normal(0, beta, devices)
        centres = np.stack([rng.normal(shift, 1, FEATURES) for shift in shifts])
    points, labels = [], []
    for device in range(devices):
        if device == 0 or not iid:
            weights, bias = rng.normal(models[device], 1, (FEATURES, CLASSES)), rng.normal(models[device], 1, CLASSES)
        x = rng.multivariate_normal(centres[device], covariance, sizes[device])
        points.append(x)
        labels.append((x @ weights + bias).argmax(axis=1))
    return np.concatenate(points), np.concatenate(labels).astype(np.int64), sizes


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
        hashed = super().fingerprint(split)
        for earlier in SPLITS[: SPLITS.index(split)]:
            hashed = hashlib.sha256((super().fingerprint(earlier) + hashed).encode()).hexdigest()[:12]
        return hashed

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
        datasets = {}
        for split, count in self.counts.items():
            x = centre + spread * torch.randn(count, self.features, generator=drawn)
            datasets[split] = ArrayDataset(x, (x @ weights[:-1] + weights[-1]).argmax(1))
        return datasets


def _deviations(alpha: float, beta: float) -> torch.Tensor:
    return torch.tensor([alpha, beta]).sqrt()


class GivenDataModule(IndexedFederatedDataModule):
    """Clients whose samples are given as numbers, for a regression.

    With a linear model and squared errors every client has a quadratic objective, so fixed points and whole trajectories of
    federated methods can be computed by hand. Training, validation and test samples are the same ones. `x` is float32
    `(batch, features)`, `y` float32 `(batch,)`.

    Args:
        clients: Name of a client -> its samples: `x` (a list of rows), `y` (a number each), and perhaps `copies`, how often
            each of them is there (default 1). Equal samples make every batch the same, whatever its order.
        batch_size: Number of samples in a batch.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If there is no client, or a client's `x` and `y` do not fit together.

    Example:
        >>> from fedlightning.datamodules import GivenDataModule
        >>> clients = {"a": {"x": [[1.0]], "y": [2.0], "copies": 3}, "b": {"x": [[1.0]], "y": [0.0]}}
        >>> data = GivenDataModule(clients, batch_size=1)
        >>> data.setup()
        >>> data.client_ids, data.num_samples("a"), data.num_samples("b", "test")
        (['a', 'b'], 3, 1)
    """

    @checked
    def __init__(
        self,
        clients: Annotated[dict[str, dict[str, Any]], Length(note="Names with their x and y.")],
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        widths = set()
        for name, columns in clients.items():
            unknown = sorted(set(columns) - {"x", "y", "copies"})
            copies = columns.get("copies", 1)
            if unknown or "x" not in columns or "y" not in columns:
                raise ValueError(
                    f"GivenDataModule got {sorted(columns)} for client '{name}'; give x, y and perhaps copies."
                )
            if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
                raise ValueError(
                    f"GivenDataModule got copies={copies!r} for client '{name}'; give a whole number from 1 up."
                )
            if len(columns["x"]) != len(columns["y"]) or not columns["x"]:
                raise ValueError(
                    f"GivenDataModule got {len(columns['x'])} rows of x and {len(columns['y'])} numbers of y for client "
                    f"'{name}'; give as many of both, and at least one."
                )
            widths |= {len(row) for row in columns["x"]}
        if len(widths) > 1:
            raise ValueError(
                f"GivenDataModule got rows of {sorted(widths)} numbers; all rows of x have the same length."
            )
        self.clients = {str(name): dict(columns) for name, columns in clients.items()}

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        x: list[list[float]] = []
        y: list[float] = []
        indices = []
        for columns in self.clients.values():
            start, copies = len(y), columns.get("copies", 1)
            x += [list(row) for row in columns["x"]] * copies
            y += list(columns["y"]) * copies
            indices.append(np.arange(start, len(y)))
        data = ArrayDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
        return list(self.clients), {split: Split(data, indices) for split in ("train", "val", "test")}
