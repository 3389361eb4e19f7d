"""Groups of clients, found by k-means on a row of numbers for each."""

from __future__ import annotations

import torch
from sklearn.cluster import KMeans
from torch import Tensor

from fedlightning.tensors import ties


def first_groups(rows: Tensor, count: int, seed: int) -> list[list[int]]:
    """Return the rows of each group that k-means finds; where there are fewer different rows than groups, some repeat.

    Rows that differ by rounding are equal: clients with the same data, trained one by one or stacked, are not taken apart.

    Example:
        >>> first_groups(torch.tensor([[0.0], [5.0], [0.2]]), 2, seed=0)
        [[0, 2], [1]]
    """
    labels = _by_k_means(rows, different(rows, count), seed)
    groups = [[place for place, label in enumerate(labels) if label == first] for first in dict.fromkeys(labels)]
    return [groups[k % len(groups)] for k in range(count)]


def clusters_of(biases: Tensor, count: int, seed: int) -> list[int]:
    """Return the cluster of each row by k-means, on columns divided by their maximum; numbered as they first occur."""
    top = biases.max(0).values
    rows = biases / torch.where(top > 0, top, torch.ones_like(top))
    labels = _by_k_means(rows, different(rows, count), seed)
    order = list(dict.fromkeys(labels))
    return [order.index(label) for label in labels]


def _by_k_means(rows: Tensor, count: int, seed: int) -> list[int]:
    found: list[int] = KMeans(count, n_init=10, random_state=seed % 2**32).fit_predict(rows.numpy()).tolist()
    return found


def different(rows: Tensor, most: int) -> int:
    """Return how many rows differ by more than rounding, and `most` if there are more.

    Example:
        >>> different(torch.tensor([[1.0], [1.0 + 1e-7], [2.0]]), most=5)
        2
    """
    return min(len(set(ties.representatives(rows))), most)
