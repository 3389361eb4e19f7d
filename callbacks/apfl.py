"""APFL."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from fedlightning.arguments import optimizers_in
from fedlightning.client import Client
from fedlightning.hooks import FederatedCallback, Setup, Stage
from fedlightning.messages import Update
from fedlightning.probes import training_loss
from fedlightning.tensors import clone, entry_kinds, interpolate, load_state, module_state
from fedlightning.wrappers import mix_logits, personal_gradients, uses_forward


class APFL(FederatedCallback):
    r"""Adaptive personalised federated learning: each client deploys a mixture of a local and the global model.

    Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020.

    Down: ``w``. Up: ``w_i``. State: ``v_i`` (from ``w^0``) and ``a_i`` at each client. With ``vbar = a v + (1 - a) w``,
    on every batch:

    * ``w <- w - eta grad f(w)`` (exactly FedAvg: the server's trajectory is the same for every ``a``);
    * ``v <- v - eta a grad f(vbar)``, by an optimizer of the kind the module configures, ``grad`` at the ``vbar`` of
      before the step (paper) with the same clipping;
    * on the first batch of a round ``a <- clip_[0,1](a - eta_a <v - w, grad f(vbar)>)``.

    Deployed: ``vbar`` with the received ``w`` (stage L1) or the last local one (L2), and ``v``'s buffers.

    Args:
        alpha: start of ``a`` (FENDA-FL paper: 0.5; APFL paper also fixed 0.25, 0.5, 0.75).
        adaptive: whether ``a`` is learned.
        alpha_lr: ``eta_a``; ``None``: the step's ``eta`` (the authors' code).
        alpha_decay: adds ``alpha_decay * a`` to the derivative (the authors' code: 0.02; the paper: none).
        mix: ``"params"`` (paper), on any module; ``"logits"`` (FENDA-FL paper, FedTorch): ``forward`` gives ``a h_v + (1 -
            a) h_w`` and ``v`` trains on the loss of that, for modules whose steps call ``self(x)``.
        personal: another LightningModule as the local model, for ``mix="logits"`` only.
        weighting: ``"samples"``, or ``"uniform"`` (paper).
    """

    def __init__(
        self,
        alpha: float = 0.5,
        adaptive: bool = True,
        alpha_lr: float | None = None,
        alpha_decay: float = 0.0,
        mix: Literal["params", "logits"] = "params",
        personal: LightningModule | None = None,
        weighting: str | None = None,
    ) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"APFL got alpha={alpha}; a share of the local model must be in [0, 1].")
        if mix not in ("params", "logits"):
            raise ValueError(f"APFL got mix={mix!r}. Use 'params' (any module) or 'logits' (steps that call self(x)).")
        if personal is not None and mix != "logits":
            raise ValueError("APFL got a personal model of its own, whose parameters cannot be mixed. Set mix='logits'.")
        self.alpha = alpha
        self.adaptive = adaptive
        self.alpha_lr = alpha_lr
        self.alpha_decay = alpha_decay
        self.mix = mix
        self.personal = personal
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse manual optimization, and logit mixing where the step does not use ``forward``."""
        name = type(setup.template).__name__
        if not setup.module.automatic_optimization:
            raise ValueError(f"APFL trains a second model beside {name}, which optimizes manually. Use Ditto or FedPer.")
        if self.mix == "logits" and not uses_forward(setup.module, setup.first_batch()):
            raise ValueError(
                f"APFL(mix='logits') mixes what forward returns, but {name}.training_step does not call self(x). "
                "Use APFL(mix='params')."
            )

    # -- one visit ----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up ``v`` and its optimizer beside the client's module."""
        kind = ParameterMixture if self.mix == "params" else LogitMixture
        mixture = kind(self.client, self)
        mixture.start(trainer, pl_module)
        self.client.scratch[self.key] = mixture

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The mixture's gradient, before ``w`` moves."""
        self.client.scratch[self.key].accumulate(batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach ``v`` from the optimizer of ``w``."""
        self.client.scratch[self.key].stop()

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``v_i`` and ``a_i``."""
        mixture = client.scratch.get(self.key)
        if mixture is not None:
            client.state[self.key] = mixture.state()

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """``vbar``, with whatever ``w`` the client's module holds at ``stage``."""
        kind = ParameterMixture if self.mix == "params" else LogitMixture
        return kind(client, self).deployed(client.copy_module())


class ParameterMixture:
    """``v`` in a twin of the client's module; its parameters are ``vbar`` for the time of a gradient."""

    def __init__(self, client: Client, options: APFL) -> None:
        self.client, self.options = client, options
        kept = client.state.get(options.key, {})
        self.alpha = float(kept.get("alpha", options.alpha))
        self.kept_optimizer = kept.get("optimizer")
        self.twin = self.fresh()
        if "v" in kept:
            load_state(self.twin, kept["v"])
        self.gradients: dict[str, Tensor] = {}
        self.first = True

    def fresh(self) -> LightningModule:
        """A new local model: ``v_i = w^0``."""
        return self.client.initial_module()

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Move ``v`` to the device, make its optimizer, follow the optimizer of ``w``."""
        self.trainer, self.module = trainer, module
        self.twin.to(module.device).train(module.training)
        self.twin.trainer = trainer
        self.optimizer = optimizers_in(self.twin.configure_optimizers())[0]
        if self.client.keeps_optimizers and self.kept_optimizer is not None:
            self.optimizer.load_state_dict(self.kept_optimizer)
        self.parameters = {n: p for n, p in self.twin.named_parameters() if p.requires_grad}
        self.handle = trainer.optimizers[0].register_step_post_hook(lambda *_: self.step())
        self.window = trainer.accumulate_grad_batches

    def stop(self) -> None:
        """Let go of the trainer."""
        self.handle.remove()
        self.twin.trainer = None

    @torch.no_grad()
    def accumulate(self, batch: Any, batch_idx: int) -> None:
        """Add this batch's share of ``grad f(vbar)``; on the first batch of the round, move ``a``."""
        if batch_idx % self.window == 0:
            self.gradients = {}
        gradients, derivative = self.mixture_gradient(batch)
        for name, gradient in gradients.items():
            share = gradient / self.window
            self.gradients[name] = self.gradients[name] + share if name in self.gradients else share
        if self.first and self.options.adaptive and bool(torch.isfinite(derivative)):
            lr = self.options.alpha_lr
            lr = float(self.trainer.optimizers[0].param_groups[0]["lr"]) if lr is None else lr
            slope = float(derivative) + self.options.alpha_decay * self.alpha
            self.next_alpha = min(max(self.alpha - lr * slope, 0.0), 1.0)
        else:
            self.next_alpha = self.alpha
        self.first = False

    def mixture_gradient(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        """``a grad f(vbar)`` by name, and ``df/da = <v - w, grad f(vbar)>``."""
        own = dict(self.module.named_parameters())
        v = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.copy_(self.alpha * v[name] + (1 - self.alpha) * own[name])
        _, at_mixture = self.client.batch_gradient(batch, self.twin, update_buffers=True)
        for name, parameter in self.parameters.items():
            parameter.copy_(v[name])
        zero = torch.zeros((), dtype=torch.float64, device=self.module.device)
        derivative = sum((((v[n] - own[n]).double() * g.double()).sum() for n, g in at_mixture.items()), zero)
        return {name: self.alpha * gradient for name, gradient in at_mixture.items()}, derivative

    @torch.no_grad()
    def step(self) -> None:
        """``v <- v - eta a grad f(vbar)``, right after the step of ``w``; nothing where ``a`` is 0."""
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in self.gradients.values())
        if self.gradients and self.alpha > 0.0 and finite:
            for name, parameter in self.parameters.items():
                parameter.grad = self.gradients.get(name)
            value, how = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
            if value:
                clip = clip_grad_value_ if how == "value" else clip_grad_norm_
                clip(self.parameters.values(), float(value))
            for own, main in zip(self.optimizer.param_groups, self.trainer.optimizers[0].param_groups, strict=False):
                own["lr"] = main["lr"]
            self.optimizer.step()
        self.gradients = {}
        self.alpha = self.next_alpha

    def state(self) -> dict[str, Any]:
        """What the client keeps."""
        kept: dict[str, Any] = {"v": clone(module_state(self.twin), "cpu"), "alpha": self.alpha}
        if self.client.keeps_optimizers:
            kept["optimizer"] = self.optimizer.state_dict()
        return kept

    def deployed(self, module: LightningModule) -> LightningModule:
        """``module`` (holding ``w``) with ``vbar`` in its parameters and ``v``'s buffers."""
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
        return self.client.initial_module() if given is None else copy.deepcopy(given)

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Put ``v`` beside a view of ``w``."""
        super().start(trainer, module)
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

    def mixture_gradient(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        """``df(h)/dv`` by name, and ``df/da = <df/dh, h_v - h_w>``, with ``h = a h_v + (1 - a) h_w``."""
        self.view.personal_alpha.fill_(self.alpha)
        scale = self.client.loss_scale
        with torch.enable_grad(), self.client.probing(self.view, update_buffers=True):
            gradients, derivative, _ = personal_gradients(self.view, lambda: scale * training_loss(self.view, batch))
        return {name: gradient / scale for name, gradient in gradients.items()}, derivative / scale

    def deployed(self, module: LightningModule) -> LightningModule:
        """``module`` (holding ``w``) whose ``forward`` gives the mixture."""
        return mix_logits(module, self.twin, self.alpha)
