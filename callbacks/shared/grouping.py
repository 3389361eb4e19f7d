"""Groups of clients, found by k-means on a row of numbers for each."""

from __future__ import annotations

import torch
from sklearn.cluster import KMeans
from torch import Tensor


def first_groups(rows: Tensor, count: int, seed: int) -> list[list[int]]:
    """Return the rows of each group that k-means finds; where there are fewer different rows than groups, some repeat.

    Args:
        rows: Models, `(clients, parameters)`.
        count: Number of groups.
        seed: Seed of the starts.

    Example:
        >>> first_groups(torch.tensor([[0.0], [5.0], [0.2]]), 2, seed=0)
        [[0, 2], [1]]
    """
    labels = labels_of_rows(rows, count, seed)
    groups = [[place for place, label in enumerate(labels) if label == k] for k in range(max(labels) + 1)]
    return [groups[k % len(groups)] for k in range(count)]


def clusters_of(biases: Tensor, count: int, seed: int) -> list[int]:
    """Return the cluster of each row by k-means, on columns divided by their maximum; numbered as they first occur.

    Args:
        biases: `(clients, modalities)`.
        count: Clusters; fewer where there are fewer different rows.
        seed: Seed of the starts.
    """
    top = biases.max(0).values
    return labels_of_rows(biases / torch.where(top > 0, top, torch.ones_like(top)), count, seed)


def labels_of_rows(rows: Tensor, count: int, seed: int) -> list[int]:
    """Return the group of each row by k-means, numbered as they first occur.

    Args:
        rows: `(clients, numbers)`.
        count: Number of groups; fewer where there are fewer different rows.
        seed: Seed of the starts.
    """
    different = len(torch.unique(rows, dim=0))
    labels = KMeans(min(count, different), n_init=10, random_state=seed % 2**32).fit_predict(rows.numpy()).tolist()
    order = list(dict.fromkeys(labels))
    return [order.index(label) for label in labels]
