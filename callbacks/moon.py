"""MOON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import Client, FederatedCallback, Setup, Update, WeightingName
from fedlightning.callbacks.shared.representations import contrastive_loss, features_at_start, head_path
from fedlightning.wrappers import FeatureTap


class MOON(FederatedCallback):
    r"""Model-contrastive learning: representations are drawn to the global model's, away from the client's last ones.

    Li, He, Song, "Model-contrastive federated learning", CVPR 2021.

    Down: ``w^t``. Up: ``w_i``. State: the model that the client sent last. On every batch, with the representations
    ``z`` of the model in training, ``z_g`` of the received ``w^t`` and ``z_p`` of the last local model (both frozen, in
    eval mode):

    * ``con = -log( exp(cos(z, z_g)/T) / (exp(cos(z, z_g)/T) + exp(cos(z, z_p)/T)) )``, ``loss = task + mu mean(con)``.

    A client's first visit has no last model and no term, as in the authors' code. The representation is what goes into
    the head; the paper puts a projection of two layers and 256 outputs before it, which here belongs to the module. A
    step costs three forward passes. The logged loss stays the task's.

    Args:
        mu: strength; the paper tunes it in {0.1, 1, 5, 10}. Default 1 (the authors' code).
        temperature: ``T`` (paper: 0.5).
        head: path of the submodule that turns representations into predictions (``"net.fc"``); ``None``: the last
            layer.
        weighting: ``"samples"`` (paper) or ``"uniform"``.
    """

    def __init__(
        self, mu: float = 1.0, temperature: float = 0.5, head: str | None = None, weighting: WeightingName | None = None
    ) -> None:
        if mu < 0:
            raise ValueError(f"MOON got mu={mu}; the weight of a loss cannot be negative. Use 0 for FedAvg.")
        if not temperature > 0:
            raise ValueError(
                f"MOON got temperature={temperature}; it divides cosines and must be positive (paper: 0.5)."
            )
        self.mu = mu
        self.temperature = temperature
        self.head = head
        self.weighting = weighting

    def claims(self, role: str) -> bool:
        """With ``mu = 0`` there is no loss term."""
        return super().claims(role) and not (role == "training_loss" and self.mu == 0.0)

    def check(self, setup: Setup) -> None:
        """Refuse a head that is not there or that a step does not call exactly once."""
        if self.mu > 0:
            features_at_start(setup, self.feature_taps, self.key)

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """The representation: what goes into the head."""
        return {"z": FeatureTap(module, head_path(module, self.head))}

    def on_visit_start(self, client: Client) -> None:
        """Freeze the two teachers: the received model and the last local one."""
        previous = client.state.get(self.key, {}).get("previous")
        if previous is not None and self.mu > 0:
            client.scratch[self.key] = [client.frozen_copy(client.received), client.frozen_copy(previous)]

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """``task + mu mean(con)``."""
        if self.key not in client.scratch:
            return loss
        z_g, z_p = (
            client.features(teacher.to(module.device), batch, self.feature_taps(teacher))["z"]
            for teacher in client.scratch[self.key]
        )
        return loss + self.mu * contrastive_loss(features["z"], z_g, z_p, self.temperature)

    def on_send(self, client: Client, update: Update) -> None:
        """Keep the local model for the next visit."""
        if client.steps and self.mu > 0:
            client.state[self.key] = {"previous": client.model_state()}
