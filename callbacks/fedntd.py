"""FedNTD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from fedlightning.algorithm import Client, Facts, FederatedCallback, Setup, WeightingName
from fedlightning.callbacks.shared.logit_calibration import check_head
from fedlightning.callbacks.shared.representations import head_path, labels_of, rows
from fedlightning.callbacks.shared.steps import SeveralSteps
from fedlightning.ranges import PositiveFloat, Range, make_init
from fedlightning.wrappers import FeatureTap


@make_init
class FedNTD(FederatedCallback):
    r"""Not-true distillation: a client keeps what the global model says of the classes that a sample does not belong to.

    Lee, Jeong, Shin, Bae, Yun, "Preservation of the global knowledge by not-true distillation in federated learning",
    NeurIPS 2022.

    On every batch, with the logits `z` of the model in training, `t` of the received model (frozen, in eval mode, on the
    same batch), and `z_{-y}` the logits without that of the label:

    .. math:: \text{loss} = \text{task} + \beta \, \tau^2 \,
        \text{KL}(\text{softmax}(t_{-y} / \tau) \,\|\, \text{softmax}(z_{-y} / \tau))

    as a mean over the batch. The term has no gradient by the label's own logit: what the client learns of its own classes
    is left to the task.

    * Down: `w`. Up: `w_i`. State: none.
    * Deployed: the global model `w`.

    A step costs one more forward pass. The logged loss stays the task's. A visit's first step is taken at the received
    model, where the term is 0 (but for dropout and batch statistics): with one local step it is FedAvg, and a warning says
    so. A label that the cross entropy ignores (-100) has no term.

    Args:
        beta: Weight of the term. Default 1 (the authors' code).
        tau: Temperature. Default 1 (the authors' configurations; 3 is the unused default of a class of theirs).
        head: Path of the submodule that gives the logits (`"net.fc"`). `None`: the last layer.
        weighting: `"samples"` (authors, default) or `"uniform"`.

    Raises:
        ValueError: If `beta` is negative or `tau` is not positive.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks.fedntd import not_true_divergence
        >>> z, t, y = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([0])
        >>> not_true_divergence(z, t, y, tau=1.0)
        tensor(0.0671)
    """

    facts = Facts(requires=[SeveralSteps(of="beta")])

    beta: Annotated[float, Range("[0, inf)", "0 is FedAvg.")] = 1.0
    tau: PositiveFloat = 1.0
    head: str | list[str] | None = None
    weighting: WeightingName | None = None

    def claims(self, role: str) -> bool:
        """Decline the loss term where `beta = 0`."""
        return super().claims(role) and not (role == "training_loss" and self.beta == 0.0)

    def check(self, setup: Setup) -> None:
        """Refuse other losses than the cross entropy, two classes, and a head that does not travel."""
        if self.beta == 0.0:
            return
        classes, _ = check_head(setup, self.head, self.key)
        if classes == 2:
            raise ValueError(
                f"FedNTD distils the classes that are not a sample's label, and {type(setup.template).__name__} has 2: of "
                "one class alone there is nothing to learn. Use FedProx or MOON, or remove FedNTD."
            )
        self._refuse_own_heads(setup)

    def _refuse_own_heads(self, setup: Setup) -> None:
        """Refuse a head that stays with the clients, in every round or in those that a callback chooses."""
        path = head_path(setup.module, self.head)
        parts = [name for name, kind in setup.kinds.items() if kind == "trainable" and name.startswith(f"{path}.")]
        kept = [name for name in parts if name not in setup.shared_names()]
        choosers = [other for other in setup.callbacks if other.claims("shared_names")]
        by_round = [other.key for other in choosers if other.wire(setup.module).entries == "all"]
        if kept or by_round:
            where = f"'{kept[0]}' of its head stays" if kept else f"{by_round[0]} lets layers stay"
            raise ValueError(
                f"FedNTD keeps what the global model says of all classes, but {where} with the clients. Remove FedNTD, or "
                "the callback that keeps it there."
            )

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the logits: the output of the head."""
        return {"logits": FeatureTap(module, head_path(module, self.head), at="output")}

    def on_visit_start(self, client: Client) -> None:
        """Freeze the received model."""
        if self.beta:
            client.scratch[self.key] = client.frozen_copy(client.received)

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return `task + beta tau^2 KL`."""
        teacher = client.scratch[self.key].to(module.device)
        seen = client.features(teacher, batch, self.feature_taps(teacher))
        labels = labels_of(batch, self.key)
        return loss + self.beta * not_true_divergence(features["logits"], seen["logits"], labels, self.tau)


def not_true_divergence(z: Tensor, t: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Return `tau^2 KL( softmax(t_{-y} / tau) || softmax(z_{-y} / tau) )`, mean over the samples with a label, in fp32."""
    is_labelled = labels >= 0
    student, teacher = (rows(_others(logits, labels.clamp_min(0))) / tau for logits in (z, t.detach()))
    divergences = F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True).sum(1)
    return tau**2 * (divergences * is_labelled).sum() / is_labelled.sum().clamp_min(1)


def _others(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logits of the classes that are not the label, `(batch, classes - 1)`."""
    place = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, place + (place >= labels[:, None]))
