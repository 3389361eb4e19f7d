"""Groups of clients by the classes that their models do well on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor
from torchmetrics.functional.classification import multiclass_f1_score

from fedlightning.algorithm import Client, address
from fedlightning.callbacks.shared.representations import labels_of
from fedlightning.tensors import ties
from fedlightning.wrappers import FeatureTap


def class_scores(client: Client, head: str, owner: str, split: str = "val") -> Tensor:
    """Return the F1 score of the client's present model on each class, `(num_classes,)`; 0 for a class without samples."""
    logits, labels = [], []
    for batch, found in client.feature_pass(lambda module: {"logits": FeatureTap(module, head, at="output")}, split):
        logits.append(found["logits"].float().cpu())
        labels.append(labels_of(batch, owner).cpu())
    scores = torch.cat(logits)
    return multiclass_f1_score(scores, torch.cat(labels), num_classes=scores.shape[1], average="none")


def groups_by_class_scores(scores: Mapping[str, Tensor], num_groups: int, seed: int) -> dict[str, int]:
    """Group clients by k-means on the scores of the classes that differ most between clients.

    These are the classes whose variance over clients is at least the mean variance, and no fewer than the groups.

    Example:
        >>> low, high = torch.tensor([0.9, 0.1, 0.5]), torch.tensor([0.1, 0.9, 0.5])
        >>> groups = groups_by_class_scores({"a": low, "b": high, "c": low}, 2, seed=0)
        >>> groups["a"] == groups["c"] != groups["b"]
        True
    """
    if len(scores) <= num_groups:
        return {client: number for number, client in enumerate(scores)}
    table = torch.stack(list(scores.values())).double().numpy()
    variance = table.var(axis=0)
    many = int((variance >= variance.mean() * (1 - ties.CLOSE)).sum())  # all may be equal, but for rounding
    ranks = -ties.levelled(torch.from_numpy(variance)).numpy()
    varied = np.argsort(ranks, kind="stable")[: max(many, num_groups)]
    means = KMeans(num_groups, n_init=10, random_state=address(seed, "class scores") % 2**32).fit(
        table[:, np.sort(varied)]
    )
    return {client: int(group) for client, group in zip(scores, means.labels_, strict=True)}
