"""Partitions by what samples look like: clusters of features, and cuts along their first principal component."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.indexed import IndexedFederatedDataModule
from fedlightning.datamodules.plans import Partitioner, Plan, numpy_generator
from fedlightning.datamodules.views import ArrayDataset, Indices
from fedlightning.ranges import PositiveInt

Features = Callable[[Tensor], Tensor]
_CHUNK = 512
LARGEST = 20_000_000
"""Numbers that are compared at once: 160 MB."""


class EmbeddingPartitioner(Partitioner):
    """A partition by inputs: samples that look alike are at one client.

    * `method="kmeans"`: N clusters by k-means of the features (scikit-learn). Sizes are those of the clusters.
    * `method="pca"`: samples in the order of their first principal component, cut into N equal parts. This is the most
      heterogeneous split of equal sizes along one direction, as FENDA-FL's authors use it for extreme heterogeneity.

    Features are the inputs, flattened, or what a frozen network makes of them. Both are fitted on the training data
    alone; test samples go to the nearest centre or to the part between the same cuts. No labels are used. Works where
    the data module hands a whole dataset to its partitioner (`ArrayFederatedDataModule`, `Partitioned`), of samples
    `(x, ...)`.

    Args:
        num_clients: N, the number of clients.
        method: `"kmeans"` or `"pca"`.
        features: Maps a batch of inputs to features `(batch, ...)`, such as a network without its head. It is set to
            eval mode.

    Attributes:
        num_clients: N.

    Raises:
        ValueError: If a value is out of its range; from `plan`, if there are fewer samples than clients, or no inputs.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import ArrayDataset, EmbeddingPartitioner
        >>> data = ArrayDataset(torch.tensor([[0.0], [9.0], [0.1], [9.1]]), torch.zeros(4))
        >>> plan = EmbeddingPartitioner(2, "pca").plan(data, torch.Generator())
        >>> sorted(part.tolist() for part in plan.split(data)), round(plan.separation, 3)
        ([[0, 2], [1, 3]], 1.0)
    """

    needs = "samples"

    def __init__(
        self,
        num_clients: PositiveInt,
        method: Literal["kmeans", "pca"] = "kmeans",
        features: nn.Module | Features | None = None,
    ) -> None:
        self.num_clients, self.method, self.features = int(num_clients), method, features

    def plan(self, labels: Any, generator: torch.Generator) -> InputPlan:
        """Fit the clusters or cuts on the training data.

        Args:
            labels: The training dataset.
            generator: Draws the seed of k-means.

        Raises:
            ValueError: If there are fewer samples than clients, or all samples are alike.
        """
        features = features_of(labels, self.features)
        if len(features) < self.num_clients:
            raise ValueError(
                f"EmbeddingPartitioner cannot give {self.num_clients} clients a sample each out of {len(features)}; use "
                f"num_clients <= {len(features)}."
            )
        ids = [str(client) for client in range(self.num_clients)]
        if self.method == "kmeans":
            from sklearn.cluster import KMeans

            seed = int(numpy_generator(generator).integers(2**31))
            centres = KMeans(self.num_clients, random_state=seed, n_init=4).fit(features).cluster_centers_
            plan = InputPlan(ids, self.features, centres=np.asarray(centres, dtype=np.float64))
        else:
            mean = features.mean(axis=0)
            direction = np.linalg.svd(features - mean, full_matrices=False)[2][0]
            direction *= np.sign(direction[np.abs(direction).argmax()])  # the sign of a component means nothing
            scores = np.sort((features - mean) @ direction)
            cuts = scores[np.arange(1, self.num_clients) * len(scores) // self.num_clients]
            if len(np.unique(cuts)) < len(cuts):
                raise ValueError(
                    f"EmbeddingPartitioner(method='pca') cannot cut {len(features)} samples into {self.num_clients} "
                    "parts: too many have the same score. Use fewer clients."
                )
            plan = InputPlan(ids, self.features, mean=mean, direction=direction, cuts=cuts)
        plan.separation = separation(features, plan.holders(features))
        return plan


@dataclass
class InputPlan(Plan):
    """A plan by inputs: the nearest of some centres, or the place between cuts along a direction.

    Attributes:
        client_ids: Names of the clients.
        features: Maps a batch of inputs to features; `None` flattens them.
        centres: Centre of each client, `(clients, features)`, or `None`.
        mean: Mean of the training features, `(features,)`, for cuts.
        direction: First principal component, `(features,)`, for cuts.
        cuts: Scores between two clients, ascending, `(clients - 1,)`.
        separation: Share of the variance of the training features that is between clients, in [0, 1].

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from fedlightning.datamodules import ArrayDataset
        >>> from fedlightning.datamodules.by_inputs import InputPlan
        >>> plan = InputPlan(["a", "b"], None, centres=np.array([[0.0], [1.0]]))
        >>> plan.split(ArrayDataset(torch.tensor([[0.9], [0.2]]), torch.zeros(2)))
        [array([1]), array([0])]
    """

    client_ids: list[str]
    features: nn.Module | Features | None
    centres: np.ndarray | None = None
    mean: np.ndarray | None = None
    direction: np.ndarray | None = None
    cuts: np.ndarray | None = None
    separation: float = float("nan")

    def holders(self, features: np.ndarray) -> np.ndarray:
        """Return the client of each row of features, int64 `(samples,)`.

        Args:
            features: Float64 `(samples, features)`.
        """
        if self.centres is not None:
            squares = (self.centres**2).sum(axis=1)
            return np.asarray((squares - 2 * features @ self.centres.T).argmin(axis=1))
        assert self.mean is not None and self.direction is not None and self.cuts is not None
        return np.searchsorted(self.cuts, (features - self.mean) @ self.direction, side="right")

    def split(self, labels: Any, generator: torch.Generator | None = None) -> list[Indices]:
        """Divide the samples of a dataset; see `Plan.split`.

        Args:
            labels: The dataset.
            generator: Not used: the plan is not random.
        """
        holders = self.holders(features_of(labels, self.features))
        return [np.flatnonzero(holders == client).astype(np.int64) for client in range(len(self.client_ids))]


def features_of(dataset: Any, features: nn.Module | Features | None = None) -> np.ndarray:
    """Return the features of all samples of a dataset, float64 `(samples, features)`.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import ArrayDataset
        >>> from fedlightning.datamodules.by_inputs import features_of
        >>> features_of(ArrayDataset(torch.ones(5, 2, 3), torch.zeros(5))).shape
        (5, 6)
    """
    if isinstance(dataset, int | np.integer | np.ndarray | list):
        raise ValueError(
            "EmbeddingPartitioner divides by inputs and got only labels or a number; this data module hands its "
            "partitioner no samples. Use ArrayFederatedDataModule or Partitioned."
        )
    if isinstance(features, nn.Module):
        features.eval()
    chunks = []
    with torch.no_grad():
        for start in range(0, len(dataset), _CHUNK):
            rows = range(start, min(start + _CHUNK, len(dataset)))
            x = dataset.rows(torch.tensor(rows))[0] if isinstance(dataset, ArrayDataset) else _stacked(dataset, rows)
            chunks.append((x if features is None else features(x)).flatten(1).double().cpu().numpy())
    return np.concatenate(chunks) if chunks else np.zeros((0, 1))


def _stacked(dataset: Any, rows: range) -> Tensor:
    samples = [dataset[row] for row in rows]
    inputs = [sample[0] if isinstance(sample, tuple | list) else sample for sample in samples]
    if not all(isinstance(sample_input, Tensor) and sample_input.shape == inputs[0].shape for sample_input in inputs):
        raise ValueError("EmbeddingPartitioner needs samples (x, ...) whose inputs are tensors of one shape.")
    return torch.stack(inputs)


def separation(features: np.ndarray, holders: np.ndarray) -> float:
    r"""Return the share of the features' variance that is between clients.

    .. math:: \eta^2 = \sum_k n_k \|\bar z_k - \bar z\|^2 / \sum_i \|z_i - \bar z\|^2

    0: all clients have the same mean; 1: all samples of a client are equal. A random partition has about
    `(clients - 1) / (samples - 1)`.

    Args:
        features: Float64 `(samples, features)`.
        holders: The client of each sample, int64 `(samples,)`.

    Example:
        >>> import numpy as np
        >>> from fedlightning.datamodules.by_inputs import separation
        >>> separation(np.array([[0.0], [0.0], [4.0], [4.0]]), np.array([0, 0, 1, 1]))
        1.0
    """
    mean = features.mean(axis=0)
    total = ((features - mean) ** 2).sum()
    clients = np.unique(holders)
    between = sum(((holders == k).sum() * ((features[holders == k].mean(axis=0) - mean) ** 2).sum()) for k in clients)
    return float(between / total) if total > 0 else 0.0


def input_separation(data: FederatedDataModule, split: str = "train", most: int = 5000) -> tuple[float, float] | None:
    """Return the share of the inputs' variance that is between clients (`separation`), and what a random split would have.

    Read from the first samples of each client, as many for each and `most` in all, or fewer of large ones.

    Args:
        data: The data module, after `setup`.
        split: The split.
        most: Samples that are read.

    Returns:
        Both shares, or `None` where inputs are not tensors of floats of one shape or too large to compare, or where
        clients are made when they are asked for.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule, EmbeddingPartitioner
        >>> from fedlightning.datamodules.by_inputs import input_separation
        >>> data = DigitsDataModule(EmbeddingPartitioner(5))
        >>> data.setup()
        >>> share, by_chance = input_separation(data)
        >>> share > 20 * by_chance
        True
    """
    if not isinstance(data, IndexedFederatedDataModule):
        return None
    views: list[Any] = [getattr(data.client_dataloader(client, split), "dataset", ()) for client in data.client_ids]
    first = next((_input(view[0]) for view in views if len(view)), None)
    if first is None:
        return None
    each = max(2, min(most, LARGEST // first.numel()) // len(views))
    if each * len(views) * first.numel() > LARGEST:
        return None
    flat_inputs, holders = [], []
    for place, view in enumerate(views):
        for row in range(min(each, len(view))):
            x = _input(view[row])
            if x is None or x.shape != first.shape:
                return None
            flat_inputs.append(x.flatten().double().cpu().numpy())
            holders.append(place)
    if len(flat_inputs) < 3:
        return None
    return separation(np.stack(flat_inputs), np.array(holders)), (len(set(holders)) - 1) / (len(flat_inputs) - 1)


def _input(sample: Any) -> Tensor | None:
    """Return the input of a sample, or `None` if it is not a tensor of floats."""
    x = sample[0] if isinstance(sample, tuple | list) and sample else sample
    return x if isinstance(x, Tensor) and x.is_floating_point() else None
