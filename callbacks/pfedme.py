"""pFedMe."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from fedlightning.algorithm import (
    Client,
    FederatedCallback,
    Job,
    Plan,
    Server,
    Setup,
    Stage,
    State,
    Update,
    WeightingName,
    clone,
    interpolate,
    load_state,
    module_state,
    select,
)


class PFedMe(FederatedCallback):
    r"""Personal models held near a global one by Moreau envelopes; the global one follows them.

    T. Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020.

    Down: ``w``. Up: ``w_i`` (never ``theta_i``). State: ``theta_i`` at each client, the model it deploys. The objective
    is ``F_i(w) = min_theta f_i(theta) + (lam/2) ||theta - w||^2``, whose gradient is ``lam (w - theta)``.

    Client: ``w_i = theta = w``; then on every batch

    * K times ``theta <- theta - eta_p (grad f(theta) + lam (theta - w_i))``, warm from the batch before;
    * ``w_i <- w_i - eta lam (w_i - theta)``, by the module's optimizer: SGD, whose learning rate is ``eta``.

    Server: ``w <- (1 - b) w + b mean(w_i)`` on trainable parameters; buffers are averaged. ``theta`` is a model of its
    own with its own running statistics (in the published code it is an alias of ``w_i``, whose accuracy is then
    reported as personal; and the published L2 term on ``theta``, which is not in the paper, is left out).

    The training loss that the module logs is that of ``w_i``.

    Args:
        lam: strength of the pull between ``theta`` and ``w`` (authors: 15). ``eta lam < 2`` is needed.
        inner_steps: ``K`` (paper: 5).
        personal_lr: ``eta_p`` (authors: 0.09 to 0.1). ``eta_p lam < 2`` is needed.
        server_rate: ``b`` (authors: 1, sometimes 2).
        all_clients: everybody computes and updates its ``theta_i``, and only the sampled send ``w_i`` (paper); by
            default those who are not sampled rest.
        weighting: ``"uniform"`` (paper) or ``"samples"`` (authors' code).
    """

    def __init__(
        self,
        lam: float = 15.0,
        inner_steps: int = 5,
        personal_lr: float = 0.09,
        server_rate: float = 1.0,
        all_clients: bool = False,
        weighting: WeightingName = "uniform",
    ) -> None:
        if lam <= 0 or inner_steps < 1 or server_rate < 0:
            raise ValueError(
                f"PFedMe got lam={lam}, inner_steps={inner_steps}, server_rate={server_rate}. It needs lam > 0 (or w "
                "never moves), at least one inner step, and a server rate that is not negative."
            )
        if not 0.0 < personal_lr * lam < 2.0:
            raise ValueError(
                f"PFedMe got personal_lr={personal_lr} and lam={lam}: theta diverges unless 0 < personal_lr * lam < 2. "
                f" Use a personal_lr below {2 / lam:.3g}."
            )
        self.lam = lam
        self.inner_steps = inner_steps
        self.personal_lr = personal_lr
        self.server_rate = server_rate
        self.all_clients = all_clients
        self.weighting = weighting

    def claims(self, role: str) -> bool:
        """``b = 1`` is no server step, and only ``all_clients`` plans its own rounds."""
        wanted = {"server_step": self.server_rate != 1.0, "plan_round": self.all_clients}
        return super().claims(role) and wanted.get(role, True)

    def check(self, setup: Setup) -> None:
        """Refuse manual optimization and steps of ``w`` that diverge; warn where they are not plain SGD's."""
        name = type(setup.template).__name__
        if not setup.module.automatic_optimization:
            raise ValueError(f"PFedMe replaces the gradient of the step, but {name} optimizes manually. Use Ditto.")
        for optimizer in setup.optimizers:
            rate = max(float(group["lr"]) for group in optimizer.param_groups)
            if type(optimizer).__name__ != "SGD" or optimizer.defaults.get("momentum"):
                setup.warn(
                    f"PFedMe's w takes plain SGD steps; {name}'s {type(optimizer).__name__} has a memory or a scale of "
                    "its own. Use SGD without momentum."
                )
            elif rate * self.lam >= 2.0:
                raise ValueError(
                    f"PFedMe(lam={self.lam}) makes w step by lr * lam = {rate * self.lam:.3g} of its way to "
                    f"theta, and 2 or more diverges. Use a learning rate below {2 / self.lam:.3g} in {name}, or a "
                    "smaller lam."
                )

    def plan_round(self, server: Server) -> Plan:
        """Everybody computes, the sampled send."""
        sampled = set(server.participants())
        yield [Job(client, returns=None if client in sampled else ()) for client in server.clients]

    # -- client --------------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """``theta = w``: a copy, never an alias."""
        if self.client.phase.federated:
            theta = self.client.copy_module()
            theta.trainer = trainer
            self.client.scratch[self.key] = theta

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """K proximal gradient steps of ``theta`` on this batch; its running statistics see the batch once."""
        if not self.client.phase.federated:
            return
        theta, w = self.client.scratch[self.key], dict(pl_module.named_parameters())
        parameters = dict(theta.named_parameters())
        for step in range(self.inner_steps):
            _, gradients = self.client.batch_gradient(batch, theta, update_buffers=step == self.inner_steps - 1)
            for name, gradient in gradients.items():
                pull = self.lam * (parameters[name] - w[name])
                parameters[name].sub_(gradient + pull, alpha=self.personal_lr)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The gradient of the envelope: ``lam (w - theta)``."""
        if not self.client.phase.federated:
            return
        theta = dict(self.client.scratch[self.key].named_parameters())
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                parameter.grad = self.lam * (parameter - theta[name])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the trainer."""
        if self.client.phase.federated:
            self.client.scratch[self.key].trainer = None

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``theta_i``."""
        if client.steps:
            client.state[self.key] = {"theta": clone(module_state(client.scratch[self.key]), "cpu")}

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """``theta_i``; ``w`` for a client that has not trained yet."""
        module = client.copy_module()
        load_state(module, client.state.get(self.key, {}).get("theta", {}))
        return module

    # -- server --------------------------------------------------------------------------------------------------------
    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """``(1 - b) w + b mean(w_i)``."""
        names = [name for name in server.trainable if name in reduced]
        return {**reduced, **interpolate(select(reduced, names), select(old, names), self.server_rate)}
