"""What methods share in which a client has a private model and beside it a small one that all clients have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import NEWCOMER, Change, Client, Facts, Need, Server, ServerModels, Setup, Stage, probes
from fedlightning.callbacks.shared.representations import looked_at, other_task, targets_in
from fedlightning.wrappers import unmix
from fedlightning.wrappers.pair import JointLoss, pair, shared_entries, shared_of, sides_of

TWO_MODELS = Need(
    "lets a client train two models, of which only the shared one travels",
    (
        *(Change.START, "plan_round", "model_of", "shared_names", "wrap_module", "on_build", "on_receive"),
        *("local_phases", "training_loss", "feature_taps", "reduce", "final_jobs"),
    ),
)
"""Nothing else may decide which model travels, what a client trains, and on which loss."""


class SharedPeer(ServerModels):
    """Base of methods in which only a small model travels, which trains beside each client's private one.

    The client's LightningModule gets the shared one as `shared_model` (:mod:`fedlightning.wrappers.pair`). Names below that
    travel, all others stay. Stage G scores the shared model, stages L1 and L2 the private ones, which clients deploy. Clients
    may have private models of differing architecture.

    A subclass says which loss the two minimise together: :meth:`joint_loss`. Subclasses have the arguments `shared`, `head`
    and `shared_head`.

    Example:
        >>> from fedlightning.callbacks import FML
        >>> from fedlightning.models import MLP, Classifier
        >>> large, small = (Classifier(MLP(4, [width], 2), num_classes=2) for width in (9, 3))
        >>> method = FML(shared=small)
        >>> method.shared_names(None, method.wrap_module(large, "server"))[0]
        'shared_model.net.fc1.weight'
    """

    @property
    def facts(self) -> Facts:
        """A client keeps its private model, of whatever architecture."""
        return Facts(needs=[TWO_MODELS], keeps=True, mixes_architectures=True)

    shared: LightningModule | None
    head: str | None
    shared_head: str | None

    def __post_init__(self) -> None:
        """Refuse a shared model that cannot train itself."""
        if self.shared is not None and not isinstance(self.shared, LightningModule):
            raise ValueError(
                f"{self.key} got shared={type(self.shared).__name__}, which cannot train itself. Give a LightningModule, "
                "such as fedlightning.models.Classifier around the network."
            )

    def joint_loss(self) -> JointLoss:
        """Return the function that makes the loss of a step, without reference to the callback."""
        raise NotImplementedError

    def compares(self) -> bool:
        """Return whether the losses compare predictions, as classes."""
        return True

    def uses_projection(self) -> bool:
        """Return whether the joint loss maps the shared model's representation to the width of the private one's."""
        return False

    # -- before training -----------------------------------------------------------------------------------------------
    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Put the shared model beside the private one."""
        heads = self.head, self.shared_head
        return pair(module, self.shared, self.joint_loss(), *heads, project=self.uses_projection())

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of the shared model."""
        if self.shared is None and server is not None and server.is_mixed:
            raise ValueError(
                f"{self.key} needs shared=...: without it every client shares a copy of its own model, and here these have "
                f"several architectures ({', '.join(server.models.architectures)}). Give the LightningModule that all are to "
                "share."
            )
        return shared_entries(module)

    def check(self, setup: Setup) -> None:
        """Refuse two models that cannot take a step together."""
        unheard = sorted(set(UNHEARD) & set(_written(shared_of(setup.module))))
        if self.shared is not None and unheard:
            setup.warn(
                f"{self.key} does not call {', '.join(unheard)} of the shared {type(self.shared).__name__}: in training, "
                "Lightning's hooks are those of the client's own module."
            )
        batch = setup.data.first_batch()
        if batch is None:
            return
        failure = f"{self.key} cannot train {type(setup.template).__name__} and the shared model together"
        with looked_at(setup.module, failure) as module:
            batch = probes.move_batch(module, batch)
            classes = sides_of(module, batch)[0].logits.shape[1]
            probes.training_loss(module, batch)
        if self.compares() and (why := other_task(targets_in(batch), classes)):
            raise ValueError(
                f"{self.key} compares the two models' predictions by softmax, one class a sample, but {why}. Use it for "
                "classification, or another method."
            )

    # -- training ------------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget what a kept optimizer knows of the shared model, which is another one in every round."""
        if self.client.keeps_optimizers:
            for optimizer in trainer.optimizers:
                for parameter in shared_of(pl_module).parameters():
                    optimizer.state.pop(parameter, None)

    # -- deployed ------------------------------------------------------------------------------------------------------
    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the shared model; `None` where a part of it stays with the clients (`float_buffers="local"`)."""
        if set(shared_entries(server.module)) - set(server.shared_names()):
            return None
        return shared_of(server.module_with(server.model))

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the private model; for a client that joins, the shared one until the private one is better.

        A client that joins a fitted federation has a private model that began at random, and a shared one that many have
        trained. Which of them it deploys is decided by their own losses on its validation data; without any, the shared one.
        """
        both = client.copy_module()
        if client.message.tag == NEWCOMER and not self._private_is_better(client, both):
            return shared_of(both)
        return unmix(both)

    def _private_is_better(self, client: Client, both: LightningModule) -> bool:
        """Return True if the private model has trained and has the lower loss on the client's validation data."""
        loader = client.loader("val") if client.contributed or client.record.visits else None
        if not loader:
            return False

        def losses(module: LightningModule, batch: Any) -> Tensor:
            own_side, shared = sides_of(module, batch)
            return torch.stack([own_side.loss, shared.loss]).double().expand(len(own_side.logits), 2)

        own_loss, shared = client.outputs(loader, losses, both).mean(0).tolist()
        return bool(own_loss < shared)


UNHEARD = (
    *("on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start"),
    *(
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
    ),
    *("optimizer_step", "configure_gradient_clipping"),
)
"""Hooks in a fit that Lightning calls for the client's module only."""


def _written(module: LightningModule) -> list[str]:
    """Return the methods that a module's class has of its own."""
    kind = type(module)
    return [name for name in UNHEARD if getattr(kind, name, None) is not getattr(LightningModule, name)]


def divergence(target: Tensor, logits: Tensor, detach: bool = True) -> Tensor:
    """Return `KL( softmax(target) || softmax(logits) )`, mean over the batch ("batchmean").

    Example:
        >>> logits = torch.tensor([[2.0, -1.0]])
        >>> float(divergence(logits, logits)), round(float(divergence(logits, -logits)), 3)
        (0.0, 2.715)
    """
    target = target.detach() if detach else target
    return F.kl_div(logits.log_softmax(1), target.log_softmax(1), reduction="batchmean", log_target=True)
