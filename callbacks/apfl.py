"""APFL: the callback, and its update rule as three functions (`mix`, `alpha_slope`, `next_alpha`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from fedlightning.algorithm import (
    NEWCOMER,
    Change,
    Client,
    Facts,
    Need,
    Setup,
    Stackable,
    Stage,
    State,
    Update,
    WeightingName,
    probes,
)
from fedlightning.callbacks.shared.second_model import SecondModel, refuse_closures
from fedlightning.ranges import Instance, NonNegativeFloat, Share, make_init, needs
from fedlightning.tensors import clone, entry_kinds, interpolate, is_same, load_state, module_state, widen
from fedlightning.wrappers import mix_logits, personal_gradients, uses_forward
from fedlightning.wrappers.follow import follow

if TYPE_CHECKING:
    from fedlightning.callbacks.apfl_stacked import StackedMixtures


class ParameterMixture(SecondModel):
    """APFL's steps on `v` and `a` for one client, with mixed parameters.

    `v` lives in a twin of the client's module. Its parameters are `vbar` while a gradient is taken.

    Args:
        client: The client, whose state holds `v` and `a` from its last visit.
        options: The callback with its hyper-parameters.

    Attributes:
        alpha: The share `a`.
        new_alpha: The share from the next step on; `None` if it stays.
        moves_alpha: Whether `a` still has to move in this round.
        twin: The module that holds `v`.
        gradients: `a grad f(vbar)` by name, summed over the batches of the present step.
    """

    def __init__(self, client: Client, options: APFL) -> None:
        self.client, self.options = client, options
        super().__init__(client, options.key, self.fresh())
        self.alpha = float(self.saved.get("alpha", options.alpha))
        self.new_alpha: float | None = None
        self.moves_alpha = options.adaptive

    def fresh(self) -> LightningModule:
        """Return a new local model: `v_i = w^0`."""
        return self.client.initial_module()

    def gradients_of(self, batch: Any, batch_idx: int) -> State:
        """Return this batch's `a grad f(vbar)`; on the first batch of the round, compute the next `a`."""
        if self.alpha == 0.0 and not self.moves_alpha:
            return {}  # v does not move, and neither will a in this visit
        if self.options.personal_model is None:
            follow(self.module, self.twin)
        gradients, slope = self.mixture_gradient(batch, batch_idx)
        slope = self.trainer.strategy.reduce(slope, reduce_op="mean")
        if self.moves_alpha and bool(torch.isfinite(slope)):
            lr = self.options.alpha_lr
            lr = float(self.trainer.optimizers[0].param_groups[0]["lr"]) if lr is None else lr
            self.new_alpha = next_alpha(self.alpha, float(slope), lr, self.options.alpha_decay)
            self.moves_alpha = False
        return gradients

    def mixture_gradient(self, batch: Any, batch_idx: int) -> tuple[State, Tensor]:
        """Return `a grad f(vbar)` by name, and `df/da = <v - w, grad f(vbar)>`."""
        w = dict(self.module.named_parameters())
        v = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.copy_(mix(v[name], w[name], self.alpha))
        try:
            _, at_vbar = self.client.batch_gradient(batch, self.twin, update_buffers=True, batch_idx=batch_idx)
        finally:  # also where the step skips the batch
            for name, parameter in self.parameters.items():
                parameter.copy_(v[name])
        slope = alpha_slope(v, w, at_vbar) if at_vbar else torch.zeros((), device=self.module.device)
        return {name: self.alpha * gradient for name, gradient in at_vbar.items()}, slope

    def step(self) -> None:
        """Do `v <- v - eta a grad f(vbar)` right after the step of `w`, then move `a`; `v` stays where `a` is 0."""
        if self.alpha == 0.0:
            self.gradients = {}
        super().step()
        if self.new_alpha is not None:
            self.alpha, self.new_alpha = self.new_alpha, None

    def state(self) -> dict[str, Any]:
        """Return what the client keeps: `v`, `alpha` and, where optimizers go on, the optimizer's state."""
        kept = super().state()
        return {"v": kept["v"], "alpha": self.alpha, **kept}

    def deployed(self, module: LightningModule) -> LightningModule:
        """Put `vbar` into `module`, which holds `w`, and what else training `v` has moved; nothing changes at `a = 0`."""
        if self.alpha == 0.0:
            return module
        w, v = module_state(module), module_state(self.twin)
        kinds = entry_kinds(module)
        trainable = [name for name, kind in kinds.items() if kind == "trainable"]
        moved = [name for name, kind in kinds.items() if kind != "trainable" and not is_same(w[name], v[name])]
        mixed = interpolate({n: v[n] for n in trainable}, {n: w[n] for n in trainable}, self.alpha)
        load_state(module, {**clone(mixed), **{name: v[name] for name in moved}})
        return module


class LogitMixture(ParameterMixture):
    """APFL's steps on `v` and `a` for one client, with mixed outputs `h = a h_v + (1 - a) h_w`.

    `v` is a network of its own beside `w`. The gradient of the mixed output's loss already carries the factor `a`.
    """

    def fresh(self) -> LightningModule:
        """Return a copy of the given personal model, or the federation's initial one."""
        personal_model = self.options.personal_model
        if personal_model is None:
            return self.client.initial_module()
        return copy.deepcopy(personal_model).to(next(self.client.module.parameters()).dtype)

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Put `v` beside a view of `w`."""
        super().start(trainer, module)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        kept = self.saved.get("rates") if self.client.keeps_optimizers else None
        self.rates: list[float] = kept or [trainer.optimizers[0].param_groups[0]["lr"], *rates]
        self.view = mix_logits(self.client.copy_module(), self.twin, self.alpha)
        self.view.trainer = trainer
        w = dict(module.named_parameters())
        for name, parameter in self.view.named_parameters():
            if name in w:
                parameter.data = w[name].data  # the view follows w as its optimizer moves it in place

    def stop(self) -> None:
        """Let go of the trainer."""
        super().stop()
        self.view.trainer = None

    def mixture_gradient(self, batch: Any, batch_idx: int) -> tuple[State, Tensor]:
        """Return `df(h)/dv` by name, and `df/da = <df/dh, h_v - h_w>`."""
        follow(self.module, self.view)
        self.view.get_buffer("personal_alpha").fill_(self.alpha)
        scale = self.client.loss_scale
        with torch.enable_grad(), self.client.probing(self.view, update_buffers=True):
            gradients, slope, _ = personal_gradients(
                self.view, lambda: scale * probes.training_loss(self.view, batch, batch_idx)
            )
        return {name: gradient / scale for name, gradient in gradients.items()}, slope / scale

    def follow_schedule(self, main: Optimizer) -> None:
        """Take over `w`'s learning rates; another personal model keeps its own and takes their relative schedule."""
        if self.options.personal_model is None:
            return super().follow_schedule(main)
        first, *personal_rates = self.rates
        factor = main.param_groups[0]["lr"] / first if first else 1.0
        for group, lr in zip(self.optimizer.param_groups, personal_rates, strict=True):
            group["lr"] = lr * factor
        return None

    def state(self) -> dict[str, Any]:
        """Return what the client keeps; where optimizers go on, also the learning rates that both began with."""
        return {**super().state(), **({"rates": self.rates} if self.client.keeps_optimizers else {})}

    def deployed(self, module: LightningModule) -> LightningModule:
        """Let the `forward` of `module`, which holds `w`, return the mixture."""
        return mix_logits(module, self.twin, self.alpha)


@needs("personal_model", "mix", value="logits", why="parameters of two models do not mix. Set mix='logits'.")
@make_init
class APFL(Stackable):
    r"""Adaptive personalized federated learning: each client deploys a mixture of a local and the global model.

    Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020.

    Down: `w`. Up: `w_i`. State: `v_i` (from `w^0`) and `a_i` at each client. With `vbar = a v + (1 - a) w`, on every
    batch:

    * `w <- w - eta grad f(w)`. This is exactly FedAvg: the server's trajectory is the same for every `a`.
    * `v <- v - eta a grad f(vbar)`, by a second optimizer as the module configures it. The gradient is taken at the
      `vbar` of before the step (as in the paper) and clipped like that of `w`.
    * On the first batch of a round, `a <- clip_[0,1](a - eta_a <v - w, grad f(vbar)>)`.

    Deployed: `vbar` with the received `w` (stage L1) or the last local one (L2), and the buffers and frozen parameters (a
    momentum encoder) that training `v` has moved at `vbar` (with `a = 0` those of `w`).

    FedProx, SCAFFOLD and server optimizers act on `w` only: they are about the model that travels, while `v` is meant to
    drift, held by `a`. Layers that another callback keeps at home (FedPer, FedBN) train in `w` like the others and are
    mixed like the others.

    Args:
        alpha: Initial share `a` of the local model (FENDA-FL paper: 0.5; the APFL paper also fixed 0.25, 0.5 and 0.75).
        adaptive: Whether `a` is learned.
        alpha_lr: Learning rate `eta_a` of the share. `None` uses the learning rate of the step (the authors' code). The
            FENDA-FL paper tuned it in 1 to 1e-4.
        alpha_decay: Adds `alpha_decay * a` to the slope (the authors' code: 0.02; the paper: none).
        mix: `"params"` (paper) mixes parameters, of any module. `"logits"` (FENDA-FL paper, FedTorch) mixes outputs:
            `forward` gives `a h_v + (1 - a) h_w` and `v` trains on the loss of that. It needs a module whose steps call
            `self(x)`.
        personal_model: Another LightningModule as the local model, for `mix="logits"` only. Its optimizer keeps its own
            learning rate and follows the relative schedule of the module's. `None` uses a copy of the module.
        weighting: Weights of the clients: `"samples"` or `"uniform"` (paper).

    Raises:
        ValueError: If `alpha` is outside [0, 1], `mix` is unknown, or `personal_model` cannot be mixed.

    Example:
        >>> from fedlightning.callbacks import APFL
        >>> APFL(alpha=0.25).alpha
        0.25
    """

    facts = Facts([Change.BESIDE], [Need("trains two models in one fit", ("local_phases",))], keeps=True)

    alpha: Share = 0.5
    adaptive: bool = True
    alpha_lr: NonNegativeFloat | None = None
    alpha_decay: NonNegativeFloat = 0.0
    mix: Literal["params", "logits"] = "params"
    personal_model: Annotated[LightningModule, Instance("It says how v trains.")] | None = None
    weighting: WeightingName | None = None

    def check(self, setup: Setup) -> None:
        """Refuse manual optimization, visits in several phases, and logit mixing where the step skips `forward`."""
        name = type(setup.template).__name__
        if not setup.module.automatic_optimization:
            raise ValueError(f"APFL trains a second model beside {name}, which optimizes manually. Use FedPer.")
        refuse_closures(setup, "APFL")
        if self.mix == "logits" and not _uses_forward(setup):
            raise ValueError(
                f"APFL(mix='logits') mixes what forward returns, but {name}.training_step does not call self(x). "
                "Use APFL(mix='params')."
            )

    # -- one visit ----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up `v` and its optimizer beside the client's module."""
        mixture = self._mixture(self.client)
        mixture.start(trainer, pl_module)
        self.client.scratch[self.key] = mixture

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take the gradient at the mixture before `w` moves; `v` and `a` move right after `w`."""
        self.client.scratch[self.key].accumulate(batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach `v` from the optimizer of `w`."""
        self.client.scratch[self.key].stop()

    def on_send(self, client: Client, update: Update) -> None:
        """Keep `v_i` and `a_i` in the client's state."""
        mixture = client.scratch.pop(self.key, None)
        if mixture is not None:
            client.state[self.key] = mixture.state()

    @property
    def is_stackable(self) -> bool:
        """Whether clients can train in a stack: mixtures of parameters can, mixtures of logits cannot."""
        return self.mix == "params"

    def stack_hooks(self, fit: Any) -> StackedMixtures:
        """Return the same steps for a stack of clients."""
        from fedlightning.callbacks.apfl_stacked import StackedMixtures

        return StackedMixtures(self, fit)

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return `vbar`, with the `w` that the client's module holds at `stage`; `w` where no `v` was ever trained for it."""
        if client.message.tag == NEWCOMER and self.key not in client.state and not client.contributed:
            return client.copy_module()
        return self._mixture(client).deployed(client.copy_module())

    def _mixture(self, client: Client) -> ParameterMixture:
        from fedlightning.callbacks.apfl import LogitMixture, ParameterMixture

        return ParameterMixture(client, self) if self.mix == "params" else LogitMixture(client, self)


# -- the update rule -------------------------------------------------------------------------------------------------


def mix(v: Tensor, w: Tensor, alpha: float | Tensor) -> Tensor:
    """Return the mixture `vbar = a v + (1 - a) w`.

    Example:
        >>> mix(torch.tensor([4.0]), torch.tensor([0.0]), alpha=0.25)
        tensor([1.])
    """
    return alpha * v + (1 - alpha) * w


@torch.no_grad()
def alpha_slope(
    v: Mapping[str, Tensor], w: Mapping[str, Tensor], gradients: Mapping[str, Tensor], stacked: bool = False
) -> Tensor:
    """Return `df/da = <v - w, grad f(vbar)>`, the derivative of the mixture's loss by the share `a`.

    Example:
        >>> v, w = {"layer": torch.tensor([3.0, 1.0])}, {"layer": torch.tensor([1.0, 1.0])}
        >>> alpha_slope(v, w, {"layer": torch.tensor([0.5, 9.0])}).item()
        1.0
    """
    sums = []
    for name, gradient in gradients.items():
        term = widen(v[name] - w[name]) * widen(gradient)
        sums.append(term.flatten(1).sum(1) if stacked else term.sum())
    return torch.stack(sums).sum(0)


def next_alpha(alpha: float, slope: float, lr: float, decay: float = 0.0) -> float:
    """Return `clip_[0,1](a - eta_a (df/da + decay a))`, the share after one step.

    Example:
        >>> next_alpha(0.5, slope=1.0, lr=0.1), next_alpha(0.5, slope=-1.0, lr=10.0)
        (0.4, 1.0)
    """
    return min(max(alpha - lr * (slope + decay * alpha), 0.0), 1.0)


def _uses_forward(setup: Setup) -> bool:
    try:
        return uses_forward(setup.module, setup.data.first_batch())
    except RuntimeError:  # the step needs a running trainer: the first visit will tell
        return True
