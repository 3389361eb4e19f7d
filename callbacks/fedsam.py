"""FedSAM and FedASAM."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from fedlightning.algorithm import Change, Facts, FederatedCallback, Need, Setup, State, WeightingName, probes, requires
from fedlightning.ranges import PositiveFloat, Range, make_init, needs
from fedlightning.tensors import as_reals, clone, dense, load_state, narrow

MIN_LENGTH = 1e-16
"""What keeps a gradient of length 0 from dividing by 0 (the authors' code)."""


@needs("eta", "adaptive", why="plain FedSAM has no T. Set adaptive=True, or leave eta out.")
@make_init
class FedSAM(FederatedCallback):
    """Clients look for flat minima: every step has the gradient of the worst point near the model.

    Qu, Li, Duan, Liu, Tang, Lu, "Generalized federated learning via sharpness aware minimization", ICML 2022; Caldarola,
    Caputo, Ciccone, "Improving generalization in federated learning by seeking flat minima", ECCV 2022, whose FedASAM is
    ``adaptive=True``.

    * Client, every step from ``y``: ``g = grad f(y)``, ``e = rho g / ||g||``, and the optimizer steps from ``y`` with
      ``gs = grad f(y + e)``, on the same batch with the same dropout. The norm is over all parameters that train.
    * FedASAM: ``e = rho T^2 g / ||T g||`` with ``T = |y| + eta`` for weights and 1 for other parameters, so that ``e``
      does not depend on the scale of the weights.
    * Server: as in FedAvg. Down: ``w``. Up: ``w_i``. State: none.
    * Deployed: the global model ``w``.

    A step costs two forward and two backward passes, and counts as one. Terms of other callbacks in the loss belong to
    ``f``; what they add to gradients is added to ``gs``, which is clipped then. Fits that another method has beside the
    federated one (Ditto's personal model) step as usual. Accumulated batches make one ``g`` and one ``gs``. The second
    pass leaves running statistics, attributes and logged values alone. A step whose ``g`` is not finite is left as it is;
    under fp16 one whose ``gs`` alone is not goes on with ``g``, since the scaler has judged that.

    Args:
        rho: Length of the perturbation ``e``. Default 0.1 (authors, CIFAR-10; they use 0.7 with `adaptive`). 0 is FedAvg.
        adaptive: Scale the perturbation with the weights (FedASAM).
        eta: What is added to ``|y|`` in ``T``. Default 0.2 (authors).
        weighting: ``"samples"`` (default) or ``"uniform"``.

    Raises:
        ValueError: If ``rho`` is negative or ``eta`` is not positive.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks import FedSAM
        >>> y, g = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
        >>> FedSAM(rho=0.05).perturbation(y, g)
        {'w': tensor([0.0300, 0.0400])}
    """

    rank = 1  # others measure the gradient at y before it is replaced
    facts = Facts(
        changes={Change.ELSEWHERE},
        needs=[Need("takes the gradient of a step near the parameters that step", (Change.ELSEWHERE,))],
        requires=[requires.AutomaticOptimization("replaces the gradient of the step", when="rho")],
        mixes_architectures=True,
    )

    rho: Annotated[float, Range("[0, inf)", "0 is FedAvg.")] = 0.1
    adaptive: bool = False
    eta: PositiveFloat = 0.2
    weighting: WeightingName | None = None

    def check(self, setup: Setup) -> None:
        """Warn of steps that go on from one another, and of gradients that are changed after the backward pass."""
        if self.rho > 0.0 and _goes_on(setup):
            setup.warn(
                f"A training step of {type(setup.template).__name__} goes on from what the one before has left (a hidden "
                "state, a queue), and FedSAM's second pass through a batch from what the first has left: its gradient is "
                "of another loss. Let steps begin anew, or leave FedSAM out."
            )
        if self.rho > 0.0 and setup.first_step().clips == "on_after_backward":
            setup.warn(
                f"{type(setup.template).__name__}.on_after_backward changes gradients of its own backward pass, and FedSAM "
                "steps with those of a second one. Move it to on_before_optimizer_step or configure_gradient_clipping."
            )

    def perturbation(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> State:
        """Return ``e``, by the names of the gradients, in float32 or wider."""
        scaled, factors = {}, {}
        for name, gradient in gradients.items():
            wide = torch.promote_types(gradient.dtype, torch.float32)
            weighs = self.adaptive and name.rpartition(".")[2] == "weight"
            factors[name] = as_reals(parameters[name].detach().to(wide)).abs() + self.eta if weighs else 1.0
            scaled[name] = factors[name] * as_reals(gradient.detach().to(wide))
        if not scaled:
            return {}
        norms = [torch.linalg.vector_norm(value) for value in scaled.values()]
        length = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms])) + MIN_LENGTH
        return {name: self.rho * factors[name] * value / length.to(value.device) for name, value in scaled.items()}

    # -- one step ------------------------------------------------------------------------------------------------------
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the batch, and the state of the random generators that its first pass begins with."""
        client = self.client
        if self.rho == 0.0 or not client.phase.federated:
            return
        passes: list[_Pass] = client.scratch.setdefault(self.key, [])
        if batch_idx % trainer.accumulate_grad_batches == 0:
            passes.clear()
        passes.append(_Pass(batch, batch_idx, _replay(pl_module.device)))

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Set the gradient to ``gs``, taken at ``y + e``; the parameters are ``y`` again afterwards, exactly."""
        if not self.client.scratch.get(self.key):
            return
        parameters = {name: p for name, p in pl_module.named_parameters() if p.grad is not None}
        if not parameters:  # the step has skipped the batch
            return
        e = self.perturbation(parameters, {name: dense(p.grad) for name, p in parameters.items() if p.grad is not None})
        if not _finite(e):
            return
        y = clone(parameters)
        load_state(pl_module, {name: narrow(as_reals(y[name]) + value, y[name]) for name, value in e.items()})
        try:
            gs = self._second_gradient(trainer, pl_module, list(parameters))
        finally:
            load_state(pl_module, y)
        if self.client.loss_scale != 1.0 and not _finite(gs):
            return
        for name, parameter in parameters.items():
            parameter.grad = gs[name].to(parameter.dtype)

    def _second_gradient(self, trainer: Trainer, module: LightningModule, names: list[str]) -> State:
        """Return the mean gradient of the step's batches at the present parameters, unscaled."""
        client, parameters = self.client, dict(module.named_parameters())
        chosen = [parameters[name] for name in names]
        total = {name: torch.zeros_like(parameter) for name, parameter in zip(names, chosen, strict=True)}
        factor = client.loss_scale
        for step in client.scratch[self.key]:
            with torch.enable_grad(), client.probing(module):
                step.replay()
                try:
                    loss = probes.training_loss(module, step.batch, step.batch_idx)
                except probes.NoLossError:  # of several accumulated ones, one that the first pass has skipped as well
                    continue
                loss = loss * factor / trainer.accumulate_grad_batches
                gradients = torch.autograd.grad(loss, chosen, allow_unused=True)
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    total[name] = total[name] + (gradient / factor if factor != 1.0 else gradient)
        if trainer.world_size == 1:
            return total
        return {name: trainer.strategy.reduce(value, reduce_op="mean") for name, value in total.items()}


def _goes_on(setup: Setup) -> bool:
    """Return whether the same step on the same batch with the same draws gives another loss the second time."""
    batch = setup.data.first_batch()
    with suppress(Exception):  # of the user's code: a step that fails is refused where all steps are tried
        return batch is not None and not probes.repeats(setup.module, batch)
    return False


class _Pass(NamedTuple):
    """A batch of the present step, its index, and what sets the random generators to where its first pass began."""

    batch: Any
    batch_idx: int
    replay: Callable[[], None]


def _replay(device: torch.device) -> Callable[[], None]:
    """Return a function that sets the global random generators to their present state."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def replay() -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

    return replay


def _finite(state: State) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state.values())
