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
    different = len(torch.unique(rows, dim=0))
    labels = KMeans(min(count, different), n_init=10, random_state=seed % 2**32).fit_predict(rows.numpy())
    order = list(dict.fromkeys(labels.tolist()))
    groups = [[place for place, label in enumerate(labels) if label == first] for first in order]
    return [groups[k % len(groups)] for k in range(count)]
