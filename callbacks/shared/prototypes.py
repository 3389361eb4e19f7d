"""Class prototypes: mean representations, how they travel, and the linear head that predicts the nearest one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedlightning.algorithm import Setup

NEVER = -1e6
"""Score of a class that has no prototype."""


class ClassMeans:
    """Running sums of representations per class, in float64.

    Example:
        >>> means = ClassMeans()
        >>> means.add(torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]]), torch.tensor([7, 7, 2]))
        >>> {label: mean.tolist() for label, mean in means.result().items()}
        {2: [0.0, 5.0], 7: [2.0, 0.0]}
    """

    def __init__(self) -> None:
        self.sums: dict[int, tuple[Tensor, int]] = {}

    def add(self, z: Tensor, labels: Tensor) -> None:
        """Add a batch of representations ``(batch, width)`` with its labels ``(batch,)``.

        Samples with a negative label (torch's `ignore_index` is -100) are of no class.
        """
        for label in labels[labels >= 0].unique().tolist():
            chosen = z[labels == label].double()
            total, count = self.sums.get(label, (torch.zeros_like(chosen[0]), 0))
            self.sums[label] = (total + chosen.sum(0), count + len(chosen))

    def result(self) -> dict[int, Tensor]:
        """Return the mean of each class, ``(width,)``."""
        return {label: total / count for label, (total, count) in self.sums.items()}


def refuse_unprotected(setup: Setup, owner: str, during: str, classes: int) -> None:
    """Refuse means that a callback which protects the clients' samples does not make.

    Args:
        setup: The federation.
        owner: Key of the method.
        during: The option by which means are taken during training; empty: they are not.
        classes: Number of classes; -1: the head does not tell.

    Raises:
        ValueError: If a callback makes them, and cannot.
    """
    protecting = next((callback for callback in setup.callbacks if callback.claims("class_means")), None)
    if protecting is not None and during:
        raise ValueError(
            f"{protecting.key} covers means by class that are taken after training, and {owner} has {during}. Use 'after'."
        )
    if protecting is not None and classes < 1:
        raise ValueError(
            f"{protecting.key} covers means of all classes, whoever has them, and nobody knows how many there are: the head "
            f"of {owner} does not tell. Name the last linear layer as head."
        )


def pack(prototypes: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Return prototypes as they travel: fp32 rows ``(num_prototypes, width)`` and their classes ``(num_prototypes,)``.

    Rows are ordered by class.
    """
    labels = sorted(prototypes)
    vectors = [prototypes[label].float().cpu() for label in labels]
    return {
        "prototypes": torch.stack(vectors) if vectors else torch.zeros(0, 0),
        "classes": torch.tensor(labels, dtype=torch.int32),
    }


def unpack(message: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return the prototypes of a message, by class: the inverse of :func:`pack`. An empty message has none."""
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
