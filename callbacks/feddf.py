"""FedDF: ensemble distillation of the clients' models."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from lightning.pytorch import LightningModule
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from fedlightning.algorithm import Server, WeightingName
from fedlightning.callbacks.shared.ensemble_fusion import EnsembleFusion, Member
from fedlightning.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Range, make_init, needs


@needs("patience", "validation", why="nothing tells which model is better. Set validation=0.2, or leave it out.")
@needs("drop_worst", "validation", why="it judges by labelled public data. Set validation=0.2.")
@make_init
class FedDF(EnsembleFusion):
    """FedAvg among the clients of each architecture; then all returned models together teach each of these means.

    Lin, Kong, Stich, Jaggi, "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020.

    * Client: local training, as in FedAvg.
    * Server, for each architecture: the student starts from the weighted mean of the models of its clients. The teachers are
      the models of *all* clients that came back. `steps` times, on a batch of public data without labels:
      `loss = KL(softmax(mean_k z_k(x)) || softmax(f(x)))`, Adam with a cosine schedule.
    * Down: the model of the client's architecture. Up: `w_i`. State: none beside one model for each architecture.
    * Deployed: the model of the client's architecture.

    With `steps=0` it is FedAvg among the clients of each architecture, bit for bit. The authors' "avg_losses", the mean of
    the KL over teachers, has the gradient of `combine="probabilities"` and is not an option of its own. The teachers' outputs
    are found once a round, so public samples should have no random augmentation. If a single client came back, its model
    stays.

    Args:
        steps: Distillation steps of each model in a round. Default 1000 (paper: up to 10000).
        lr: Adam's learning rate. Default 1e-3 (authors).
        batch_size: Public samples of a step. Default 128 (authors).
        combine: `"logits"`: the mean of the teachers' logits (AvgLogits, paper), or `"probabilities"`: that of their softmax.
        temperature: `T` of both softmax. Default 1 (authors).
        cosine: Let the learning rate fall to 0 along a cosine over `steps` (authors).
        gradient_clip_val: Largest norm of the gradient. Default 5 (authors); `None`: any.
        validation: Share of the public data, in [0, 1), that is held out with its labels: the best model by accuracy on them
            is kept (the mean, if nothing is better), and distillation ends after `patience` steps without a better one.
            Default 0: no labels are needed.
        patience: Steps without a better score. Default 1000 (paper).
        drop_worst: Leave out teachers that are right on the held-out samples no more often than guessing (authors). Needs
            `validation`. If none is left, the means stay.
        update_statistics: Let batch statistics (BatchNorm) of students move with public data (authors). `False`:
            normalisation layers stay in eval mode.
        weighting: Weights of the means: `"samples"` (default), or `"uniform"`.

    Raises:
        ValueError: If a number is negative or 0 where it cannot be, `combine` is unknown, or `drop_worst` has no validation.

    Example:
        >>> from fedlightning.callbacks import FedDF
        >>> FedDF(steps=200, validation=0.2, drop_worst=True)  # doctest: +ELLIPSIS
        FedDF(steps=200, lr=0.001, batch_size=128, combine='logits', ...)
    """

    steps: NonNegativeInt = 1000
    lr: PositiveFloat = 1e-3
    batch_size: PositiveInt = 128
    combine: Literal["logits", "probabilities"] = "logits"
    temperature: PositiveFloat = 1.0
    cosine: bool = True
    gradient_clip_val: PositiveFloat | None = 5.0
    validation: Annotated[float, Range("[0, 1)", "A share of the public data.")] = 0.0
    patience: PositiveInt = 1000
    drop_worst: bool = False
    update_statistics: bool = True
    weighting: WeightingName | None = None

    @property
    def distils(self) -> bool:
        """Whether there are steps to take."""
        return self.steps > 0

    def ensemble(self, server: Server) -> list[Member]:
        """Return the models that came back, without the worst if asked."""
        members = [(member["model"], member["state"]) for member in server.state[self.key]["members"].values()]
        return [member for member in members if not self.drop_worst or self._beats_guessing(server, member)]

    def _beats_guessing(self, server: Server, member: Member) -> bool:
        model, entries = member
        module = server.module_with({**server.models[model], **entries}, model)
        right, classes = self.accuracy(server, module)
        return right > 1.0 / classes

    def distil(self, server: Server, student: LightningModule, loader: Any, loss: Any) -> None:
        """Take the steps with Adam."""
        server.training.fit(
            student,
            loader,
            loss,
            steps=self.steps,
            optimizer=partial(Adam, lr=self.lr),
            scheduler=partial(CosineAnnealingLR, T_max=self.steps) if self.cosine else None,
            gradient_clip_val=self.gradient_clip_val,
            validate=(lambda module: self.accuracy(server, module)[0]) if self.validation else None,
            patience=self.patience if self.validation else None,
            purpose=f"{self.key} {server.combining}",
        )
