"""FCCL: cross-correlation of logits on public data, and own earlier models as teachers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import Client, Extra, Job, Message, Phase, Plan, Server, Update, Wire
from fedlightning.callbacks.shared.distillation import (
    NoSinglePublicSample,
    OwnLogits,
    PublicLogits,
    SharesPublicRows,
    both_classes,
    kl,
    logits_of,
)
from fedlightning.callbacks.shared.representations import head_path
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, make_init
from fedlightning.wrappers import FeatureTap

PREDICT, PRETRAIN, COLLABORATE = "predict", "pretrain", "collaborate"
SMALLEST = 1e-12
"""Variance below which a class's logits count as equal: its correlations are 0 then, and no gradient flows."""


@make_init
class FCCL(SharesPublicRows):
    """Logits on public data are made to correlate with the mean of all clients; own old models teach in local training.

    Huang, Ye, Du, "Learn from others and be yourself in heterogeneous federated learning", CVPR 2022.

    * First visit of a client: it pre-trains on its own data for `pretrain_epochs` and keeps the result, its *intra* teacher;
      then the local phase. It takes the place of an exchange, so `R` rounds have `R - 1` of them (without pre-training `R`).
    * Every round: the server draws `public_samples` ids; each participant sends its logits on them, in eval mode; the
      server takes the mean `Zbar`.
    * Client, collaborative phase, a batch of these samples: `M = Z~^T Zbar~ / n`, where `~` standardises each class over
      the batch (biased standard deviation, so that `M` lies in [-1, 1]), and
      `loss = sum_u (1 - M_uu)^2 + off_diagonal sum_{u != v} (1 + M_uv)^2`: same classes are to correlate, others to
      anticorrelate (the target is -1, and not 0 as in Barlow Twins).
    * Client, local phase, every step: `loss = task + inter KL(p_inter || p) + intra KL(p_intra || p)`, where the inter
      teacher is its own model at the end of its last visit. Both are frozen and in eval mode.
    * Down: the ids, and a row of `C` mean logits for each. Up: as many rows. No weight of a model ever travels.
    * State: model, inter and intra teacher at each client; at the server which clients have been visited.
    * Deployed: the client's model. There is no global model.

    The authors exchange logits for every public batch, with all models in train mode, and take Adam with a learning rate of
    1e-3; here the exchange is once a round on a fixed subset, and the optimizer is the module's. In one of their scripts the
    client's own share of the mean is that of its last round's model; here it is the present one, as in the others. They
    also choose among pre-trained models on test data; here the last one is kept. Their off-diagonal weight is 0.0051, and
    with the unbiased deviation that they use a perfect correlation is `(n - 1) / n`.

    Args:
        public_samples: Public samples of a round; all, if there are not more.
        public_batch_size: Batch size of the collaborative phase. Default 256 (authors). `None`: that of the public data.
        collaborate_epochs: Epochs of the collaborative phase. Default 1 (authors). 0: nothing is exchanged.
        collaborate_lr_factor: Factor on the module's learning rates there.
        off_diagonal: Weight of the sum over pairs of classes. Default 0.0051 (authors).
        pretrain_epochs: Epochs of pre-training; 0: none, and no intra teacher. Default 20 (authors: 50).
        inter: Weight of the inter teacher.
        intra: Weight of the intra teacher.
        unbiased: Standardise with the unbiased deviation (authors' code).
        head: Path of the submodule that gives the logits (`"net.fc"`). `None`: the last layer.

    Raises:
        ValueError: If a number is negative, or 0 where it cannot be.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import FCCL
        >>> module = nn.Linear(2, 3)
        >>> FCCL().shared_names(None, module), list(FCCL().wire(module).up)
        ([], ['rows'])
    """

    facts = SharesPublicRows.facts.extend(
        requires=[
            PublicLogits(),
            NoSinglePublicSample(samples="public_samples", batch_size="public_batch_size", when="collaborate_epochs"),
            OwnLogits(),
        ]
    )

    public_samples: PositiveInt = 5000
    public_batch_size: Annotated[int, Range("[2, inf)")] | None = 256
    collaborate_epochs: NonNegativeInt = 1
    collaborate_lr_factor: NonNegativeFloat = 0.1
    off_diagonal: NonNegativeFloat = 0.0051
    pretrain_epochs: NonNegativeInt = 20
    inter: NonNegativeFloat = 1.0
    intra: NonNegativeFloat = 1.0
    unbiased: bool = False
    head: str | list[str] | None = None

    def claims(self, role: str) -> bool:
        """Decline the loss term where no teacher has a weight."""
        unused = self.inter == 0.0 and (self.intra == 0.0 or not self.pretrain_epochs)
        return super().claims(role) and not (role == "training_loss" and unused)

    def wire(self, module: nn.Module) -> Wire:
        """Declare ids and mean rows down, rows up."""
        return Wire(down={"ids": ("public",), "mean": (-1, -1)}, up={"rows": Extra(("public", -1), due=(PREDICT,))})

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the logits: the output of the head."""
        return {"logits": FeatureTap(module, head_path(module, self.head), at="output")}

    # -- server --------------------------------------------------------------------------------------------------------
    def ids(self, server: Server) -> Tensor:
        """Return the public samples of the round."""
        return server.training.public_ids(self.public_samples)

    def plan_round(self, server: Server) -> Plan:
        """Collect the rows of those that have been visited, then let everybody train."""
        server_state = server.state.get(self.key, {})
        clients, ready = server.participants(), list(server_state.get("ready", []))
        ready_clients = [client for client in clients if client in ready or not self.pretrain_epochs]
        new = [client for client in clients if client not in ready_clients]
        if ready_clients and self.collaborate_epochs:
            server.state[self.key] = {"ready": ready, "ids": self.ids(server)}
            sent = yield [Job(client, work=0, tag=PREDICT) for client in ready_clients]
            if rows := self.rows_in(sent):
                server.state[self.key] |= {"mean": self.mean_of(server, rows)}
        has_mean = "mean" in server.state.get(self.key, {})
        tags = dict.fromkeys(ready_clients, COLLABORATE if has_mean else "") | dict.fromkeys(new, PRETRAIN)
        trained = yield [Job(client, tag=tags[client]) for client in clients]
        new = [update.client for update in trained if update.error is None and update.client not in ready]
        server.state[self.key] = {"ready": ready + new}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the ids, and for the collaborative phase the mean."""
        server_state = server.state.get(self.key, {})
        names = {PREDICT: ("ids",), COLLABORATE: ("ids", "mean")}.get(job.tag, ())
        if names:
            message.extras[self.key] = {name: server_state[name] for name in names}

    # -- client --------------------------------------------------------------------------------------------------------
    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Split a visit into pre-training or the collaborative phase, and the local one."""
        tag = client.message.tag
        if tag == PRETRAIN and self.pretrain_epochs:
            yield Phase(PRETRAIN, work=self.pretrain_epochs, unit="epochs", federated=False)
            pretrained = client.model_state()
            client.state[self.key] = {"previous": pretrained, **({"pretrained": pretrained} if self.intra else {})}
        elif tag == COLLABORATE:
            payload = client.message.extras[self.key]
            yield Phase(
                COLLABORATE,
                data=self.public_batches(client, payload["ids"], payload["mean"]),
                loss=self.collaborate_loss,
                work=self.collaborate_epochs,
                unit="epochs",
                lr_factor=self.collaborate_lr_factor,
                federated=False,
            )
        client.scratch[self.key] = self.teachers(client)
        yield Phase()

    def public_batches(self, client: Client, ids: Tensor, targets: Tensor | None = None) -> Any:
        """Return the loader of the round's public samples: in a drawn order with targets, else in that of the ids."""
        shuffle = targets is not None
        return client.public(ids, targets=targets, batch_size=self.public_batch_size, shuffle=shuffle)

    def teachers(self, client: Client) -> list[tuple[float, LightningModule]]:
        """Return weights and frozen copies of the client's old models."""
        kept = client.state.get(self.key, {})
        weights = {"previous": self.inter, "pretrained": self.intra}
        return [(weight, client.frozen_copy(kept[name])) for name, weight in weights.items() if weight and name in kept]

    def collaborate_loss(self, client: Client, module: LightningModule, paired: Any, batch_idx: int) -> Tensor:
        """Return the loss of the collaborative phase."""
        return correlation_loss(logits_of(module, paired.batch), paired.targets, self.off_diagonal, self.unbiased)

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the task's loss and the divergences from the teachers."""
        logits = both_classes(features["logits"])
        for weight, teacher in client.scratch[self.key]:
            seen = client.features(teacher.to(module.device), batch, self.feature_taps(teacher))
            loss = loss + weight * self.divergence(both_classes(seen["logits"]), logits, batch)
        return loss

    def divergence(self, teacher: Tensor, student: Tensor, batch: Any) -> Tensor:
        """Return `KL(p_teacher || p)`, mean over the batch."""
        return kl(teacher, student)

    def on_send(self, client: Client, update: Update) -> None:
        """Send rows, if they are asked for; else keep the model as the next inter teacher."""
        if client.message.tag == PREDICT:
            self.send_rows(client, update, self.public_batches(client, client.message.extras[self.key]["ids"]))
        elif client.contributed and self.inter:
            client.state[self.key] = {**client.state.get(self.key, {}), "previous": client.model_state()}


def correlation_loss(z: Tensor, target: Tensor, off_diagonal: float, unbiased: bool = False) -> Tensor:
    """Return `sum_u (1 - M_uu)^2 + off_diagonal sum_{u != v} (1 + M_uv)^2`, in fp32 at least.

    Example:
        >>> z = torch.tensor([[1.0, -3.0], [-1.0, 3.0]])
        >>> float(correlation_loss(z, 5 * z + 2, 1.0)), float(correlation_loss(z, -z, 1.0))
        (0.0, 16.0)
    """
    with torch.autocast(z.device.type, enabled=False):
        matrix = correlations(z, target.to(z.device).detach(), unbiased)
        same = torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)
        return (1 - matrix[same]).square().sum() + off_diagonal * (1 + matrix[~same]).square().sum()


def correlations(z: Tensor, other: Tensor, unbiased: bool = False) -> Tensor:
    """Return the matrix `M` of correlations over the batch between classes of `z` and of `other`."""
    return _standard(z, unbiased).T @ _standard(other, unbiased).to(z.dtype) / len(z)


def _standard(z: Tensor, unbiased: bool) -> Tensor:
    """Return columns with mean 0 and deviation 1; constant ones are 0."""
    centred = z.float() - z.float().mean(0) if z.dtype != torch.float64 else z - z.mean(0)
    variance = centred.square().sum(0) / max(len(z) - unbiased, 1)
    return centred / variance.clamp_min(SMALLEST).sqrt()
