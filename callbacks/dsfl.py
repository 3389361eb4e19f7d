"""DS-FL: distillation-based semi-supervised federated learning with entropy reduction averaging."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from fedlightning.algorithm import GLOBAL, Client, Extra, Job, Message, Phase, Plan, Server, ServerModels, Update, Wire
from fedlightning.callbacks.shared.distillation import NoSinglePublicSample, PublicLogits, SharesPublicRows, logits_of
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, make_init
from fedlightning.tensors import clone, module_state

PREDICT, DISTIL = "predict", "distil"


def sharpened(probabilities: Tensor, temperature: float) -> Tensor:
    """Return `softmax(p / T)` of mean probabilities: entropy reduction averaging (ERA) with a small `T`.

    Example:
        >>> import torch
        >>> sharpened(torch.tensor([[0.9, 0.1]]), 0.1)
        tensor([[9.9966e-01, 3.3535e-04]])
    """
    return (probabilities.double() / temperature).softmax(1).to(probabilities.dtype)


@make_init
class DSFL(SharesPublicRows, ServerModels):
    """Probabilities on unlabelled public data travel, models do not: clients and a server's model learn their sharpened mean.

    Itahara, Nishio, Koda, Morikura, Yamamoto, "Distillation-based semi-supervised federated learning for
    communication-efficient collaborative training with non-IID private data", IEEE Transactions on Mobile Computing, 2021
    (arXiv 2008.06180).

    A round has two visits of every participant:

    * first its local training, and then its probabilities on the `public_samples` ids of the round, in eval mode;
    * the server takes their mean `p` and sharpens it: `t = softmax(p / T)` (ERA; `aggregation="mean"` is the paper's SA);
    * then the distillation, `distil_epochs` with the cross entropy to `t`. The server's model is distilled in the same way.

    Down: the ids, and `t`, a row of `C` numbers for each id. Up: as many rows. No weight of a model ever travels. A client
    that was absent distils the newest `t` before its local training, on that round's ids, which come with it.

    * State: the whole model at each client; at the server its own model, the newest ids and `t`, and who has distilled them.
    * Deployed: the client's model. The server's is the global model (stage G): of clients with models of several
      architectures it has the first one, or that of `ClientModels(server=...)`.

    With `distil_epochs=0` it is local training.

    Args:
        public_samples: Public samples of a round. Default 1000 (paper); all, if there are not more.
        temperature: `T`. Default 0.1 (paper). Small: nearly one-hot at the likeliest class; large: uniform.
        aggregation: `"era"`: the sharpened mean (paper), or `"mean"`: the plain one (the paper's SA).
        distil_epochs: Epochs of each distillation. Default 5 (paper).
        distil_batch_size: Batch size of the distillation. Default 50 (that of the paper's local training). `None`: that of
            the public data.
        distil_lr_factor: Factor on the modules' learning rates in clients' distillation.
        server_lr: Learning rate of the server's SGD. Default 0.1 (paper).
        weighting: `"uniform"` mean of the participants' probabilities (paper) or by their `"samples"`.

    Raises:
        ValueError: If a number is negative or 0 where it cannot be, or `aggregation` or `weighting` is unknown.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import DSFL
        >>> module = nn.Linear(2, 3)
        >>> DSFL().shared_names(None, module), list(DSFL().wire(module).up)
        ([], ['probabilities'])
    """

    sends = "probabilities"
    facts = SharesPublicRows.facts.extend(
        requires=[
            PublicLogits(softmax="distil_epochs"),
            NoSinglePublicSample(samples="public_samples", batch_size="distil_batch_size", when="distil_epochs"),
        ]
    )

    public_samples: PositiveInt = 1000
    temperature: PositiveFloat = 0.1
    aggregation: Literal["era", "mean"] = "era"
    distil_epochs: NonNegativeInt = 5
    distil_batch_size: PositiveInt | None = 50
    distil_lr_factor: NonNegativeFloat = 1.0
    server_lr: PositiveFloat = 0.1
    weighting: Literal["uniform", "samples"] = "uniform"

    def predict(self, module: LightningModule, batch: Any) -> Tensor:
        """Return probabilities."""
        return super().predict(module, batch).softmax(1)

    def wire(self, module: nn.Module) -> Wire:
        """Declare ids to predict, ids and targets to distil down, probabilities up."""
        return Wire(
            down={"predict": ("public",), "ids": (-1,), "targets": (-1, -1)},
            up={"probabilities": Extra(("public", -1), low=0.0, high=1.0, due=(PREDICT,))},
        )

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the server's model, for everybody."""
        return server.module_with(server.model)

    # -- server --------------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Let participants train and predict, then distil."""
        clients = server.participants()
        if not self.distil_epochs:
            yield [Job(client) for client in clients]
            return
        server_state = dict(server.state.get(self.key, {}))
        server.state[self.key] = {**server_state, "predict": server.training.public_ids(self.public_samples)}
        sent = yield [Job(client, tag=PREDICT, keep=True) for client in clients]
        rows = self.rows_in(sent)
        if not rows:  # the only one failed
            server.state[self.key] = server_state
            return
        targets = self.mean_of(server, rows)
        if self.aggregation == "era":
            targets = sharpened(targets, self.temperature)
        ids = server.state[self.key]["predict"]
        server.state[self.key] = {"ids": ids, "targets": targets, "done": []}
        self._teach_server(server, ids, targets)
        distilled = yield [Job(client, tag=DISTIL) for client in rows]
        done = [update.client for update in distilled if update.error is None]
        server.state[self.key] = {"ids": ids, "targets": targets, "done": done}

    def _teach_server(self, server: Server, ids: Tensor, targets: Tensor) -> None:
        """Distil the server's own model."""
        module = server.module_with(server.model)
        server.training.fit(
            module,
            server.training.public(ids, targets=targets, batch_size=self.distil_batch_size, shuffle=True),
            _cross_entropy,
            epochs=self.distil_epochs,
            optimizer=partial(SGD, lr=self.server_lr),
            purpose=self.key,
        )
        server.models[GLOBAL] = clone(module_state(module))

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send ids to predict, and what the client has not distilled yet."""
        state = server.state.get(self.key, {})
        payload = {}
        if job.tag == PREDICT:
            payload["predict"] = state["predict"]
        if job.tag == DISTIL or (job.tag == PREDICT and "ids" in state and job.client not in state["done"]):
            payload |= {"ids": state["ids"], "targets": state["targets"]}
        if payload:
            message.extras[self.key] = payload

    # -- client --------------------------------------------------------------------------------------------------------
    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Distil what is there to distil; then train, unless the visit is for distillation only."""
        payload = client.message.extras.get(self.key, {})
        if "targets" in payload:
            loader = client.public(
                payload["ids"], targets=payload["targets"], batch_size=self.distil_batch_size, shuffle=True
            )
            yield Phase(
                DISTIL,
                data=loader,
                loss=lambda client, module, paired, batch_idx: _cross_entropy(module, paired),
                work=self.distil_epochs,
                unit="epochs",
                lr_factor=self.distil_lr_factor,
                federated=False,
            )
        if client.message.tag != DISTIL:
            yield Phase()

    def on_send(self, client: Client, update: Update) -> None:
        """Send probabilities, if they are asked for."""
        ids = client.message.extras.get(self.key, {}).get("predict")
        if ids is not None:
            self.send_rows(client, update, client.public(ids, batch_size=self.distil_batch_size))


def _cross_entropy(module: LightningModule, paired: Any) -> Tensor:
    """Return the cross entropy to a batch's targets."""
    logits = logits_of(module, paired.batch)
    return F.cross_entropy(logits, paired.targets.to(logits))
