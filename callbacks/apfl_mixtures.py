"""The second model that APFL trains beside a client's module: `v`, its optimizer and the share `a`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from fedlightning.algorithm import Client, State, probes
from fedlightning.callbacks.apfl import alpha_slope, mix, next_alpha
from fedlightning.callbacks.shared.second_model import SecondModel
from fedlightning.tensors import clone, entry_kinds, interpolate, load_state, module_state
from fedlightning.wrappers import mix_logits, personal_gradients
from fedlightning.wrappers.follow import follow

if TYPE_CHECKING:
    from fedlightning.callbacks.apfl import APFL


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
        self.alpha = float(self.kept.get("alpha", options.alpha))
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
        """Put `vbar` into the parameters of `module`, which holds `w`, and `v`'s buffers; nothing changes at `a = 0`."""
        if self.alpha == 0.0:
            return module
        w, v = module_state(module), module_state(self.twin)
        kinds = entry_kinds(module)
        trainable = [name for name, kind in kinds.items() if kind == "trainable"]
        buffers = [name for name, kind in kinds.items() if kind.endswith("buffer")]
        mixed = interpolate({n: v[n] for n in trainable}, {n: w[n] for n in trainable}, self.alpha)
        load_state(module, {**clone(mixed), **{name: v[name] for name in buffers}})
        return module


class LogitMixture(ParameterMixture):
    """APFL's steps on `v` and `a` for one client, with mixed outputs `h = a h_v + (1 - a) h_w`.

    `v` is a network of its own beside `w`. The gradient of the mixed output's loss already carries the factor `a`.
    """

    def fresh(self) -> LightningModule:
        """Return a copy of the given personal model, or the federation's initial one."""
        given = self.options.personal_model
        if given is None:
            return self.client.initial_module()
        return copy.deepcopy(given).to(next(self.client.module.parameters()).dtype)

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Put `v` beside a view of `w`."""
        super().start(trainer, module)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        kept = self.kept.get("rates") if self.client.keeps_optimizers else None
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
        first, *own = self.rates
        factor = main.param_groups[0]["lr"] / first if first else 1.0
        for group, lr in zip(self.optimizer.param_groups, own, strict=True):
            group["lr"] = lr * factor
        return None

    def state(self) -> dict[str, Any]:
        """Return what the client keeps; where optimizers go on, also the learning rates that both began with."""
        return {**super().state(), **({"rates": self.rates} if self.client.keeps_optimizers else {})}

    def deployed(self, module: LightningModule) -> LightningModule:
        """Let the `forward` of `module`, which holds `w`, return the mixture."""
        return mix_logits(module, self.twin, self.alpha)
