"""APFL's mixture in the space of logits: h(x) = a * h_v(x) + (1 - a) * h_w(x).

Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020, arXiv 2003.13461, in the form with mixed logits
that FedTorch and FL4Health use; v is the personal model, w the module's own, shared one. It acts where a step predicts
through ``self(x)``; :func:`uses_forward` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.compat.signatures import takes_index
from fedlightning.seeding import isolated
from fedlightning.wrappers.mixing import AddedParametersMixin, Mixin, mix, mixins_of, unmix, user_class
from fedlightning.wrappers.muting import frozen_buffers, muted

PERSONAL = "personal_model"
ALPHA = "personal_alpha"
Branch = Literal["mixed", "own", "personal"]


@dataclass
class _Mode:
    """Which branch ``forward`` takes now, and the tensor that stands for alpha (``None``: the buffer)."""

    branch: Branch = "mixed"
    detach_own: bool = False
    alpha: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy or a pickle takes the plain mixture


class MixerMixin(AddedParametersMixin):
    """On a module whose ``forward`` is to mix its own output with that of ``personal_model``."""

    wraps = (*AddedParametersMixin.wraps, "forward")
    mixer_mode: _Mode
    mixer_originals: dict[str, str]

    def added_parameters(self) -> dict[str, str]:
        return {**super().added_parameters(), **self.mixer_originals}

    def on_unmix(self) -> None:
        personal = self.get_submodule(PERSONAL)
        if mixins_of(personal) == (_QuietMixin,):
            unmix(personal)
        delattr(self, PERSONAL)
        delattr(self, ALPHA)
        for name in ("mixer_mode", "mixer_originals"):
            del vars(self)[name]

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name != "forward":
            return AddedParametersMixin.around(self, name, call, args, kwargs)
        mode = self.mixer_mode
        if mode.branch == "own":
            return call(*args, **kwargs)
        personal = getattr(self, PERSONAL)(*args, **kwargs)
        if mode.branch == "personal":
            return personal
        with torch.set_grad_enabled(torch.is_grad_enabled() and not mode.detach_own):
            own = call(*args, **kwargs)
        return _interpolate(getattr(self, ALPHA) if mode.alpha is None else mode.alpha, personal, own)


class _QuietMixin(Mixin):
    """On the personal LightningModule: it stands inside another one, which does the logging."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def mix_logits(module: LightningModule, personal: nn.Module, alpha: float = 0.5) -> LightningModule:
    """Make ``module`` (in place) predict ``alpha * personal(x) + (1 - alpha) * own(x)``; returns it.

    ``personal`` becomes the submodule ``personal_model``, alpha the float32 buffer ``personal_alpha`` of shape (). The
    output may be a tensor or a tuple, list or dict of tensors. Own parameters keep their names; the personal ones join
    the param groups of their namesakes (with another architecture: of the module's first trainable parameter).
    :func:`~fedlightning.wrappers.mixing.unmix` takes all of it away again.

    Args:
        module: the user's module; w.
        personal: v: a module of the same class or any network with the same output.
        alpha: in [0, 1].

    Raises:
        ValueError: alpha outside [0, 1]; a mixer is there already, or a name is taken.
        TypeError: the module has no ``forward``, so there is no output to mix.
    """
    owner = user_class(module).__name__
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} must lie in [0, 1]: it is the share of the personal model.")
    if MixerMixin in mixins_of(module):
        raise ValueError(f"This {owner} mixes logits already; unmix it first.")
    if personal is module:
        raise ValueError(f"The personal model of {owner} must be another object; pass copy.deepcopy(module).")
    for name in (PERSONAL, ALPHA):
        if hasattr(module, name):
            raise ValueError(f"{owner} has an attribute `{name}` of its own; rename it to mix logits.")
    if getattr(type(module), "forward", None) in (LightningModule.forward, nn.Module.forward):
        raise TypeError(f"{owner} has no forward(), so there are no logits to mix. Use APFL with mix='params'.")
    own = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    fallback = next(iter(own), "")
    originals = {f"{PERSONAL}.{n}": n if n in own else fallback for n, _ in personal.named_parameters()}
    mix(module, MixerMixin)
    vars(module).update(mixer_mode=_Mode(), mixer_originals=originals)
    module.add_module(PERSONAL, mix(personal, _QuietMixin) if isinstance(personal, LightningModule) else personal)
    module.register_buffer(ALPHA, torch.tensor(float(alpha), dtype=torch.float32))
    return module


@contextmanager
def mixer_branch(
    module: nn.Module, branch: Branch = "mixed", *, detach_own: bool = False, alpha: Tensor | None = None
) -> Iterator[None]:
    """Choose what ``forward`` gives inside the block: the mixture, the module's own output, or the personal one.

    Args:
        module: a module from :func:`mix_logits`.
        branch: ``own`` is APFL's step on w, ``mixed`` its step on v.
        detach_own: run the own branch without gradients, so that only v and alpha get any.
        alpha: a tensor in the place of the buffer, for instance one that requires gradients.
    """
    previous = vars(_mixer(module))["mixer_mode"]
    vars(module)["mixer_mode"] = _Mode(branch, detach_own, alpha)
    try:
        yield
    finally:
        vars(module)["mixer_mode"] = previous


def personal_gradients(module: LightningModule, loss: Callable[[], Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Gradients of the mixture's loss for the personal model and for alpha, the own branch held fixed.

    Nothing but the personal model's buffers changes: logs and metrics are muted, the own buffers restored, ``.grad``
    untouched. dL/dalpha = <dL/dh, h_v - h_w>, the exact derivative.

    Args:
        module: a module from :func:`mix_logits`.
        loss: computes the loss, for instance ``lambda: module.training_step(batch, 0)`` (or a dict with ``"loss"``).

    Returns:
        (name within ``personal_model`` -> gradient, gradient of alpha with shape (), the detached loss). A parameter
        that the loss does not depend on gets zeros.

    Raises:
        RuntimeError: the loss does not depend on the mixture.
    """
    alpha = getattr(_mixer(module), ALPHA).detach().clone().requires_grad_()
    personal = {n: p for n, p in module.get_submodule(PERSONAL).named_parameters() if p.requires_grad}
    with muted(module), frozen_buffers(module, only=lambda name: not name.startswith(f"{PERSONAL}.")):
        with torch.enable_grad(), mixer_branch(module, detach_own=True, alpha=alpha):
            value = loss()
    value = value["loss"] if isinstance(value, Mapping) else value
    grads = (
        torch.autograd.grad(value, [alpha, *personal.values()], allow_unused=True) if value.requires_grad else (None,)
    )
    if grads[0] is None:
        raise RuntimeError(
            f"The loss of {user_class(module).__name__} does not depend on the mixed output: its step does not predict "
            f"through self(x). Use APFL with mix='params'."
        )
    named = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(personal.items(), grads[1:], strict=True)
    }
    return named, grads[0], value.detach()


def own_state_names(module: nn.Module) -> list[str]:
    """The state_dict names of w, the part that travels: all but the personal model and alpha."""
    return [n for n in _mixer(module).state_dict() if n != ALPHA and not n.startswith(f"{PERSONAL}.")]


class _ForwardCalled(BaseException):
    """Ends the probe of :func:`uses_forward`; not an ``Exception``, which a step might catch."""


class _SpyMixin(Mixin):
    """Ends the step where ``forward`` is called."""

    wraps = ("forward",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _ForwardCalled


def uses_forward(module: LightningModule, batch: Any) -> bool:
    """Whether ``training_step`` predicts through ``self(x)``: tried on one batch, in a copy, without any trace.

    The copy is muted and runs without gradients up to the first call of ``forward``; the module, the global generators
    and the Trainer stay as they are. An error of the step before that call is passed on. ``batch`` must be on the
    module's device.
    """
    probe = mix(deepcopy(module), _SpyMixin)
    with suppress(RuntimeError):  # not attached to a Trainer: neither is the copy
        probe.trainer = module.trainer
    arguments = [batch, 0] if takes_index(probe.training_step) else [batch]
    try:
        with isolated("uses-forward"), muted(probe), torch.no_grad():
            probe.training_step(*arguments)
    except _ForwardCalled:
        return True
    finally:
        probe.trainer = None
    return False


def _mixer(module: nn.Module) -> nn.Module:
    if not isinstance(module, MixerMixin):
        raise TypeError(f"{user_class(module).__name__} does not mix logits; call mix_logits(module, personal) first.")
    return module


def _interpolate(alpha: Tensor, personal: Any, own: Any) -> Any:
    """Give alpha * personal + (1 - alpha) * own, leaf by leaf through tuples, lists and dicts."""
    if isinstance(own, Tensor) and isinstance(personal, Tensor):
        if own.shape != personal.shape:
            raise ValueError(
                f"The personal model gives {tuple(personal.shape)}, the module's own {tuple(own.shape)}: logits can "
                f"only be mixed when the shapes are equal."
            )
        if not own.is_floating_point():
            return own
        weight = alpha.to(own.dtype)
        return weight * personal + (1 - weight) * own
    if isinstance(own, Mapping):
        return {key: _interpolate(alpha, personal[key], value) for key, value in own.items()}
    if isinstance(own, (tuple, list)):
        mixed = [_interpolate(alpha, *pair) for pair in zip(personal, own, strict=True)]
        return type(own)(*mixed) if hasattr(own, "_fields") else type(own)(mixed)
    if own is None:
        return None
    raise TypeError(f"Cannot mix outputs of type {type(own).__name__}; forward() must give tensors.")
