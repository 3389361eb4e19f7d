"""Partitions by a power law: few classes a client, and sizes that differ by orders of magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fedlightning.datamodules.partition import Partitioner, Plan, SharePlan, apportion, numpy_generator
from fedlightning.datamodules.views import Indices
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt


class PowerLawPartitioner(Partitioner):
    """A partition with few classes a client and log-normal sizes, as in FedProx (MNIST on 1000 devices) and in pFedMe.

    Client i holds the classes `(i + j) mod C` for `j < k`. Sizes are those of the authors' scripts:

    * `scheme="fedprox"` (Li et al. 2020, `data/mnist/generate_niid.py`): every holder of a class has `least` samples of it
      (the paper: 5); the others are shared in proportion to draws from `LogNormal(0, sigma)`. Nothing is left out; the
      script leaves out what its last holders have no room for, 965 of 70000.
    * `scheme="pfedme"` (Dinh et al. 2020, `generate_niid_20users.py`, N a multiple of C): `least` samples (10) of each class
      and a chunk of `2 (s + u)`, where `u` is uniform in 300 ... 599 and `s` is a draw from the log-normal, scaled so that
      all N k draws of a class are the class's size. A chunk that the class has no room for is left out, and so are samples
      that nobody asked for: about a third of MNIST. The script doubles chunks for up to 20 users only, as here.

    Args:
        num_clients: N, the number of clients.
        classes_per_client: k, classes of each client.
        sigma: Standard deviation of the logarithm of the sizes (both papers: 2). 0 makes holders of a class equal.
        least: Samples of each of its classes that every client holds. `None` is the scheme's number.
        scheme: `"fedprox"` or `"pfedme"`.

    Raises:
        ValueError: If a value is out of its range; from `plan`, if these samples cannot be divided like this.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import PowerLawPartitioner, describe
        >>> labels = torch.arange(10).repeat(600)
        >>> plan = PowerLawPartitioner(num_clients=100).plan(labels, torch.Generator().manual_seed(0))
        >>> report = describe(plan.split(labels), labels)
        >>> int((report.counts > 0).sum(axis=1).max()), bool(report.sizes.max() > 10 * report.sizes.min())
        (2, True)
    """

    def __init__(
        self,
        num_clients: PositiveInt,
        classes_per_client: PositiveInt = 2,
        sigma: NonNegativeFloat = 2.0,
        least: NonNegativeInt | None = None,
        scheme: Literal["fedprox", "pfedme"] = "fedprox",
    ) -> None:
        self.num_clients, self.classes_per_client = int(num_clients), int(classes_per_client)
        self.sigma, self.scheme = float(sigma), scheme
        self.least = int(least) if least is not None else 5 if scheme == "fedprox" else 10

    def plan(self, labels: Any, generator: torch.Generator) -> Plan:
        classes, counts = self._tally(labels, self.num_clients)
        holders = self._holders(counts)
        rng = numpy_generator(generator)
        if self.scheme == "pfedme":
            table = self._chunks(counts, holders, rng)
            return PartialPlan(SharePlan.of_counts(np.vstack([table, counts - table.sum(axis=0)]), classes))
        draws = np.where(holders, rng.lognormal(0.0, self.sigma, holders.shape), 0.0)
        columns = [
            np.where(held, self.least, 0) + apportion(draw, int(size) - self.least * int(held.sum()))
            for held, draw, size in zip(holders.T, draws.T, counts, strict=True)
        ]
        return SharePlan.of_counts(np.stack(columns, axis=1), classes)

    def _holders(self, counts: np.ndarray) -> np.ndarray:
        """Return who holds which class, bool `(clients, classes)`."""
        clients, held, total = self.num_clients, self.classes_per_client, len(counts)
        if held > total or held + clients - 1 < total:
            rule = f"at most {total}" if held > total else f"at least {total - clients + 1}, so that no class is lost"
            raise ValueError(
                f"PowerLawPartitioner got classes_per_client={held} for {clients} clients and {total} classes; use {rule}."
            )
        if self.scheme == "pfedme" and clients % total:
            raise ValueError(
                f"PowerLawPartitioner(scheme='pfedme') got num_clients={clients} for {total} classes; use a multiple of "
                f"{total}, or scheme='fedprox'."
            )
        holders = np.zeros((clients, total), dtype=bool)
        for place in range(held):
            holders[np.arange(clients), (np.arange(clients) + place) % total] = True
        short = holders.sum(axis=0) * self.least > counts
        if short.any():
            raise ValueError(
                f"PowerLawPartitioner: {short.sum()} classes have fewer samples than {self.least} for each holder; use fewer "
                f"clients, or least={int((counts // np.maximum(holders.sum(axis=0), 1)).min())} or less."
            )
        return holders

    def _chunks(self, counts: np.ndarray, holders: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the samples of each client and class by pFedMe's script, int64 `(clients, classes)`."""
        clients, total = holders.shape
        draws = rng.lognormal(0.0, self.sigma, (total, clients, self.classes_per_client))
        draws *= (counts - clients)[:, None, None] / draws.sum(axis=(1, 2), keepdims=True)
        table = np.where(holders, self.least, 0).astype(np.int64)
        for client in range(clients):
            for place in range(self.classes_per_client):
                label = (client + place) % total
                chunk = int(draws[label, client // (clients // total), place]) + int(rng.integers(300, 600))
                chunk *= 2 if clients <= 20 else 1
                if table[:, label].sum() + chunk < counts[label]:
                    table[client, label] += chunk
        return table


@dataclass
class PartialPlan(Plan):
    """A plan that leaves samples out: those of the last client of another plan.

    Attributes:
        whole: The plan with one more client, which gets what is left out.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules import SharePlan
        >>> from fedlightning.datamodules.power_law import PartialPlan
        >>> plan = PartialPlan(SharePlan.of_counts(np.array([[2], [1], [3]]), classes=None))
        >>> plan.client_ids, [len(part) for part in plan.split(6)]
        (['0', '1'], [2, 1])
    """

    whole: SharePlan

    def __post_init__(self) -> None:
        self.client_ids = self.whole.client_ids[:-1]

    def split(self, labels: Any, generator: torch.Generator | None = None) -> list[Indices]:
        """Divide samples among the clients; those of nobody are left out."""
        return self.whole.split(labels, generator)[:-1]
