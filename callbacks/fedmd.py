"""FedMD: each client digests the mean of all clients' logits on public data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import Client, Extra, Job, Message, Phase, Plan, Server, Update, Wire
from fedlightning.callbacks.shared.distillation import (
    NoSinglePublicSample,
    PublicLogits,
    SharesPublicRows,
    kl,
    logits_of,
)
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, make_init

SCORES, TRANSFER, DIGEST = "scores", "transfer", "digest"
ROUNDING = 1e-6
"""Share of a logit by which two batches that hold the same sample may differ."""


@make_init
class FedMD(SharesPublicRows):
    """Logits on public data travel, models do not: clients digest the mean of their class scores, then train on their own.

    Li, Wang, "FedMD: heterogenous federated learning via model distillation", NeurIPS workshop on federated learning for
    data privacy and confidentiality, 2019. The authors' code (diogenes0319/FedMD_clean) sends logits, and takes the mean
    absolute error for the digest.

    * First visit of a client, transfer learning: `transfer_epochs` of its own task on the labelled public data, then its
      local training. It takes the place of an exchange, so `R` rounds have `R - 1` of them.
    * Every round: the server draws `public_samples` ids of public data; each participant that has had its first visit
      sends its logits on them, in eval mode; the server takes their mean.
    * Client: the digest, `digest_epochs` on these samples with the loss `mean |f(x) - consensus(x)|`; then the revisit, its
      local training.
    * Down: the ids, and the consensus, a row of `C` numbers for each id. Up: as many rows. No weight of a model ever travels.
    * State: the whole model at each client; at the server which clients have had their first visit.
    * Deployed: the client's model. There is no global model.

    Consensus and digest are of one round, so a client that returns digests nothing that is old. Without transfer learning and
    digest it is local training; alone, a client digests its own logits.

    Args:
        public_samples: Public samples of a round. Default 5000 (paper); all, if there are not more.
        transfer_epochs: Epochs on labelled public data in a client's first visit. 0: no transfer learning, and the exchange
            begins in round 1; then the public data need no labels. Default 20 (the authors: at most 25, until nothing
            improves).
        digest_epochs: Epochs of the digest. Default 1 (authors).
        digest_batch_size: Batch size of the digest. Default 256 (authors). `None`: that of the public data.
        digest_lr_factor: Factor on the module's learning rates in the digest.
        digest_loss: `"mae"` (authors), `"mse"`, or `"kl"`, the divergence of the two softmax distributions.
        weighting: `"uniform"` mean of the participants' logits (authors) or by their `"samples"`.

    Raises:
        ValueError: If a number is negative or 0 where it cannot be, or `digest_loss` or `weighting` is unknown.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import FedMD
        >>> module = nn.Linear(2, 3)
        >>> FedMD().shared_names(None, module), list(FedMD().wire(module).up)
        ([], ['logits'])
    """

    sends = "logits"
    facts = SharesPublicRows.facts.extend(
        requires=[
            PublicLogits(labels="transfer_epochs", softmax="digests_by_kl"),
            NoSinglePublicSample(when="transfer_epochs"),
            NoSinglePublicSample(samples="public_samples", batch_size="digest_batch_size", when="digest_epochs"),
        ]
    )

    public_samples: PositiveInt = 5000
    transfer_epochs: NonNegativeInt = 20
    digest_epochs: NonNegativeInt = 1
    digest_batch_size: PositiveInt | None = 256
    digest_lr_factor: NonNegativeFloat = 1.0
    digest_loss: Literal["mae", "mse", "kl"] = "mae"
    weighting: Literal["uniform", "samples"] = "uniform"

    @property
    def digests_by_kl(self) -> bool:
        """Whether the digest compares predictions by their softmax."""
        return self.digest_epochs > 0 and self.digest_loss == "kl"

    def wire(self, module: nn.Module) -> Wire:
        """Declare ids and consensus down, logits up."""
        return Wire(
            down={"ids": ("public",), "consensus": (-1, -1)}, up={"logits": Extra(("public", -1), due=(SCORES,))}
        )

    # -- server --------------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Collect logits of those that have had their first visit, then let everybody train."""
        server_state = server.state.get(self.key, {})
        clients, ready = server.participants(), list(server_state.get("ready", []))
        ready_clients = [client for client in clients if client in ready or not self.transfer_epochs]
        new = [client for client in clients if client not in ready_clients]
        rows: dict[str, Tensor] = {}
        if ready_clients and self.digest_epochs:
            server.state[self.key] = {"ready": ready, "ids": server.training.public_ids(self.public_samples)}
            sent = yield [Job(client, work=0, tag=SCORES) for client in ready_clients]
            rows = self.rows_in(sent)
        if rows:
            server.state[self.key] |= {"consensus": self.mean_of(server, rows)}
        tags = dict.fromkeys(ready_clients, DIGEST if rows else "") | dict.fromkeys(new, TRANSFER)
        trained = yield [Job(client, tag=tags[client]) for client in clients]
        ready += [update.client for update in trained if update.error is None and update.client in new]
        server.state[self.key] = {"ready": ready}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the ids, and for the digest the consensus."""
        server_state = server.state.get(self.key, {})
        names = {SCORES: ("ids",), DIGEST: ("ids", "consensus")}.get(job.tag, ())
        if names:
            message.extras[self.key] = {name: server_state[name] for name in names}

    # -- client --------------------------------------------------------------------------------------------------------
    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Split a visit into transfer learning or digest, and local training."""
        tag = client.message.tag
        if tag == TRANSFER:
            yield Phase(TRANSFER, data="public", work=self.transfer_epochs, unit="epochs", federated=False)
        elif tag == DIGEST:
            payload = client.message.extras[self.key]
            loader = client.public(
                payload["ids"], targets=payload["consensus"], batch_size=self.digest_batch_size, shuffle=True
            )
            yield Phase(
                DIGEST,
                data=loader,
                loss=self._distance,
                work=self.digest_epochs,
                unit="epochs",
                lr_factor=self.digest_lr_factor,
                federated=False,
            )
        yield Phase()

    def _distance(self, client: Client, module: LightningModule, paired: Any, batch_idx: int) -> Tensor:
        """Return the loss of the digest."""
        logits = logits_of(module, paired.batch)
        target = paired.targets.to(logits)
        if self.digest_loss == "kl":
            return kl(target, logits)
        if self.digest_loss == "mse":
            return F.mse_loss(logits, target)
        apart = logits - target
        # the slope of |x| is 1 however small x is: without this, rounding would move a model that agrees already
        return (apart * (apart.abs() > ROUNDING * (1 + target.abs()))).abs().mean()

    def on_send(self, client: Client, update: Update) -> None:
        """Send logits, if they are asked for."""
        if client.message.tag == SCORES:
            ids = client.message.extras[self.key]["ids"]
            self.send_rows(client, update, client.public(ids, batch_size=self.digest_batch_size))
