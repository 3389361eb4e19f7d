"""FML: federated mutual learning."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import Facts, Setup, WeightingName
from fedlightning.callbacks.shared.mutual import SharedPeer, divergence
from fedlightning.ranges import Share, make_init
from fedlightning.wrappers.pair import JointLoss, Side


@make_init
class FML(SharedPeer):
    """A private model of any architecture and a small shared one learn from each other; only the shared one travels.

    Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated mutual learning", arXiv 2006.16765, 2020.

    On every batch, with the private model's prediction `p` and the shared ("meme") model's `q`, targets without gradient and
    KL a mean over the batch:

    * private: `alpha CE + (1 - alpha) KL(q || p)`
    * shared: `beta CE + (1 - beta) KL(p || q)`

    `CE` is whatever loss the `training_step` of each model gives.

    * Down: the shared model. Up: the client's, averaged uniformly.
    * State: the private model at each client.
    * Deployed: the private model. Stage G scores the shared one, which is also a global model for those who never trained.

    `alpha = beta = 1` is local training of the private models beside FedAvg (uniform) of the shared one. Both models take one
    optimizer step together, with the parameter groups that each configures; gradients are clipped apart. The private model's
    optimizer goes on from visit to visit and the shared one's begins anew (paper), unless the trainer is told
    `optimizer_state="reset"`, which is faster. What is logged in training is the private model's. The authors' main script
    has fork and merge commented out, and HtFLlib detaches no target and divides KL by the number of classes, too; neither is
    done here.

    With plain SGD the private model takes steps of `alpha` times the learning rate on its task, and a warning says so.
    Validation accuracy on digits (a CNN) and FashionMNIST (an MLP) over ten clients by Dirichlet(0.5), ten rounds, three
    seeds: 0.704 and 0.803 at the defaults, 0.779 and 0.758 with twice the private learning rate, 0.758 and 0.801 with
    `alpha=0.8` (Local: 0.787 and 0.797).

    Args:
        shared: The LightningModule that all clients share, with the same classes as theirs. `None`: a copy of the client's
            own, where all have one architecture; the two then start equal.
        alpha: Share of the task's loss for the private model, in [0, 1] (paper: 0.5).
        beta: Share of the task's loss for the shared model, in [0, 1] (paper: 0.5).
        detach: Stop the gradient at the targets (authors' code). `False`: HtFLlib.
        head: Path of the layer of the private models that gives the logits. `None`: the last layer of each.
        shared_head: The same of the shared model.
        weighting: `"uniform"` (paper), `"samples"` or `"log"`.

    Raises:
        ValueError: If `alpha` or `beta` is outside [0, 1], or `shared` is not a LightningModule.

    Example:
        >>> from fedlightning.callbacks import FML
        >>> from fedlightning.models import MLP, Classifier
        >>> FML(shared=Classifier(MLP(64, [16], 10), num_classes=10)).alpha
        0.5
    """

    @property
    def facts(self) -> Facts:
        """Optimizers go on, as the private model does."""
        return super().facts.extend(optimizer_state="keep")

    shared: LightningModule | None = None
    alpha: Share = 0.5
    beta: Share = 0.5
    detach: bool = True
    head: str | None = None
    shared_head: str | None = None
    weighting: WeightingName | None = "uniform"

    def check(self, setup: Setup) -> None:
        """Refuse what :class:`SharedPeer` does; advise on the private model's learning rate under SGD."""
        super().check(setup)
        if 0 < self.alpha < 1 and any(type(optimizer).__name__ == "SGD" for optimizer in setup.optimizers):
            setup.warn(
                f"FML(alpha={self.alpha}) leaves the private model {self.alpha:g} of its task's gradient, and SGD steps as "
                "much shorter on the task, so that private models may stay behind local training. Then raise alpha, or give "
                f"the module {1 / self.alpha:.3g} times the learning rate and shared=... one with the usual rate."
            )

    def compares(self) -> bool:
        """Return whether the losses compare predictions, as classes."""
        return self.alpha < 1.0 or self.beta < 1.0

    def joint_loss(self) -> JointLoss:
        """Return the sum of the two losses."""
        return MutualLoss(self.alpha, self.beta, self.detach)


@dataclass(frozen=True)
class MutualLoss:
    """The sum of the two losses of mutual learning.

    Attributes:
        alpha: Share of the task's loss for the private model.
        beta: Share of the task's loss for the shared model.
        detach: Stop the gradient at the targets.

    Example:
        >>> import torch
        >>> side = Side(torch.tensor(0.5), torch.tensor([[2.0, -1.0]]), torch.zeros(1, 3))
        >>> MutualLoss(alpha=0.5, beta=0.25, detach=True)(side, side, None)
        tensor(0.3750)
    """

    alpha: float
    beta: float
    detach: bool

    def __call__(self, local: Side, shared: Side, project: nn.Module | None) -> Tensor:
        """Return `alpha CE + (1 - alpha) KL(q || p) + beta CE + (1 - beta) KL(p || q)`."""
        return self.part(local, shared, self.alpha) + self.part(shared, local, self.beta)

    def part(self, learner: Side, teacher: Side, share: float) -> Tensor:
        """Return the loss of one of the two models."""
        if share == 1.0:  # a target that is not finite must not matter
            return learner.loss
        return share * learner.loss + (1.0 - share) * divergence(teacher.logits, learner.logits, self.detach)
