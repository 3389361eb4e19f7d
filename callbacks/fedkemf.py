"""FedKEMF: mutual learning at the clients, fusion of the small models by ensemble distillation at the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import GLOBAL, Plan, Server, Setup, WeightingName, contributors
from fedlightning.callbacks.shared.distillation import PublicLogits, logits_of
from fedlightning.callbacks.shared.mutual import SharedPeer, divergence
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, make_init
from fedlightning.tensors import clone, module_state
from fedlightning.wrappers.pair import SHARED, JointLoss, Side, shared_of

Ensemble = Literal["max", "mean", "vote"]


@make_init
class FedKEMF(SharedPeer):
    r"""Private models teach a small knowledge network; the server distils the ensemble of these into the next one.

    Yu, Qian, Jannesari, "Resource-aware federated learning using knowledge extraction and multi-model fusion", arXiv
    2208.07978, 2022; Nguyen, Yu, Muñoz, Jannesari, "Enhancing heterogeneous federated learning with knowledge extraction and
    multi-model fusion", SC-W 2023.

    * *Client*: deep mutual learning of the private model and the knowledge network on private data:
      `CE + mutual KL(other || self)` for each, targets without gradient.
    * *Server*: the student begins as the mean of the knowledge networks that came. It learns their ensemble on public samples
      without labels: `T^2 KL(ensemble || softmax(student / T))`, by Adam. The ensemble is, class by class, the largest logit
      of any teacher (`"max"`, which the paper favours), their mean, or the class with most votes; a tie is shared equally.
    * Down: the knowledge network. Up: the client's.
    * State: the private model at each client.
    * Deployed: the private model. Stage G scores the student.

    Teachers are in eval mode; running statistics of the student move with the public samples. Where one client comes back
    there is no ensemble, and its network is the next one. With `steps=0`, plain SGD and `alpha=beta=0.5` FML does the same at
    twice the learning rate. What trains together, and how, is as in :class:`FML`; optimizers begin anew in every visit by
    default. The paper leaves open how long the server trains and with what; these are arguments.

    Args:
        shared: The knowledge network: a LightningModule with the same classes, whose `forward` gives logits. `None`: a copy
            of the client's own model, where all have one architecture.
        ensemble: `"max"` (paper), `"mean"` or `"vote"`.
        mutual: Weight of the divergences in the clients' losses (deep mutual learning: 1).
        steps: Optimizer steps of the student in a round. 0: the mean, no public data needed.
        server_lr: Learning rate of the student's Adam.
        temperature: `T` of the distillation at the server.
        batch_size: Public samples of a batch. `None`: that of the public data.
        head: Path of the layer of the private models that gives the logits. `None`: the last layer of each.
        shared_head: The same of the knowledge network.
        weighting: Weights of the mean that the student begins with: `"samples"`, `"uniform"` or `"log"`.

    Raises:
        ValueError: If `ensemble` is unknown, a number is out of range, or `shared` is not a LightningModule.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks.fedkemf import ensemble_of
        >>> teachers = torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]], [[0.0, 3.0]]])
        >>> ensemble_of(teachers, "vote"), ensemble_of(teachers, "max").argmax(1)
        (tensor([[0., 1.]]), tensor([1]))
    """

    shared: LightningModule | None = None
    ensemble: Ensemble = "max"
    mutual: NonNegativeFloat = 1.0
    steps: NonNegativeInt = 100
    server_lr: PositiveFloat = 1e-3
    temperature: PositiveFloat = 1.0
    batch_size: PositiveInt | None = None
    head: str | None = None
    shared_head: str | None = None
    weighting: WeightingName | None = None

    def compares(self) -> bool:
        """Return whether the losses compare predictions, as classes."""
        return self.mutual > 0.0 or self.steps > 0

    def joint_loss(self) -> JointLoss:
        """Return the sum of the two losses."""
        return DeepMutualLoss(self.mutual)

    def check(self, setup: Setup) -> None:
        """Refuse what :class:`SharedPeer` does, and public data that the knowledge network cannot read."""
        super().check(setup)
        if self.steps:
            shared = shared_of(setup.module)
            PublicLogits().check(self, replace(setup, module=shared, template=shared))

    def plan_round(self, server: Server) -> Plan:
        """Plan ordinary visits; when all are back, distil the ensemble into their mean."""
        updates = yield [server.job(client, keep=self.steps > 0) for client in server.participants()]
        teachers = [update.state for update in contributors(updates) if update.state]
        if self.steps == 0 or len(teachers) < 2:
            return
        yield []  # the mean
        loader = server.training.public(batch_size=self.batch_size)
        logits = torch.stack(
            [server.training.outputs(self._network(server, state), loader, logits_of) for state in teachers]
        )
        targets = ensemble_of(logits / self.temperature, self.ensemble)
        student = self._network(server, {})
        server.training.fit(
            student,
            server.training.public(
                torch.arange(len(targets)), targets=targets, batch_size=self.batch_size, shuffle=True
            ),
            self.distillation_loss,
            steps=self.steps,
            optimizer=self.optimizer,
            purpose=self.key,
        )
        student_state = {f"{SHARED}.{name}": value for name, value in clone(module_state(student)).items()}
        kept = {name: student_state[name] for name in server.shared_names()}
        server.models[GLOBAL] = {**server.model, **kept}

    def _network(self, server: Server, state: dict[str, Tensor]) -> LightningModule:
        """Return the knowledge network with the global entries, and those of a client."""
        return shared_of(server.module_with({**server.model, **state}))

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the student's optimizer."""
        return torch.optim.Adam(parameters, lr=self.server_lr)

    def distillation_loss(self, student: LightningModule, batch: Any) -> Tensor:
        """Return `T^2 KL(ensemble || softmax(student / T))`, mean over the batch."""
        samples, targets = batch
        log_probabilities = (logits_of(student, samples) / self.temperature).log_softmax(1)
        return self.temperature**2 * F.kl_div(log_probabilities, targets, reduction="batchmean")


@dataclass(frozen=True)
class DeepMutualLoss:
    """The sum of the two losses of deep mutual learning.

    Attributes:
        mutual: Weight of the divergences.
    """

    mutual: float

    def __call__(self, local: Side, shared: Side, project: nn.Module | None) -> Tensor:
        """Return `CE + mutual KL(q || p)` of the private model and the same of the shared one."""
        task = local.loss + shared.loss
        if self.mutual == 0.0:
            return task
        return task + self.mutual * (divergence(shared.logits, local.logits) + divergence(local.logits, shared.logits))


def ensemble_of(logits: Tensor, how: Ensemble) -> Tensor:
    """Return what an ensemble predicts, as probabilities `(samples, classes)`.

    Example:
        >>> import torch
        >>> same = torch.randn(1, 4, 3).expand(5, 4, 3)
        >>> [torch.allclose(ensemble_of(same, how), same[0].softmax(1)) for how in ("max", "mean")]
        [True, True]
    """
    if how == "max":
        return logits.amax(0).softmax(1)
    if how == "mean":
        return logits.mean(0).softmax(1)
    votes = F.one_hot(logits.argmax(2), logits.shape[2]).sum(0)
    first = (votes == votes.amax(1, keepdim=True)).to(logits)
    return first / first.sum(1, keepdim=True)
