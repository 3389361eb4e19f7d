"""pFedMe."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    FederatedCallback,
    Job,
    Plan,
    Server,
    Stage,
    State,
    Update,
    WeightingName,
    requires,
)
from fedlightning.callbacks.shared.steps import step_to_mean
from fedlightning.ranges import NonNegativeFloat, PositiveInt, Range, make_init
from fedlightning.tensors import clone, load_state, module_state


@make_init
class pFedMe(FederatedCallback):
    """Personal models held near a global one by Moreau envelopes; the global one follows them.

    T. Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020.

    The objective is ``F_i(w) = min_theta f_i(theta) + (lam/2) ||theta - w||^2``, whose gradient is ``lam (w - theta)``.

    * Client: ``w_i = theta = w``; then on every batch K times
      ``theta <- theta - eta_p (grad f(theta) + lam (theta - w_i))``, from the ``theta`` of the batch before, and once
      ``w_i <- w_i - eta lam (w_i - theta)``, by the module's optimizer: SGD, whose learning rate is ``eta``.
    * Server: ``w <- (1 - b) w + b mean(w_i)`` on trainable parameters; buffers are averaged.
    * Down: ``w``. Up: ``w_i``, never ``theta_i``.
    * State: ``theta_i`` at each client.
    * Deployed: ``theta_i``. The global model is ``w``.

    ``theta`` is a model of its own with its own running statistics. In the published code it is an alias of ``w_i``,
    whose accuracy is then reported as personal. The published L2 term on ``theta``, which is not in the paper, is left
    out. The training loss that the module logs is that of ``w_i``.

    Args:
        lam: Strength of the pull between ``theta`` and ``w``. Default 2: what the league chose, and better on other data
            than the authors' 15, which allows small ``eta`` only. ``eta lam < 2`` is needed.
        inner_steps: ``K``. Default 5 (paper).
        personal_lr: ``eta_p``. Default 0.05 (the league; authors: 0.09 to 0.1). ``eta_p lam < 2`` is needed.
        server_lr: Server learning rate ``b``. Default 1 (authors, who sometimes use 2).
        all_clients: Every client computes and updates its ``theta_i``, and only the sampled send ``w_i`` (paper).
            Default: those who are not sampled rest.
        weighting: ``"uniform"`` (paper, default) or ``"samples"`` (authors' code).

    Raises:
        ValueError: If an argument is outside its range, or ``personal_lr * lam`` is 2 or more.

    Example:
        The clients' mean is 1 ahead of the server; with ``b = 2`` the server goes twice as far.

        >>> import torch
        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import pFedMe
        >>> server, w, mean = SimpleNamespace(trainable=["w"]), {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> pFedMe(server_lr=2.0).server_step(server, w, mean)["w"]
        tensor([2.])
    """

    facts = Facts(
        keeps=True,
        changes={Change.READS, Change.ELSEWHERE},
        requires=[
            requires.AutomaticOptimization("replaces the gradient of the step", "Use Ditto."),
            requires.PlainSGD("takes plain SGD steps of w", "Use SGD without momentum."),
            requires.NoOvershoot("makes w step by lr * lam", of="lam"),
        ],
    )

    lam: Annotated[float, Range("(0, inf)", "With 0 w would never move.")] = 2.0
    inner_steps: PositiveInt = 5
    personal_lr: float = 0.05
    server_lr: NonNegativeFloat = 1.0
    all_clients: bool = False
    weighting: WeightingName | None = "uniform"

    def __post_init__(self) -> None:
        if not 0.0 < self.personal_lr * self.lam < 2.0:
            raise ValueError(
                f"pFedMe got personal_lr={self.personal_lr} and lam={self.lam}: theta diverges unless 0 < personal_lr * lam "
                f"< 2. Use a personal_lr below {2 / self.lam:.3g}."
            )

    @property
    def key(self) -> str:
        return "PFedMe" if type(self) is pFedMe else super().key  # names its state in saved runs

    def claims(self, role: str) -> bool:
        """Decline the server step where ``b = 1``, and the plan of the round unless ``all_clients`` is set."""
        answered = {"server_step": self.server_lr != 1.0, "plan_round": self.all_clients}
        return super().claims(role) and answered.get(role, True)

    def plan_round(self, server: Server) -> Plan:
        """Plan a visit to every client, of whom only the sampled send ``w_i``."""
        sampled = set(server.participants())
        yield [Job(client, returns=None if client in sampled else ()) for client in server.clients]

    # -- client --------------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set ``theta = w``: a copy, never an alias."""
        if self.client.phase.federated:
            theta = self.client.copy_module()
            theta.trainer = trainer
            self.client.scratch[self.key] = theta
            self.client.scratch[f"{self.key} window"] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Let ``theta`` train on this batch. Where gradients are accumulated it waits for the batches of the step."""
        if self.client.phase.federated:
            window: list[Any] = self.client.scratch[f"{self.key} window"]
            window.append(batch)
            if trainer.accumulate_grad_batches == 1:
                self._inner_steps(pl_module, window)

    @torch.no_grad()
    def _inner_steps(self, pl_module: LightningModule, window: list[Any]) -> None:
        """Take K proximal gradient steps of ``theta`` on the batches of one step, which its running statistics see once."""
        theta, w = self.client.scratch[self.key], dict(pl_module.named_parameters())
        parameters = dict(theta.named_parameters())
        for step in range(self.inner_steps):
            last = step == self.inner_steps - 1
            parts = [self.client.batch_gradient(batch, theta, update_buffers=last)[1] for batch in window]
            for name in parts[0]:
                gradient = (
                    sum(gradients[name] for gradients in parts) / len(parts) if len(parts) > 1 else parts[0][name]
                )
                pull = self.lam * (parameters[name] - w[name])
                parameters[name].sub_(gradient + pull, alpha=self.personal_lr)
        window.clear()

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Set the gradient of ``w_i`` to that of the envelope, ``lam (w_i - theta)``."""
        if not self.client.phase.federated:
            return
        if window := self.client.scratch[f"{self.key} window"]:
            self._inner_steps(pl_module, window)
        theta = dict(self.client.scratch[self.key].named_parameters())
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                parameter.grad = self.lam * (parameter - theta[name])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach ``theta`` from the trainer."""
        if self.client.phase.federated:
            self.client.scratch[self.key].trainer = None

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``theta_i``."""
        if client.contributed:
            client.state[self.key] = {"theta": clone(module_state(client.scratch[self.key]), "cpu")}

    # -- server --------------------------------------------------------------------------------------------------------
    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Return ``(1 - b) w + b mean(w_i)`` on trainable parameters; every other entry is the clients' mean."""
        return step_to_mean(server, old, reduced, self.server_lr)

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return ``theta_i``, or ``w`` for a client that has not trained yet."""
        module = client.copy_module()
        load_state(module, client.state.get(self.key, {}).get("theta", {}))
        return module
