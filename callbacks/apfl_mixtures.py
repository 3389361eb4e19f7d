"""What APFL trains beside a client's module: the personal model, its optimizer and the share ``a``."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from fedlightning.algorithm import (
    Client,
    NoLossError,
    clone,
    entry_kinds,
    first_nonfinite,
    interpolate,
    load_state,
    module_state,
    optimizers_in,
    training_loss,
)
from fedlightning.wrappers import mix_logits, personal_gradients
from fedlightning.wrappers.follow import follow

if TYPE_CHECKING:
    from fedlightning.callbacks.apfl import APFL


class ParameterMixture:
    """``v`` in a twin of the client's module; its parameters are ``vbar`` for the time of a gradient."""

    def __init__(self, client: Client, options: APFL) -> None:
        self.client, self.options = client, options
        kept = client.state.get(options.key, {})
        self.alpha = float(kept.get("alpha", options.alpha))
        self.next_alpha: float | None = None
        self.kept_optimizer, self.kept_rates = kept.get("optimizer"), kept.get("rates")
        self.twin = self.fresh()
        if "v" in kept:
            load_state(self.twin, kept["v"])
        self.gradients: dict[str, Tensor] = {}

    def fresh(self) -> LightningModule:
        """A new local model: ``v_i = w^0``."""
        return self.client.initial_module()

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Move ``v`` to the device, make its optimizer, follow the optimizer of ``w``."""
        self.trainer, self.module = trainer, module
        self.twin.to(module.device)
        self.twin.trainer = trainer
        self.optimizer = optimizers_in(self.twin.configure_optimizers())[0]
        if self.client.keeps_optimizers and self.kept_optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(self.kept_optimizer))  # which does not copy the tensors
        self.parameters = {n: p for n, p in self.twin.named_parameters() if p.requires_grad}
        self.handle = trainer.optimizers[0].register_step_post_hook(lambda *_: self.step())
        self.moves_alpha = self.options.adaptive

    def stop(self) -> None:
        """Let go of the trainer."""
        self.handle.remove()
        self.twin.trainer = None
        del self.trainer, self.module

    @torch.no_grad()
    def accumulate(self, batch: Any, batch_idx: int) -> None:
        """Add this batch's share of ``grad f(vbar)``; on the first batch of the round, work out the next ``a``."""
        window = self.trainer.accumulate_grad_batches
        if batch_idx % window == 0:
            self.gradients = {}
        if self.alpha == 0.0 and not self.moves_alpha:
            return  # v does not move, and neither will a in this visit
        if self.options.personal is None:
            follow(self.module, self.twin)
        try:
            gradients, derivative = self.mixture_gradient(batch, batch_idx)
        except NoLossError:
            return  # the step skips this batch, for w too
        for name, gradient in gradients.items():
            share = gradient / window
            self.gradients[name] = self.gradients[name] + share if name in self.gradients else share
        derivative = self.trainer.strategy.reduce(derivative, reduce_op="mean")
        if self.moves_alpha and bool(torch.isfinite(derivative)):
            lr = self.options.alpha_lr
            lr = float(self.trainer.optimizers[0].param_groups[0]["lr"]) if lr is None else lr
            slope = float(derivative) + self.options.alpha_decay * self.alpha
            self.next_alpha = min(max(self.alpha - lr * slope, 0.0), 1.0)
            self.moves_alpha = False

    def mixture_gradient(self, batch: Any, batch_idx: int) -> tuple[dict[str, Tensor], Tensor]:
        """``a grad f(vbar)`` by name, and ``df/da = <v - w, grad f(vbar)>``."""
        own = dict(self.module.named_parameters())
        v = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.copy_(self.alpha * v[name] + (1 - self.alpha) * own[name])
        _, at_mixture = self.client.batch_gradient(batch, self.twin, update_buffers=True, batch_idx=batch_idx)
        for name, parameter in self.parameters.items():
            parameter.copy_(v[name])
        wide = torch.float32 if self.module.device.type == "mps" else torch.float64
        terms = [((v[n] - own[n]).to(wide) * gradient.to(wide)).sum() for n, gradient in at_mixture.items()]
        derivative = torch.stack(terms).sum() if terms else torch.zeros((), device=self.module.device)
        return {name: self.alpha * gradient for name, gradient in at_mixture.items()}, derivative

    @torch.no_grad()
    def step(self) -> None:
        """``v <- v - eta a grad f(vbar)``, right after the step of ``w``; nothing where ``a`` is 0.

        A step of ``w`` that the gradient scaler skipped is none of ``v`` either, nor is one where only ``v``'s scaled
        gradients overflow.
        """
        reduce = self.trainer.strategy.reduce  # over the ranks of one client, under DDP
        gradients = {name: reduce(gradient, reduce_op="mean") for name, gradient in self.gradients.items()}
        scaled = self.client.loss_scale != 1.0
        overflow = scaled and not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
        if gradients and self.alpha > 0.0 and not overflow:
            for name, parameter in self.parameters.items():
                parameter.grad = gradients.get(name)
            clip, how = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
            self.twin.configure_gradient_clipping(self.optimizer, clip, how)
            self.follow_schedule(self.trainer.optimizers[0])
            self.optimizer.step()
        self.gradients = {}
        if self.next_alpha is not None:
            self.alpha, self.next_alpha = self.next_alpha, None

    def follow_schedule(self, main: Optimizer) -> None:
        """Learning rates, and whatever else a scheduler moves, are those of the step of ``w``."""
        for own, group in zip(self.optimizer.param_groups, main.param_groups, strict=False):
            own.update({name: value for name, value in group.items() if name not in ("params", "param_names")})

    def state(self) -> dict[str, Any]:
        """What the client keeps.

        Raises:
            FloatingPointError: if ``v`` has diverged.
        """
        v = clone(module_state(self.twin), "cpu")
        bad = first_nonfinite({name: v[name] for name in self.parameters})
        if bad is not None:
            raise FloatingPointError(
                f"'{bad}' of the personal model holds NaN or infinite values after training. Lower the learning rate "
                "or clip gradients (gradient_clip_val)"
            )
        kept: dict[str, Any] = {"v": v, "alpha": self.alpha}
        if self.client.keeps_optimizers:
            kept["optimizer"] = move_data_to_device(self.optimizer.state_dict(), "cpu")
        return kept

    def deployed(self, module: LightningModule) -> LightningModule:
        """``module`` (holding ``w``) with ``vbar`` in its parameters and ``v``'s buffers; unchanged at ``a = 0``."""
        if self.alpha == 0.0:
            return module
        own, v = module_state(module), module_state(self.twin)
        kinds = entry_kinds(module)
        trainable = [name for name, kind in kinds.items() if kind == "trainable"]
        buffers = [name for name, kind in kinds.items() if kind.endswith("buffer")]
        mixed = interpolate({n: v[n] for n in trainable}, {n: own[n] for n in trainable}, self.alpha)
        load_state(module, {**clone(mixed), **{name: v[name] for name in buffers}})
        return module


class LogitMixture(ParameterMixture):
    """``v`` as a network of its own beside ``w``; the gradient of the mixed prediction's loss already carries ``a``."""

    def fresh(self) -> LightningModule:
        """A copy of the given personal model, or the federation's initial one."""
        given = self.options.personal
        if given is None:
            return self.client.initial_module()
        return copy.deepcopy(given).to(next(self.client.module.parameters()).dtype)

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Put ``v`` beside a view of ``w``."""
        super().start(trainer, module)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        kept = self.kept_rates if self.client.keeps_optimizers else None
        self.rates: list[float] = kept or [trainer.optimizers[0].param_groups[0]["lr"], *rates]
        self.view = mix_logits(self.client.copy_module(), self.twin, self.alpha)
        self.view.trainer = trainer
        own = dict(module.named_parameters())
        for name, parameter in self.view.named_parameters():
            if name in own:
                parameter.data = own[name].data  # the view follows w as its optimizer moves it in place

    def stop(self) -> None:
        """Let go of the trainer."""
        super().stop()
        self.view.trainer = None

    def mixture_gradient(self, batch: Any, batch_idx: int) -> tuple[dict[str, Tensor], Tensor]:
        """``df(h)/dv`` by name, and ``df/da = <df/dh, h_v - h_w>``, with ``h = a h_v + (1 - a) h_w``."""
        follow(self.module, self.view)
        self.view.get_buffer("personal_alpha").fill_(self.alpha)
        scale = self.client.loss_scale
        with torch.enable_grad(), self.client.probing(self.view, update_buffers=True):
            gradients, derivative, _ = personal_gradients(
                self.view, lambda: scale * training_loss(self.view, batch, batch_idx)
            )
        return {name: gradient / scale for name, gradient in gradients.items()}, derivative / scale

    def follow_schedule(self, main: Optimizer) -> None:
        """A personal model of another kind keeps its own learning rate and takes the relative schedule."""
        if self.options.personal is None:
            return super().follow_schedule(main)
        first, *own = self.rates
        factor = main.param_groups[0]["lr"] / first if first else 1.0
        for group, lr in zip(self.optimizer.param_groups, own, strict=True):
            group["lr"] = lr * factor
        return None

    def state(self) -> dict[str, Any]:
        """What the client keeps; with the learning rates that both began with, where optimizers go on."""
        return {**super().state(), **({"rates": self.rates} if self.client.keeps_optimizers else {})}

    def deployed(self, module: LightningModule) -> LightningModule:
        """``module`` (holding ``w``) whose ``forward`` gives the mixture."""
        return mix_logits(module, self.twin, self.alpha)
