"""Partitions drawn from Dirichlet distributions: skewed labels, skewed sizes, both.

Partitions by a power law: few classes a client, and sizes that differ by orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fedlightning.datamodules.plans import (
    Concentration,
    Partitioner,
    Plan,
    SharePlan,
    apportion,
    numpy_generator,
    round_table,
    sinkhorn,
)
from fedlightning.datamodules.views import Indices
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, needs

_REDRAWS = 100


class DirichletPartitioner(Partitioner):
    """Label skew by Dirichlet draws, in one of two different schemes.

    `by="class"` (Yurochkin et al. 2019; NIID-Bench, Li et al. 2022): for every class `c` draw `q_c ~ Dir_N(alpha)`;
    client `i` gets the share `q_ci` of the class. Client sizes vary.

    `by="client"` (Hsu et al. 2019): every client draws `q_i ~ Dir_C(alpha * prior)`, prior = the class shares of the
    data, and takes `n / N` samples accordingly without replacement, renormalised when a class runs out. Client sizes
    are equal. Since the prior sums to 1, an `alpha` here is about `C` times as skewed as the same one there.

    Args:
        num_clients: N, the number of clients.
        alpha: Concentration; 0.5 is usual (and PLayer-FL's), small is skewed.
        by: `"class"` or `"client"`.
        min_samples: Samples of the smallest client. A draw with a smaller one is repeated at most 100 times, after
            which the largest clients give samples to the smallest. `None` is 10 (NIID-Bench), or half of the mean size
            if that is less. Holds for the data that the plan is made on.
        balance: A client that has `n / N` samples gets none of the next classes (NIID-Bench). Only with `by="class"`.

    Raises:
        ValueError: If a value is out of its range, or `balance` is set with `by="client"`.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import DirichletPartitioner, describe
        >>> labels, generator = torch.arange(10).repeat(100), torch.Generator().manual_seed(0)
        >>> plans = [DirichletPartitioner(num_clients=5, alpha=alpha).plan(labels, generator) for alpha in (0.1, 100)]
        >>> skewed, even = (describe(plan.split(labels), labels).mean_total_variation for plan in plans)
        >>> skewed > 0.4, even < 0.1
        (True, True)
    """

    @needs("balance", "by", value="class", why="a division by client is balanced as it is. Leave balance out.")
    def __init__(
        self,
        num_clients: PositiveInt,
        alpha: Concentration = 0.5,
        by: Literal["class", "client"] = "class",
        min_samples: NonNegativeInt | None = None,
        balance: bool = False,
    ) -> None:
        self.num_clients = int(num_clients)
        self.alpha, self.by, self.balance = float(alpha), by, balance
        self.min_samples = min_samples

    def plan(self, labels: Any, generator: torch.Generator) -> SharePlan:
        classes, counts = self._tally(labels, self.num_clients)
        minimum = _minimum(self, self.min_samples, 10, self.num_clients, int(counts.sum()))
        rng = numpy_generator(generator)
        if self.by == "client":
            return SharePlan.of_counts(self._by_client(counts, rng), classes)
        for _ in range(_REDRAWS):
            table = self._by_class(counts, rng)
            if table.sum(axis=1).min() >= minimum:
                break
        return SharePlan.of_counts(raise_to_minimum(table, minimum), classes)

    def _by_class(self, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        table = np.zeros((self.num_clients, len(counts)), dtype=np.int64)
        target = counts.sum() / self.num_clients
        for column, amount in enumerate(counts):
            share = rng.dirichlet(np.full(self.num_clients, self.alpha))
            if self.balance:
                open_ = table.sum(axis=1) < target
                share = share * open_ if (share * open_).sum() > 0 else open_.astype(np.float64)
            table[:, column] = apportion(share, int(amount))
        return table

    def _by_client(self, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        table = np.zeros((self.num_clients, len(counts)), dtype=np.int64)
        left = counts.copy()
        sizes = apportion(np.ones(self.num_clients), int(counts.sum()))
        # The clients that draw last get what is left over, so their order is random.
        for client in rng.permutation(self.num_clients):
            share = rng.dirichlet(self.alpha * counts / counts.sum())
            while (missing := int(sizes[client] - table[client].sum())) > 0:
                open_ = share * (left > 0)
                open_ = open_ / open_.sum() if open_.sum() > 1e-300 else left / left.sum()
                taken = np.minimum(rng.multinomial(missing, open_), left)
                table[client] += taken
                left = left - taken
        return table


class LabelSkewPartitioner(Partitioner):
    """LS (FLIU): label skew with equal client sizes and every sample used.

    A `K x C` matrix with rows `P_k ~ Dir_C(alpha)`, floored at 1e-6, is scaled by Sinkhorn-Knopp to rows `n / K` and
    columns `n_c`, in *counts* (in proportions per class, rows `C / K` would give unequal sizes where classes are
    unequal; the paper's `K / L` is only right for `K = L`), then rounded with exact column sums and row sums of `n / K`
    up to one. The result is `a_k P_kc b_c`, the KL projection of `P`: equal sizes limit how skewed a very small `alpha`
    can get.

    Args:
        num_clients: K, the number of clients.
        alpha: Concentration of the rows (FLIU: 1).
        max_iterations: Iterations of Sinkhorn-Knopp; no convergence is an error.

    Raises:
        ValueError: If a value is out of its range; from `plan`, if Sinkhorn-Knopp does not converge.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import LabelSkewPartitioner
        >>> labels = torch.arange(10).repeat(100)
        >>> plan = LabelSkewPartitioner(num_clients=5).plan(labels, torch.Generator().manual_seed(0))
        >>> [len(part) for part in plan.split(labels)]
        [200, 200, 200, 200, 200]
    """

    def __init__(self, num_clients: PositiveInt, alpha: Concentration = 1.0, max_iterations: int = 10_000) -> None:
        self.num_clients, self.max_iterations = int(num_clients), int(max_iterations)
        self.alpha = float(alpha)

    def plan(self, labels: Any, generator: torch.Generator) -> SharePlan:
        classes, counts = self._tally(labels, self.num_clients)
        rows = np.full(self.num_clients, counts.sum() / self.num_clients)
        return self._scaled(classes, counts, rows, self.alpha, numpy_generator(generator))

    def _scaled(
        self, classes: np.ndarray | None, counts: np.ndarray, rows: np.ndarray, alpha: float, rng: np.random.Generator
    ) -> SharePlan:
        start = rng.dirichlet(np.full(len(counts), alpha), size=self.num_clients)
        real = sinkhorn(start, rows, counts.astype(np.float64), max_iterations=self.max_iterations)
        return SharePlan.of_counts(round_table(real * (counts / real.sum(axis=0))), classes)


class QuantitySkewPartitioner(Partitioner):
    """QS (FLIU): client sizes `s ~ Dir_K(alpha)`, every client with the class mix of the whole data.

    Args:
        num_clients: K, the number of clients.
        alpha: Concentration of the sizes (FLIU: 1).
        min_samples: Samples of the smallest client; the others share the rest in proportion. Two batches and one sample
            of every class make sense. `None` is the larger of 10 and the number of classes, or half of the mean size if
            that is less.
        stratified: `False` fills the sizes at random; labels are neither needed nor used. Data modules do the same,
            with a warning, where samples have no class labels.

    Raises:
        ValueError: If a value is out of its range.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import QuantitySkewPartitioner, describe
        >>> labels = torch.arange(2).repeat(500)
        >>> plan = QuantitySkewPartitioner(num_clients=5).plan(labels, torch.Generator().manual_seed(0))
        >>> report = describe(plan.split(labels), labels)
        >>> bool(report.sizes.max() > 2 * report.sizes.min()), bool(report.mean_total_variation < 0.02)
        (True, True)
    """

    def __init__(
        self,
        num_clients: PositiveInt,
        alpha: Concentration = 1.0,
        min_samples: NonNegativeInt | None = None,
        stratified: bool = True,
    ) -> None:
        self.num_clients = int(num_clients)
        self.alpha, self.stratified = float(alpha), stratified
        self.min_samples = min_samples
        self.needs = "labels" if stratified else "nothing"

    def without_labels(self) -> QuantitySkewPartitioner:
        return QuantitySkewPartitioner(self.num_clients, self.alpha, self.min_samples, stratified=False)

    def plan(self, labels: Any, generator: torch.Generator) -> SharePlan:
        classes, counts = self._tally(labels, self.num_clients)
        sizes = draw_sizes(self, self.num_clients, self.alpha, self.min_samples, counts, numpy_generator(generator))
        return SharePlan.of_counts(round_table(np.outer(sizes, counts / counts.sum())), classes)


class LabelQuantitySkewPartitioner(LabelSkewPartitioner):
    """LSQS (FLIU): sizes as in QS, labels as in LS.

    The paper prints no formula; ours is LS with the row margins `n_k` of QS.

    Args:
        num_clients: K, the number of clients.
        alpha: Concentration of the label rows (FLIU: 1).
        alpha_size: Concentration of the sizes. `None` is `alpha`.
        min_samples: Samples of the smallest client, as in `QuantitySkewPartitioner`.
        max_iterations: Iterations of Sinkhorn-Knopp; no convergence is an error.

    Raises:
        ValueError: If a value is out of its range; from `plan`, if Sinkhorn-Knopp does not converge.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import LabelQuantitySkewPartitioner, describe
        >>> labels = torch.arange(2).repeat(500)
        >>> plan = LabelQuantitySkewPartitioner(num_clients=5).plan(labels, torch.Generator().manual_seed(0))
        >>> report = describe(plan.split(labels), labels)
        >>> bool(report.sizes.max() > 2 * report.sizes.min()), bool(report.mean_total_variation > 0.02)
        (True, True)
    """

    def __init__(
        self,
        num_clients: int,
        alpha: float = 1.0,
        alpha_size: Concentration | None = None,
        min_samples: NonNegativeInt | None = None,
        max_iterations: int = 10_000,
    ) -> None:
        super().__init__(num_clients, alpha, max_iterations)
        self.alpha_size = self.alpha if alpha_size is None else float(alpha_size)
        self.min_samples = min_samples

    def plan(self, labels: Any, generator: torch.Generator) -> SharePlan:
        classes, counts = self._tally(labels, self.num_clients)
        rng = numpy_generator(generator)
        minimum = 1 if self.min_samples is None else max(1, self.min_samples)  # a row margin of 0 cannot be scaled to
        least = self.min_samples if self.min_samples is None else minimum
        sizes = draw_sizes(self, self.num_clients, self.alpha_size, least, counts, rng)
        return self._scaled(classes, counts, sizes.astype(np.float64), self.alpha, rng)


def raise_to_minimum(counts: np.ndarray, minimum: int) -> np.ndarray:
    """Move single samples from the largest client (of its most frequent class) until every client has `minimum`.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.skew import raise_to_minimum
        >>> raise_to_minimum(np.array([[9, 1], [0, 0]]), minimum=2)
        array([[7, 1],
               [2, 0]])
    """
    counts = counts.copy()
    sizes = counts.sum(axis=1)
    while (poor := int(sizes.argmin())) != (rich := int(sizes.argmax())) and sizes[poor] < minimum:
        column = int(counts[rich].argmax())
        counts[rich, column] -= 1
        counts[poor, column] += 1
        sizes[rich] -= 1
        sizes[poor] += 1
    return counts


def draw_sizes(
    owner: object, num_clients: int, alpha: float, min_samples: int | None, counts: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return client sizes `Dir_K(alpha) * n` in whole samples, none below the minimum.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.skew import draw_sizes
        >>> sizes = draw_sizes("mine", 5, 1.0, min_samples=20, counts=np.array([1000]), rng=np.random.default_rng(0))
        >>> int(sizes.sum()), bool(sizes.min() >= 20)
        (1000, True)
    """
    total = int(counts.sum())
    minimum = _minimum(owner, min_samples, max(10, len(counts)), num_clients, total)
    return apportion(rng.dirichlet(np.full(num_clients, alpha)), total, minimum)


def _minimum(owner: object, min_samples: int | None, default: int, num_clients: int, total: int) -> int:
    """Return the smallest client allowed; by default `default`, or half of the mean size if that is less."""
    if min_samples is None:
        return min(default, max(1, total // (2 * num_clients)))
    if min_samples * num_clients > total:
        raise ValueError(
            f"{type(owner).__name__} got min_samples={min_samples} for {num_clients} clients out of {total} "
            f"samples; use min_samples <= {total // num_clients} or fewer clients."
        )
    return min_samples


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
            np.where(holds_class, self.least, 0) + apportion(draw, int(size) - self.least * int(holds_class.sum()))
            for holds_class, draw, size in zip(holders.T, draws.T, counts, strict=True)
        ]
        return SharePlan.of_counts(np.stack(columns, axis=1), classes)

    def _holders(self, counts: np.ndarray) -> np.ndarray:
        """Return who holds which class, bool `(clients, classes)`."""
        clients, each, total = self.num_clients, self.classes_per_client, len(counts)
        if each > total or each + clients - 1 < total:
            rule = f"at most {total}" if each > total else f"at least {total - clients + 1}, so that no class is lost"
            raise ValueError(
                f"PowerLawPartitioner got classes_per_client={each} for {clients} clients and {total} classes; use "
                f"{rule}."
            )
        if self.scheme == "pfedme" and clients % total:
            raise ValueError(
                f"PowerLawPartitioner(scheme='pfedme') got num_clients={clients} for {total} classes; use a multiple of "
                f"{total}, or scheme='fedprox'."
            )
        holders = np.zeros((clients, total), dtype=bool)
        for place in range(each):
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
        >>> from fedlightning.datamodules.skew import PartialPlan
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
