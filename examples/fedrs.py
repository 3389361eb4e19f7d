"""The exercise of `docs/how-to/write_an_algorithm.md`, solved: FedRS, a term over logits, in a file of one's own.

python examples/fedrs.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from fedlightning.algorithm import Change, Client, Facts, FederatedCallback, Setup
from fedlightning.callbacks.shared import (
    check_cross_entropy,
    head_path,
    known_labels,
    labels_of,
    rows,
    samples_by_class,
    with_other_cross_entropy,
)
from fedlightning.ranges import Range
from fedlightning.testing import check_algorithm
from fedlightning.wrappers import FeatureTap


class FedRS(FederatedCallback):
    """Logits of classes that a client lacks are scaled down in its loss, so that it hardly pushes them away.

    Li, Zhan, "FedRS: federated learning with restricted softmax for label distribution non-IID data", KDD 2021.

    Args:
        alpha: Scale of the logits of absent classes. Default 0.5, as in the paper; 1 is FedAvg.
        head: Path of the submodule that gives the logits. Default: the last layer.
    """

    facts = Facts(changes={Change.CALIBRATES})

    def __init__(self, alpha: Annotated[float, Range("[0, 1]", "1 is FedAvg.")] = 0.5, head: str | None = None) -> None:
        self.alpha = alpha
        self.head = head

    def check(self, setup: Setup) -> None:
        """Refuse other losses than the cross entropy."""
        check_cross_entropy(setup, self.feature_taps, self.key)

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the logits: the output of the head."""
        return {"logits": FeatureTap(module, head_path(module, self.head), at="output")}

    def restricted(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the logits, `(batch, classes)`, scaled where a class has no training sample, `(classes,)`."""
        return logits * torch.where(counts > 0, 1.0, self.alpha).to(logits)

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss with the restricted cross entropy in place of its own."""
        logits = rows(features["logits"])
        labels = known_labels(labels_of(batch, self.key), logits.shape[1])
        if self.key not in client.scratch:  # once a visit
            client.scratch[self.key] = samples_by_class(client, logits.shape[1], self.key).to(logits.device)
        other = F.cross_entropy(self.restricted(logits, client.scratch[self.key]), labels)
        return with_other_cross_entropy(loss, logits, labels, other)


if __name__ == "__main__":
    print(check_algorithm(FedRS(), only=["arguments", "copies", "identical_clients", "resume"]))
