"""pFedKnow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    FederatedCallback,
    GradientContext,
    Job,
    Message,
    Need,
    Newcomers,
    Plan,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.representations import ClassLogits, head_path
from fedlightning.callbacks.shared.values_by_turn import refuse_new_deal
from fedlightning.layers import expand
from fedlightning.ranges import Length, NonNegativeFloat, Share, ShareBelowOne, make_init, needs
from fedlightning.tensors import WeightedMean, module_state, narrow, widen
from fedlightning.wrappers import FeatureTap

LABELLED, UNLABELLED = "labelled", "unlabelled"

OWN_PRUNING = Need(
    "tells from its own pruning what each client holds, of a model that its server has trained",
    ("server_step", "on_reduced", Change.PARTS),
)
OWN_LOSS = Need("trains clients on a loss without labels", ("training_loss",))


@needs("lam", "guide", why="there is none to follow. Give one, or leave lam out.")
@make_init
class pFedKnow(FederatedCallback):
    r"""Labels at the server only: clients train pruned models on what the received model is sure of.

    After Wang, Zeng, Long, Wang, Xiao, Ma, "Knowledge-enhanced semi-supervised federated learning for aggregating
    heterogeneous lightweight clients in IoT", SDM 2023. The paper's code is not public: this follows its outline, and does
    not claim its numbers.

    * Server: trains ``w`` on labelled data, before round 1 and after every aggregation. These are the data of the client
      called ``server``, which trains nothing else. With ``guide`` the loss has ``lam KL(guide || w)`` more.
    * Down: ``w`` without the share ``prune_i`` of each weight tensor that is smallest in magnitude (biases and
      normalisation stay). Tensors travel dense, with zeros.
    * Client: the pruned weights stay 0, with a kept optimizer too. The loss is the mean over the batch of the cross entropy
      with the class that the received model finds likeliest, where its probability is ``threshold`` or more; the other
      samples count 0. **Labels of clients have no influence on training**, only on scores and on the logged ``train_loss``.
    * Up: ``w_i``. Server: each element is averaged over the clients that hold it; one that nobody holds stays.
    * State: none. Deployed: the pruned model of the client; the whole one is the global model.

    Args:
        server: Id of the client whose labelled data are the server's. ``None``: the server has none, and pseudo-labels come
            from the initial model.
        prune: Share of each weight tensor that a client does not get, in [0, 1): one for all, or a list that is dealt out
            over the clients in turn. Default 0.3.
        threshold: Least probability of a pseudo-label. Default 0.95 (FixMatch).
        guide: Path of a frozen submodule that gives logits for a batch's inputs, such as a pretrained ``"teacher"``. Its
            entries never travel. ``None``: no guide.
        lam: Weight of the guide. Default 1.
        head: Path of the submodule that gives the logits. ``None`` (default): the last layer.
        weighting: ``"samples"`` (default), ``"uniform"`` or ``"log"``.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> w = torch.tensor([[0.1, -3.0], [2.0, -0.2]])
        >>> w * select_kept(w, 0.5)
        tensor([[ 0., -3.],
                [ 2., -0.]])
    """

    rank = 10  # after the terms of others, so that pruned weights have no gradient

    server: str | None = None
    prune: ShareBelowOne | Annotated[list[ShareBelowOne], Length()] = 0.3
    threshold: Share = 0.95
    guide: str | None = None
    lam: NonNegativeFloat = 1.0
    head: str | list[str] | None = None
    weighting: WeightingName | None = "samples"

    @property
    def facts(self) -> Facts:
        """Clients hold pruned models and train on another loss; shares that are dealt in turn stay."""
        likeliest, way_out = "trains clients on the class that a model finds likeliest", "Use it for classification."
        unlabelled = "has no labelled data at a server: pseudo-labels come from the initial model alone."
        return Facts(
            needs=[OWN_PRUNING, OWN_LOSS],
            requires=[ClassLogits(likeliest, way_out), *([] if self.server else [requires.Advice(unlabelled)])],
            newcomers=Newcomers(join=self._join),
            real_only=True,
        )

    def check(self, setup: Setup) -> None:
        """Refuse a server without data, and a guide that trains."""
        if self.server is not None and not setup.data.num_samples.get(self.server):
            raise ValueError(
                f"pFedKnow got server={self.server!r}, and there is no such client with training data; the clients are "
                f"{', '.join(list(setup.run.clients)[:20])}. Name the one that has the labelled data."
            )
        if self.guide is not None and any(setup.kinds[n] == "trainable" for n in expand([self.guide], setup.kinds)):
            raise ValueError(f"pFedKnow's guide '{self.guide}' trains. Set requires_grad=False on its parameters.")

    def wire(self, module: nn.Module) -> Wire:
        """Declare the pruned share down."""
        return Wire(down={"prune": "scalar"})

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the logits: the output of the head."""
        return {"logits": FeatureTap(module, head_path(module, self.head), at="output")}

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str] | None:
        """Return all names but the guide's."""
        if self.guide is None:
            return None
        names = module_state(module)
        guide_names = set(expand([self.guide], names))
        return [name for name in names if name not in guide_names]

    # -- server --------------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Train on the labelled data (in round 1 twice), and the clients between."""
        labelled = [] if self.server is None else [Job(self.server, tag=LABELLED)]
        if labelled and server.round == 0:
            yield labelled
            yield []
        clients = [Job(client, tag=UNLABELLED) for client in server.participants() if client != self.server]
        if clients:
            yield clients
            yield []
        if labelled:
            yield labelled

    def _join(self, server: Server, clients: Sequence[str]) -> None:
        """Refuse to change what the clients that are there lose, which comes from a list in turn."""
        if isinstance(self.prune, list):
            refuse_new_deal(self, server, clients, "prune", self.prune)

    def share_of(self, server: Server, client: str) -> float:
        """Return the share of each weight tensor that a client does not get."""
        if client == self.server:
            return 0.0
        return (
            self.prune[server.clients.index(client) % len(self.prune)] if isinstance(self.prune, list) else self.prune
        )

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Prune the model for its client."""
        share = self.share_of(server, job.client) if job.client in server.clients else 0.0
        message.extras[self.key] = {"prune": share}
        for name in self._prunable(server, message.state) if share else ():
            message.state = {**message.state, name: message.state[name] * select_kept(message.state[name], share)}

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the mean of each element over the clients that hold it; the model trained on labels as it is."""
        mean = WeightedMean()
        for update in updates:
            mean.add(update.state, server.weight(update))
        reduced = mean.result()
        shares = {update.client: self.share_of(server, update.client) for update in updates}
        for name in self._prunable(server, reduced) if any(shares.values()) else ():
            old = server.model[name]
            total, weights = (torch.zeros_like(old, dtype=torch.float64) for _ in range(2))
            for update in updates:
                mask_weights = widen(select_kept(old, shares[update.client])) * server.weight(update)
                total, weights = total + mask_weights * widen(update.state[name]), weights + mask_weights
            reduced[name] = narrow(torch.where(weights > 0, total / weights.clamp_min(1e-300), widen(old)), old)
        return reduced

    @staticmethod
    def _prunable(server: Server, state: Mapping[str, Tensor]) -> list[str]:
        return [name for name in server.trainable if name in state and state[name].ndim > 1]

    # -- client --------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """Freeze the received model: it gives the pseudo-labels."""
        if client.message.tag != LABELLED:
            client.scratch[self.key] = client.frozen_copy()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget what a kept optimizer knows of weights that are pruned in this visit: momentum would move them."""
        if not self.client.keeps_optimizers or not self.client.message.extras[self.key]["prune"]:
            return
        stays: dict[Any, Tensor] = {
            parameter: (self.client.received[name] != 0).to(parameter.device)
            for name, parameter in pl_module.named_parameters()
            if name in self.client.received and parameter.ndim > 1
        }
        for optimizer in trainer.optimizers:
            for parameter, moments in optimizer.state.items():
                for word, value in moments.items() if parameter in stays else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        moments[word] = value * stays[parameter]

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss on pseudo-labels, or at the server that on labels with the guide."""
        teacher, logits = client.scratch.get(self.key), features["logits"]
        if teacher is not None:
            teacher_logits = client.features(teacher.to(module.device), batch, self.feature_taps(teacher))["logits"]
            return pseudo_label_loss(logits, teacher_logits, self.threshold)
        if self.guide is None or self.lam == 0:
            return loss
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        with torch.no_grad():
            guided = module.get_submodule(self.guide).eval()(inputs)
        return loss + self.lam * F.kl_div(
            logits.log_softmax(1), guided.log_softmax(1), log_target=True, reduction="batchmean"
        )

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Leave pruned weights at 0."""
        if not ctx.payload["prune"] or name not in ctx.anchor or parameter.ndim < 2:
            return gradient
        return gradient * (ctx.anchor[name] != 0)


def select_kept(weights: Tensor, share: float) -> Tensor:
    """Return which elements stay when the smallest in magnitude are pruned, bool of the same shape.

    Elements that are 0 are pruned too, so that a client sees from its zeros what it does not hold.
    """
    if share == 0:
        return torch.ones_like(weights, dtype=torch.bool)
    order = weights.abs().flatten().argsort(stable=True)
    stays = torch.ones(weights.numel(), dtype=torch.bool, device=weights.device)
    stays[order[: round(share * weights.numel())]] = False
    return stays.view_as(weights) & (weights != 0)


def pseudo_label_loss(logits: Tensor, teacher: Tensor, threshold: float) -> Tensor:
    """Return the mean over the batch of the cross entropy with the teacher's class where it is sure, else 0."""
    chances, classes = teacher.detach().softmax(1).max(1)
    return (F.cross_entropy(logits, classes, reduction="none") * (chances >= threshold)).mean()
