"""FedCovid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import (
    Client,
    FederatedCallback,
    GradientContext,
    Job,
    Message,
    Phase,
    Plan,
    Server,
    Setup,
    WeightingName,
    Wire,
)
from fedlightning.callbacks.shared.representations import features_at_start, head_path, labels_of, looked_at, rows
from fedlightning.ranges import (
    Counts,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    RoundCountOrShare,
    make_init,
)
from fedlightning.tensors import as_reals
from fedlightning.wrappers import FeatureTap

LARGE, SMALL = "large", "small"


@make_init
class FedCovid(FederatedCallback):
    r"""Large hospitals train first, then all of them, with a loss for rare positives and log weights.

    Wang, Qian, Cui, Glass, Ma, "Towards federated COVID-19 vaccine side effect prediction", ECML PKDD 2022.

    * Client: ``L = CE + lam_c CE(noisy positives) + lam_m L_m + lam_w / N_w ||w - w_g||^2``. The noisy positives are
      ``copies`` of the representations of class ``positive`` in the batch, with Gaussian noise, through the head once
      more. ``L_m`` is the mean over anchors of ``max(d(anchor, same class) - d(anchor, other class) + margin, 0)`` with
      cosine distances, one sample of each a batch. ``N_w`` is the number of parameters that train and travel.
    * Ordinal training: in the first ``warmup`` rounds only the large clients train, then those that ``participation``
      draws from all. A small client does ``small_work`` of the local work at ``small_lr`` of the learning rate.
    * Server: ``w_g = sum_k beta_k w_k`` with ``beta_k`` in proportion to ``log(1 + N_k)``.
    * Down: ``w_g``. Up: ``w_k``. State: the number of warm-up rounds, at the server.
    * Deployed: the global model.

    The authors' proximal term has no gradient (it is taken on ``.data``), and their script lets small clients send the
    global model back untrained; neither is repeated here. The gated fusion of their network is
    ``MultimodalNet(fusion="gate")``. The logged loss stays the task's.

    Args:
        lam_c: Weight of the noisy positives. Default 1 (authors).
        lam_m: Weight of the margin loss. Default 1 (authors).
        lam_w: Weight of the proximal term. Default 1 (authors).
        positive: The class whose representations are copied. Default 1, the positives of a binary task.
        copies: Noisy copies of each positive. Default 4 (authors: one positive to five negatives).
        noise: Standard deviation of the noise. Default 0.2 (authors).
        margin: ``delta``. Default 0.2 (authors).
        mining: ``"random"``: any sample of another class (paper). ``"semi-hard"``: the nearest one that is farther than
            the positive by less than the margin; an anchor without one is left out (authors' code).
        warmup: Rounds of the large clients alone: a share of all rounds (float) or a number (int). Default 0.5 (authors:
            200 of 400).
        large: Clients that count as large: the biggest share (float) or number (int) of them. Default 0.5 (authors: the
            10 biggest of 29, all with more than 200 patients).
        small_work: Local work of a small client, as a share. Default 0.5 (authors: 10 and 20 epochs).
        small_lr: Learning rate of a small client, as a factor. Default 0.2 (authors: 0.001 and 0.005).
        head: Path of the submodule that turns representations into logits. ``None`` (default): the last layer.
        weighting: ``"log"`` (default: ``log(1 + N)``, since ``log N`` gives a client of one sample no weight, and only
            such clients no mean), ``"samples"`` or ``"uniform"``.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        Two positives close together and far from the negative cost nothing.

        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0]])
        >>> margin_loss(z, torch.tensor([1, 1, 0]), margin=0.2)
        tensor(0.)
    """

    lam_c: NonNegativeFloat = 1.0
    lam_m: NonNegativeFloat = 1.0
    lam_w: NonNegativeFloat = 1.0
    positive: Annotated[int, Range("[0, inf)", "The number of a class.")] = 1
    copies: PositiveInt = 4
    noise: NonNegativeFloat = 0.2
    margin: NonNegativeFloat = 0.2
    mining: Literal["random", "semi-hard"] = "random"
    warmup: RoundCountOrShare = 0.5
    large: (
        Annotated[int, Range("[1, inf)", strict=True), Counts("clients")]
        | Annotated[float, Range("(0, 1]", "One client at least is large; use warmup=0 for no order.")]
    ) = 0.5
    small_work: PositiveShare = 0.5
    small_lr: PositiveFloat = 0.2
    head: str | list[str] | None = None
    weighting: WeightingName | None = "log"

    def claims(self, role: str) -> bool:
        """Decline what the arguments leave out."""
        needed = {
            "training_loss": self.lam_c > 0 or self.lam_m > 0,
            "correct_gradient": self.lam_w > 0,
            "local_phases": self.small_lr != 1.0,
        }
        return super().claims(role) and needed.get(role, True)

    def check(self, setup: Setup) -> None:
        """Refuse a head whose input cannot be read, labels that are not classes, and a class that is not an output."""
        if not self.claims("training_loss"):
            return
        features = features_at_start(setup, self.feature_taps, self.key)
        batch = setup.data.first_batch()
        if batch is None:
            return
        labels, path = labels_of(batch, self.key), head_path(setup.module, self.head)
        with looked_at(setup.module, f"FedCovid calls the head '{path}' once more, and that failed") as module:
            shape = tuple(module.get_submodule(path).forward(features["z"]).shape)
        outputs = max(2, shape[1]) if len(shape) == 2 else 2
        if shape[0] != len(labels) or len(shape) > 2 or self.positive >= outputs:
            raise ValueError(
                f"FedCovid(positive={self.positive}) trains on copies of one class, but '{path}' gives values of shape "
                f"{shape} for {len(labels)} labels. Set head=... to the submodule that gives the logits, and positive to "
                "one of its classes."
            )

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the representation: the input of the head."""
        return {"z": FeatureTap(module, head_path(module, self.head))}

    def wire(self, module: nn.Module) -> Wire:
        """Declare the number of parameters down."""
        return Wire(down={"parameters": "scalar"})

    # -- ordinal training ----------------------------------------------------------------------------------------------
    def on_federation_start(self, server: Server) -> None:
        """Fix the length of the warm-up, which a run that is made longer later does not change."""
        rounds = self.warmup if isinstance(self.warmup, int) else round(self.warmup * server.max_rounds)
        server.state[self.key] = {"warmup": int(rounds)}

    def large_clients(self, server: Server) -> set[str]:
        """Return the clients with the most samples; of equal ones the first."""
        count = self.large if isinstance(self.large, int) else max(1, round(self.large * len(server.clients)))
        by_size = sorted(server.clients, key=lambda client: -server.num_samples[client])
        return set(by_size[:count])

    def plan_round(self, server: Server) -> Plan:
        """Visit the large clients in the warm-up, then the participants."""
        large = self.large_clients(server)
        warming = server.round < server.state[self.key]["warmup"]
        chosen = [c for c in server.clients if c in large] if warming else server.participants()
        less = max(1, round(self.small_work * server.blueprint.settings.work))
        yield [Job(c, tag=LARGE) if c in large else Job(c, tag=SMALL, work=less) for c in chosen]

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train once, a small client at its own learning rate."""
        yield Phase(lr_factor=self.small_lr if client.message.tag == SMALL else 1.0)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the number of parameters that the proximal term is divided by."""
        if self.lam_w > 0 and job.work != 0:
            names = set(server.trainable) & set(message.state)
            message.extras[self.key] = {"parameters": sum(as_reals(message.state[name]).numel() for name in names)}

    # -- the loss ------------------------------------------------------------------------------------------------------
    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the task's loss with those of the noisy positives and of the margin."""
        labels, z = labels_of(batch, self.key), features["z"]
        if self.lam_c > 0:
            noisy = z.repeat(self.copies, *[1] * (z.ndim - 1))
            noisy = noisy + self.noise * torch.randn_like(noisy)
            # Without the head's hooks: other callbacks count its calls.
            logits = module.get_submodule(head_path(module, self.head)).forward(noisy)
            loss = loss + self.lam_c * positives_loss(logits, labels.repeat(self.copies), self.positive)
        if self.lam_m > 0:
            loss = loss + self.lam_m * margin_loss(z, labels, self.margin, self.mining)
        return loss

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Add the gradient of ``lam_w / N_w ||w - w_g||^2``."""
        if name not in ctx.anchor:
            return gradient
        return gradient + 2.0 * self.lam_w / ctx.payload["parameters"] * (parameter - ctx.anchor[name])


def positives_loss(logits: Tensor, labels: Tensor, positive: int) -> Tensor:
    """Return the mean cross entropy of the samples of one class; 0 without such a sample."""
    if logits.ndim == 1 or logits.shape[1] == 1:
        flat = logits.flatten()
        losses = F.binary_cross_entropy_with_logits(flat, labels.to(flat.dtype), reduction="none")
    else:
        losses = F.cross_entropy(logits, labels, reduction="none")
    chosen = (labels == positive).to(losses.dtype)
    return (losses * chosen).sum() / chosen.sum().clamp_min(1.0)


def margin_loss(z: Tensor, labels: Tensor, margin: float, mining: str = "random") -> Tensor:
    """Return the mean over anchors of ``max(d(anchor, positive) - d(anchor, negative) + margin, 0)``; 0 without anchors.

    An anchor is a sample that has another one of its class and one of another class in the batch. Its positive is drawn
    at random from torch's global generator, which has an address in every local epoch.
    """
    unit = F.normalize(rows(z), dim=1, eps=1e-8)
    distances = 1.0 - unit @ unit.T
    same = labels[:, None] == labels[None, :]
    positives = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    drawn = torch.rand(2, *same.shape, device=labels.device)
    positive = distances.gather(1, ((1 + drawn[0]) * positives).argmax(1, keepdim=True))
    negatives = ~same
    if mining == "semi-hard":
        negatives = negatives & (distances > positive) & (distances < positive + margin)
        negative = distances.masked_fill(~negatives, math.inf).argmin(1, keepdim=True)
    else:
        negative = ((1 + drawn[1]) * negatives).argmax(1, keepdim=True)
    anchors = (positives.any(1) & negatives.any(1)).to(distances.dtype)
    losses = (positive - distances.gather(1, negative) + margin).clamp_min(0.0).squeeze(1)
    return (losses * anchors).sum() / anchors.sum().clamp_min(1.0)
