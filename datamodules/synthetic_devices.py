"""Synthetic(alpha, beta) as FedProx and LEAF publish it: thirty devices with log-normal sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.partition import cut
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import NonNegativeFloat, PositiveInt, ShareBelowOne, at_most_one, checked
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
        for device, held in zip(ids, np.split(np.arange(len(y)), np.cumsum(sizes)[:-1]), strict=True):
            rest, test = cut(held, self.test_fraction, generator(self.seed, "partition", "test", device))
            train, val = cut(rest, self.val_fraction, generator(self.seed, "partition", "val", device))
            for split, indices in (("train", train), ("val", val), ("test", test)):
                parts[split].append(indices)
        data = ArrayDataset(torch.from_numpy(x).float(), torch.from_numpy(y))
        return ids, {split: Split(data, held, y) for split, held in parts.items()}


def draw_devices(
    alpha: float, beta: float, iid: bool, devices: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points float64 `(samples, 60)`, labels int64 `(samples,)` and samples of each device `(devices,)`.

    Example:
        >>> from fedlightning.datamodules.synthetic_devices import draw_devices
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
