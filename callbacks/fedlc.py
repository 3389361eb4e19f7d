"""FedLC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from fedlightning.algorithm import Change, Client, Facts, FederatedCallback, Setup, WeightingName
from fedlightning.callbacks.shared.logit_calibration import (
    IGNORED,
    check_cross_entropy,
    known_labels,
    samples_by_class,
    with_other_cross_entropy,
)
from fedlightning.callbacks.shared.representations import head_path, labels_of, rows
from fedlightning.ranges import Range, make_init
from fedlightning.wrappers import FeatureTap


@make_init
class FedLC(FederatedCallback):
    """Logits are calibrated by a client's own classes: rare ones must win by more, absent ones are left alone.

    Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated learning with label distribution skew via logits calibration", ICML 2022.

    * Client i, with ``n_ic`` training samples of class c and logits ``f``: ``f'_c = f_c - tau n_ic^(-1/4)``, and the loss
      is the cross entropy of ``f'``. A class without samples has ``f'_c = -inf``: no gradient reaches its logit.
      A client with a single class learns nothing.
    * Server: as in FedAvg. Down: ``w``. Up: ``w_i``; counts stay with the client. State: none.
    * Deployed: the global model ``w``, with its logits as they are.

    It is for classes that are rare, not absent: what a client's model says of a class that it lacks is bound by nothing, at
    any `tau`. With two of ten digits a client (10 clients, a small network) it had an accuracy of 0.61, where FedAvg had
    0.86, FedNTD 0.69 and FedDyn 0.92; with Dirichlet(0.5) and (0.1) it was as good as FedAvg (0.94, 0.87).

    The term is a difference, ``loss + CE(f') - CE(f)``, so what else is in the module's loss stays. The loss must be a
    mean cross entropy over single class labels: others are refused. The logged loss stays the task's.

    Args:
        tau: Strength of the calibration. Default 1 (PFLlib and FL-bench; 0.1 in FedDecorr's code). 0 is FedAvg.
        exclude_true: Leave the sample's own class out of the denominator, as the paper prints the loss: it has no lower
            bound then, and training may diverge. Default: no, as in all public code.
        head: Path of the submodule that gives the logits (``"net.fc"``). ``None`` (default): the last layer.
        weighting: ``"samples"`` (default) or ``"uniform"``.

    Raises:
        ValueError: If ``tau`` is negative.

    Example:
        A class with one sample needs a logit larger by 0.68 than one with 100.

        >>> import torch
        >>> from fedlightning.callbacks import FedLC
        >>> FedLC().calibrated(torch.zeros(1, 3), torch.tensor([100, 1, 0])).tolist()[0][:2]
        [0.0, -0.683772...]
    """

    facts = Facts(changes={Change.CALIBRATES}, mixes_architectures=True)

    tau: Annotated[float, Range("[0, inf)", "0 is FedAvg.")] = 1.0
    exclude_true: bool = False
    head: str | list[str] | None = None
    weighting: WeightingName | None = None

    def claims(self, role: str) -> bool:
        """Decline the loss term where ``tau = 0``."""
        return super().claims(role) and not (role == "training_loss" and self.tau == 0.0)

    def check(self, setup: Setup) -> None:
        """Refuse other losses than the cross entropy, and heads that do not give its logits.

        Raises:
            ValueError: If logits or labels are not there, or the loss is another one.
        """
        if self.tau > 0.0:
            check_cross_entropy(setup, self.feature_taps, self.key)
            self._warn_absent_classes(setup)

    def _warn_absent_classes(self, setup: Setup) -> None:
        """Warn where many classes are absent: whatever the strength, nothing keeps the others' logits in their place."""
        class_counts = {
            client: setup.data.class_counts(client) for client in setup.run.clients if setup.data.num_samples[client]
        }
        counts = {client: count for client, count in class_counts.items() if count is not None}
        classes = max(map(len, counts.values()), default=0)
        classes_by_client = {client: sum(number > 0 for number in count) for client, count in counts.items()}
        lacking = [client for client, several in classes_by_client.items() if several < classes]
        if 2 * sum(classes_by_client.values()) < classes * len(classes_by_client):
            setup.warn(
                f"FedLC leaves alone the classes that a client does not have, and {len(lacking)} of {len(classes_by_client)} "
                f"clients lack some of {classes} (client '{lacking[0]}' has {classes_by_client[lacking[0]]}): each model may "
                "give them any logit, and the mean may be far worse than that of FedAvg. FedLC is meant for classes that are "
                "rare; here take FedDyn, or compare with FedAvg."
            )

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the logits: the output of the head."""
        return {"logits": FeatureTap(module, head_path(module, self.head), at="output")}

    def calibrated(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return ``f'``, shifted so that the largest class keeps its logit: a shift of all changes no loss.

        Args:
            logits: ``(batch, classes)``.
            counts: Training samples of each class, ``(classes,)``.
        """
        margin = self.tau * counts.clamp_min(1).to(logits).pow(-0.25)
        lowest = torch.finfo(logits.dtype).min  # -inf would make NaN of a difference
        return (logits - (margin - margin.min())).masked_fill(counts == 0, lowest)

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return ``loss + CE(f') - CE(f)``."""
        if not client.phase.is_task:  # counts are of the training data
            return loss
        logits = rows(features["logits"])
        labels = known_labels(labels_of(batch, self.key), logits.shape[1])
        counts = client.scratch.get(self.key)
        if counts is None:
            counts = samples_by_class(client, logits.shape[1], self.key).to(logits.device)
            client.scratch[self.key] = counts
        several = int((counts > 0).sum()) > 1  # else nothing is left of the denominator
        other = calibrated_loss(self.calibrated(logits, counts), labels, self.exclude_true and several)
        return with_other_cross_entropy(loss, logits, labels, other)


def calibrated_loss(logits: Tensor, labels: Tensor, exclude_true: bool = False) -> Tensor:
    """Return the mean cross entropy, or the paper's form of it, whose denominator is without the sample's own class.

    Example:
        >>> logits, labels = torch.tensor([[-0.3162, -1.0]]), torch.tensor([1])
        >>> round(float(calibrated_loss(logits, labels)), 4), round(float(calibrated_loss(logits, labels, True)), 4)
        (1.0924, 0.6838)
    """
    if not exclude_true:
        return F.cross_entropy(logits, labels)
    logits, labels = logits[labels != IGNORED], labels[labels != IGNORED]
    is_own_class = F.one_hot(labels, logits.shape[1]).bool()
    return (logits.masked_fill(is_own_class, -torch.inf).logsumexp(1) - logits[is_own_class]).mean()
