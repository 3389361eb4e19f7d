"""MOON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import Client, Facts, FederatedCallback, Setup, Update, WeightingName
from fedlightning.callbacks.shared.representations import (
    comes_by,
    contrastive_loss,
    freeze_teachers,
    head_path,
    teacher_features,
)
from fedlightning.ranges import PositiveFloat, Range, make_init
from fedlightning.wrappers import FeatureTap


@make_init
class MOON(FederatedCallback):
    """Model-contrastive learning: representations are drawn to the global model's, away from the client's last ones.

    Li, He, Song, "Model-contrastive federated learning", CVPR 2021.

    On every batch, with the representations ``z`` of the model in training, ``z_g`` of the received ``w^t`` and ``z_p``
    of the last local model (both frozen, in eval mode):

    * ``con = -log( exp(cos(z, z_g)/T) / (exp(cos(z, z_g)/T) + exp(cos(z, z_p)/T)) )``
    * ``loss = task + mu mean(con)``

    What travels and what is kept:

    * Down: ``w^t``. Up: ``w_i``.
    * State: the model that the client sent last.
    * Deployed: the global model ``w``.

    A client's first visit has no last model and no term, as in the authors' code. The representation is the input of
    the head; the paper puts a projection of two layers and 256 outputs before it, which here belongs to the module. A
    step costs three forward passes. The logged loss stays the task's.

    Args:
        mu: Weight of the contrastive loss. Default 1 (the authors' code); the paper tunes it in {0.1, 1, 5, 10}.
        temperature: ``T``. Default 0.5 (paper).
        head: Path of the submodule that turns representations into predictions (``"net.fc"``). ``None`` (default): the
            last layer.
        weighting: ``"samples"`` (paper, default) or ``"uniform"``.

    Raises:
        ValueError: If ``mu`` is negative or ``temperature`` is not positive.

    Example:
        The loss is small where ``z`` points where the global model's representation does.

        >>> import torch
        >>> from fedlightning.callbacks.shared.representations import contrastive_loss
        >>> z, z_g, z_p = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> contrastive_loss(z, z_g, z_p, temperature=0.5), contrastive_loss(z, z_p, z_g, temperature=0.5)
        (tensor(0.1269), tensor(2.1269))
    """

    facts = Facts(keeps=True)

    mu: Annotated[float, Range("[0, inf)", "0 is FedAvg.")] = 1.0
    temperature: PositiveFloat = 0.5
    head: str | list[str] | None = None
    weighting: WeightingName | None = None

    def claims(self, role: str) -> bool:
        """Decline the loss term where ``mu = 0``."""
        return super().claims(role) and not (role == "training_loss" and self.mu == 0.0)

    def check(self, setup: Setup) -> None:
        """Refuse a head that is not there or that a step does not call exactly once, and one that nothing shared feeds.

        Raises:
            ValueError: If the representation cannot be tapped, or is the client's own whatever it receives.
        """
        if self.mu > 0 and not comes_by(setup, self.feature_taps, self.key):
            raise ValueError(
                f"MOON compares what the received model and the client's last one make of a sample before "
                f"'{head_path(setup.module, self.head)}', but nothing that travels comes before it: both are the same, and "
                "the loss would have no gradient. Set head=... to a later submodule, or remove MOON or what keeps the layers "
                "before it with the clients."
            )

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the representation: the input of the head."""
        return {"z": FeatureTap(module, head_path(module, self.head))}

    def on_visit_start(self, client: Client) -> None:
        """Freeze the two teachers: the received model and the last local one."""
        if self.mu > 0:
            freeze_teachers(client, self.key)

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return ``task + mu mean(con)``."""
        if self.key not in client.scratch:
            return loss
        received, last = teacher_features(client, self.key, module, batch, self.feature_taps)
        return loss + self.mu * contrastive_loss(features["z"], received["z"], last["z"], self.temperature)

    def on_send(self, client: Client, update: Update) -> None:
        """Keep the local model for the next visit."""
        if client.contributed and self.mu > 0:
            client.state[self.key] = {"previous": client.model_state()}
