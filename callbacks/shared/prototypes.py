"""Class prototypes: mean representations, how they travel, and the linear head that predicts the nearest one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

NEVER = -1e6
"""Score of a class that has no prototype."""


class ClassMeans:
    """Running sums of representations per class, in float64."""

    def __init__(self) -> None:
        self.sums: dict[int, tuple[Tensor, int]] = {}

    def add(self, z: Tensor, labels: Tensor) -> None:
        """Fold in a batch ``(B, d)`` with its labels ``(B,)``."""
        for label in labels.unique().tolist():
            chosen = z[labels == label].double()
            total, count = self.sums.get(label, (torch.zeros_like(chosen[0]), 0))
            self.sums[label] = (total + chosen.sum(0), count + len(chosen))

    def result(self) -> dict[int, Tensor]:
        """The mean of each class."""
        return {label: total / count for label, (total, count) in self.sums.items()}


def pack(prototypes: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Prototypes as they travel: fp32 rows ``(k, d)`` and their classes ``(k,)``, ordered by class."""
    labels = sorted(prototypes)
    vectors = [prototypes[label].float().cpu() for label in labels]
    return {
        "prototypes": torch.stack(vectors) if vectors else torch.zeros(0, 0),
        "classes": torch.tensor(labels, dtype=torch.int32),
    }


def unpack(message: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Inverse of :func:`pack`; of an empty message, nothing."""
    if "classes" not in message:
        return {}
    return dict(zip(message["classes"].tolist(), message["prototypes"], strict=True))


@torch.no_grad()
def fill_head(head: nn.Module, prototypes: Mapping[int, Tensor]) -> None:
    """Make a linear head score class ``j`` by ``2 C_j z - ||C_j||^2``; with one output, class 1 against class 0."""
    assert isinstance(head, nn.Linear) and head.bias is not None
    outputs = max(head.out_features, 2)
    weight = torch.zeros(outputs, head.in_features, dtype=torch.float64)
    bias = torch.full((outputs,), NEVER, dtype=torch.float64)
    for label, prototype in prototypes.items():
        c = prototype.double()
        weight[label], bias[label] = 2 * c, -c.square().sum()
    if head.out_features == 1:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    head.weight.copy_(weight)
    head.bias.copy_(bias)
