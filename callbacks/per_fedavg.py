"""Per-FedAvg."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    FederatedCallback,
    Setup,
    Stage,
    State,
    WeightingName,
    probes,
    requires,
)
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, make_init
from fedlightning.tensors import add, as_reals, clone, dense, load_state, module_state


@make_init
class PerFedAvg(FederatedCallback):
    """Meta-learning: a global model that is good after one gradient step on a client's own data.

    Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic
    meta-learning approach", NeurIPS 2020.

    Every local step minimises ``f_i(w - alpha grad f_i(w))`` with three independent batches of training data:

    * ``wt = w - alpha grad f(w; D)``, plain SGD whatever the module's optimizer is. ``D`` leaves BatchNorm's statistics
      alone.
    * ``r = grad f(wt; D')``: the training loop's own batch, run at ``wt``. So the logged loss is the one after
      adaptation.
    * ``w <- w - beta (r - alpha H r)``, ``H`` the Hessian at ``w`` on ``D''``, by the module's optimizer (SGD, whose
      learning rate is ``beta``).

    ``H r`` is computed by double backward (``"exact"``), by the Hessian-free difference
    ``[grad f(w + delta r) - grad f(w - delta r)] / (2 delta)`` (``"HF"``), or left out (first order, ``"FO"``). With
    ``alpha = 0`` all three are FedAvg.

    * Down: ``w``. Up: ``w_i``. State: none.
    * Deployed: ``w - alpha grad f_i(w)`` over the client's whole training split, never on test data. The global model
      is the meta-model ``w``.

    Args:
        alpha: Inner step size. Default 0.01. Published settings lie at 0.005-0.01 (pFedMe, FedBABU).
        variant: ``"HF"`` (default: as good as exact in the paper, without double backward), ``"FO"`` or ``"exact"``.
        delta: Half-width of the Hessian-free difference. Default 1e-3 (ours).
        adaptation_steps: Number of inner steps that make the deployed model. Default 1 (paper).
        weighting: ``"uniform"`` (paper, default) or ``"samples"``.

    Raises:
        ValueError: If ``variant`` is unknown, or a number is outside its range.

    Example:
        With ``f(w) = w^2`` the Hessian is 2, so ``H r = 2 r``.

        >>> import torch
        >>> from lightning.pytorch import LightningModule
        >>> from fedlightning.callbacks.per_fedavg import hessian_times
        >>> class Square(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.tensor([3.0]))
        ...     def training_step(self, batch, batch_idx):
        ...         return self.w.square().sum()
        >>> hessian_times(Square(), batch=None, vector={"w": torch.tensor([5.0])})
        {'w': tensor([10.])}
    """

    facts = Facts(
        changes={Change.READS, Change.ELSEWHERE},
        requires=[
            requires.AutomaticOptimization("replaces the gradient of the step", "Use Ditto."),
            requires.PlainSGD("makes SGD's outer step", "Another rescales the meta-gradient.", "momentum"),
        ],
    )

    alpha: NonNegativeFloat = 0.01
    variant: Literal["HF", "FO", "exact"] = "HF"
    delta: PositiveFloat = 1e-3
    adaptation_steps: NonNegativeInt = 1
    weighting: WeightingName | None = "uniform"

    def check(self, setup: Setup) -> None:
        """Refuse the Hessian-free variant for parameters of too few digits."""
        precision = str(setup.run.trainer_arguments.get("precision") or "")
        half = precision in ("16-true", "bf16-true")
        half |= any(p.requires_grad and p.element_size() < 4 for p in setup.module.parameters())
        if self.variant == "HF" and self.alpha and half:
            raise ValueError(
                f"PerFedAvg(variant='HF') takes the difference of two gradients {2 * self.delta:g} apart, which parameters "
                "in half precision cannot resolve. Use precision='bf16-mixed' or '16-mixed', or variant='exact' or 'FO'."
            )

    # -- one step ------------------------------------------------------------------------------------------------------
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Move the module to ``wt``.

        This is done once per optimizer step: an accumulated step sees all its batches there.
        """
        client = self.client
        if not client.phase.federated or self.alpha == 0.0 or self.key in client.scratch:
            return
        _, gradient = client.batch_gradient(client.next_batch("inner"))
        client.scratch[self.key] = self._shifted(gradient, -self.alpha)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Move the module back to ``w``, exactly, and set the gradient to ``r - alpha H r``."""
        w = self.client.scratch.pop(self.key, None)
        if w is None:
            return
        load_state(pl_module, w)
        parameters = {name: p for name, p in pl_module.named_parameters() if p.grad is not None}
        r = {name: dense(p.grad.detach()) for name, p in parameters.items() if p.grad is not None}
        for name, curvature in (
            self._hessian_times(r) if r else {}
        ).items():  # without r the step has skipped its batch
            if name in r:
                parameters[name].grad = r[name] - self.alpha * curvature

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the module back to ``w`` if training stopped between a batch and its step."""
        load_state(pl_module, self.client.scratch.pop(self.key, {}))

    def _shifted(self, direction: State, size: float) -> State:
        """Move the module's parameters by ``size * direction``, and return what they were."""
        before = clone({name: p for name, p in self.client.module.named_parameters() if name in direction})
        load_state(self.client.module, add(before, direction, alpha=size))
        return before

    def _hessian_times(self, r: State) -> State:
        """Return ``H r`` on ``D''``; nothing under first order."""
        client = self.client
        if self.variant == "FO":
            return {}
        batch = client.next_batch("hessian")
        if self.variant == "exact":
            with torch.enable_grad(), client.probing(client.module):
                product = hessian_times(client.module, batch, r, client.loss_scale)
        else:
            gradients = []
            for sign in (1.0, -1.0):  # the same dropout on both sides
                w = self._shifted(r, sign * self.delta)
                gradients.append(client.batch_gradient(batch, repeat=sign < 0, full_precision=True)[1])
                load_state(client.module, w)
            product = {name: (plus - gradients[1][name]) / (2 * self.delta) for name, plus in gradients[0].items()}
        overflow = client.loss_scale != 1.0 and not all(bool(torch.isfinite(value).all()) for value in product.values())
        return {} if overflow else product  # the scaler has judged r already: this step goes on in first order

    # -- what is deployed ----------------------------------------------------------------------------------------------
    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the model at ``w - alpha grad f_i(w)``, on training data."""
        module = client.copy_module()
        for _ in range(self.adaptation_steps if self.alpha else 0):
            w = clone(module_state(module))
            try:
                gradient = client.gradient(w, split="train")
            except ValueError:  # a batch of one sample under batch normalisation: there is no gradient to step along
                break
            load_state(module, {n: w[n] - self.alpha * g.to(w[n]) for n, g in gradient.items()})
        return module


def hessian_times(module: LightningModule, batch: Any, vector: State, scale: float = 1.0) -> State:
    """Return ``H vector`` of the batch's training loss, by double backward."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad and name in vector}
    loss = probes.training_loss(module, batch) * scale
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
    pairs = [(g, vector[n]) for n, g in zip(parameters, gradients, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return {}  # a loss that is linear in every parameter
    inner = torch.stack([(as_reals(gradient) * as_reals(along)).sum() for gradient, along in pairs]).sum()
    products = torch.autograd.grad(inner, list(parameters.values()), allow_unused=True)
    return {name: p / scale for name, p in zip(parameters, products, strict=True) if p is not None}
