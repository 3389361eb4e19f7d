"""FjORD: ordered dropout. `shared.partial_training` tells the way of the model through a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F

from fedlightning.algorithm import Client, Facts, Message, Need, Stage, WeightingName, probes
from fedlightning.callbacks.shared.partial_training import PartialTraining
from fedlightning.callbacks.shared.representations import ClassLogits, head_path
from fedlightning.ranges import Length, PositiveFloat, PositiveShare, Share
from fedlightning.tensors import module_state
from fedlightning.wrappers import FeatureTap, frozen_buffers, muted
from fedlightning.wrappers.submodel import Units, plan_cuts
from fedlightning.wrappers.units import prefix_units
from fedlightning.wrappers.widths import Widths

ONE_WIDTH_A_STEP = Need("trains another width in every step", ("training_loss", "local_phases", "keeps"))
"""A term of the loss, phases, or a model of the client's own would be of one width."""


class FjORD(PartialTraining):
    r"""Every local step trains the network at a random width, so that clients can deploy it at any width they afford.

    Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: fair and accurate federated learning under
    heterogeneous targets with ordered dropout", NeurIPS 2021.

    Down and up: the first `ceil(p_max C_l)` of the `C_l` units of every hidden layer, `p_max` being the client's largest
    width. Inputs and classes are never cut. No state. A client deploys its part; `submodel(module, p)` cuts any other.

    * *Client*, every step: draws `p` uniformly from the widths `p <= p_max` and computes with the first `ceil(p C_l)` units;
      gradients of the others are zero. A width uses a prefix of the units of every larger one.
    * *Self-distillation*: every step runs `p_max` with hard labels, and the drawn width learns from its predictions:
      `CE(f_pmax, y) + (1 - alpha) CE(f_p, y) + alpha T^2 KL(softmax(f_pmax / T) || softmax(f_p / T))`, without a gradient
      through the first. `CE` is whatever loss `training_step` gives. Where `p = p_max` the term with KL is 0. It doubles the
      work of a step.
    * *Server*: every entry is the mean over the clients that hold it, by their samples. Held by nobody, it keeps its value.

    With one width of 1 it is FedAvg, bit for bit. Weight decay and momentum of a client's optimizer act on all its units.

    BatchNorm: the paper keeps running statistics for every width. Here a width gets its statistics when it is deployed, from
    the training data of its client, and the full model after every round from all participants (HeteroFL's static batch
    normalisation). The drawn width of self-distillation leaves running statistics as they are. Modules as for HeteroFL.
    Beside other terms in the loss, which would see features of one width in one step and of another in the next, and beside
    models of the client's own, it is refused.

    Args:
        widths: The widths `P`, in (0, 1] (paper: 0.2, 0.4, ..., 1).
        rates: The largest width `p_max` of each client, one of `widths`: a list dealt to the clients in turn, or one for
            each client by id (paper: as many clients of each width).
        distillation: Self-distillation (paper).
        alpha: Share of the teacher in what the drawn width learns, in [0, 1] (paper: 1, soft targets only).
        temperature: Temperature `T` of the distillation (paper: 1).
        head: Path of the layer that gives the logits. `None` takes the last layer.
        weighting: Weights of the clients: `"samples"` (paper) or `"uniform"`.

    Raises:
        ValueError: If a width is outside (0, 1], a rate is not a width, `alpha` or `temperature` are out of range, or `head`
            names several layers.

    Example:
        >>> from fedlightning.callbacks import FjORD
        >>> from fedlightning.models import MLP
        >>> parts = [FjORD().submodel(MLP(4, [10], 2), p) for p in (0.2, 0.6)]
        >>> [part.fc1.out_features for part in parts]
        [2, 6]
    """

    def __init__(
        self,
        widths: Annotated[Sequence[PositiveShare], Length(note="Shares of the full model.")] = (
            0.2,
            0.4,
            0.6,
            0.8,
            1.0,
        ),
        rates: Sequence[float] | dict[str, float] = (1.0, 0.8, 0.6, 0.4, 0.2),
        distillation: bool = True,
        alpha: Share = 1.0,
        temperature: PositiveFloat = 1.0,
        head: str | list[str] | None = None,
        weighting: WeightingName | None = "samples",
    ) -> None:
        super().__init__(rates, head=head, weighting=weighting)
        for rate in rates.values() if isinstance(rates, dict) else rates:
            if rate not in widths:
                raise ValueError(
                    f"FjORD got a client's largest width {rate}, which is none of widths={list(widths)}. Add it there."
                )
        self.widths = widths
        self.distillation = distillation
        self.alpha = alpha
        self.temperature = temperature

    def claims(self, role: str) -> bool:
        """Decline the loss term without self-distillation."""
        return super().claims(role) and not (role == "training_loss" and not self.distillation)

    def units(self, rate: float, round: int, client: str, seed: int) -> Units:
        """Return the first `ceil(rate * width)` units of every layer, in every round and for every client."""
        return prefix_units(rate)

    def _computed(self) -> set[float]:
        largest = max(super()._computed())
        return {width for width in self.widths if width <= largest}

    @property
    def facts(self) -> Facts:
        """Every step trains another width, with one loss."""
        why, instead = "compares predictions by softmax, one class a sample", "Use distillation=False."
        logits = ClassLogits(why, instead, when="distillation")
        return super().facts.extend(needs=[ONE_WIDTH_A_STEP], requires=[logits])

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the logits: the output of the head."""
        return {"logits": FeatureTap(module, head_path(module, self._head(module)), at="output")}

    # -- client --------------------------------------------------------------------------------------------------------
    def on_build(self, client: Client, message: Message) -> None:
        """Shrink the module to the client's largest width; for training, let its layers compute at the smaller ones."""
        rate, full = message.extras[self.key]["rate"], client.module
        cuts = plan_cuts(full, self._head(full))
        state = module_state(full)
        widths = {cut.path: len(state[f"{cut.path}.weight"]) for cut in cuts if cut.leaving == cut.path}
        super().on_build(client, message)
        smaller = [] if client.evaluating or message.work == 0 else [p for p in sorted(self.widths) if p < rate]
        if smaller:
            chosen = {p: _of_full_width(prefix_units(p), widths) for p in smaller}
            kept = {"widths": Widths(client.module, cuts, chosen), "rng": client.rng("widths"), "drawn": None}
            client.scratch[self.key] = kept

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Draw the width of the step. With self-distillation the step itself runs at the largest one."""
        kept = self.client.scratch.get(self.key)
        if kept is not None and self.client.phase.federated:
            choices = [*kept["widths"].layers, None]
            kept["drawn"] = choices[int(torch.randint(len(choices), (), generator=kept["rng"]))]
            kept["widths"].now = None if self.distillation else kept["drawn"]
            kept["batch_idx"] = batch_idx

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go back to the largest width."""
        kept = self.client.scratch.get(self.key)
        if kept is not None:
            kept["widths"].now = kept["drawn"] = None

    def _fits(self, client: Client, stage: Stage) -> bool:
        """Without self-distillation the statistics of training are of several widths: only the server's fit."""
        if self.distillation or self._computed() == {1.0}:
            return super()._fits(client, stage)
        return stage == "L1" and client.message.state.keys() >= module_state(client.module).keys()

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss of the largest width with that of the drawn one, which runs here."""
        kept = client.scratch.get(self.key)
        if kept is None:  # it has one width
            return loss
        if "narrow" in kept:  # the step at the drawn width, which this method has started
            kept["narrow"] = loss, features["logits"]
            return loss
        if kept["drawn"] is None:
            return loss if self.alpha == 1.0 else (2.0 - self.alpha) * loss
        kept["narrow"] = None
        try:
            with kept["widths"].at(kept["drawn"]), muted(module), frozen_buffers(module):
                probes.training_loss(module, batch, kept["batch_idx"])  # comes by here again
        finally:
            narrow = kept.pop("narrow")
        narrow_loss, narrow_logits = narrow
        return loss + distillation_loss(narrow_loss, narrow_logits, features["logits"], self.alpha, self.temperature)


def _of_full_width(units: Units, widths: Mapping[str, int]) -> Units:
    """Return a choice of units that counts in the widths of the full network, for a part of it."""
    return lambda path, _: units(path, widths[path])


def distillation_loss(loss: Tensor, logits: Tensor, teacher: Tensor, alpha: float, temperature: float) -> Tensor:
    r"""Return `(1 - alpha) loss + alpha T^2 KL(softmax(teacher / T) || softmax(logits / T))`, a mean over the batch.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks.fjord import distillation_loss
        >>> same = torch.tensor([[1.0, 2.0]])
        >>> distillation_loss(torch.tensor(0.7), same, same, alpha=0.5, temperature=2.0)
        tensor(0.3500)
    """
    if logits.ndim != 2:
        raise ValueError(
            f"FjORD's self-distillation needs logits of shape (batch, classes), and they are {tuple(logits.shape)}. Use "
            "distillation=False."
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    soft, log_student = (F.log_softmax(z.to(dtype) / temperature, 1) for z in (teacher.detach(), logits))
    kl = F.kl_div(log_student, soft, log_target=True, reduction="batchmean")
    return (1.0 - alpha) * loss + alpha * temperature**2 * kl
