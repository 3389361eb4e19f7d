"""APFL's mixture of logits: h(x) = a * h_v(x) + (1 - a) * h_w(x).

Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020, arXiv 2003.13461, in the form with mixed logits
that FedTorch and FL4Health use. v is the personal model, w the module's own, which is shared. The mixture acts where a
step predicts through `self(x)`; `uses_forward` tests that.
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

from fedlightning.compat.lightning_runs import takes_index
from fedlightning.seeding import isolated
from fedlightning.wrappers.mixing import AddedParametersMixin, Mixin, mix, mixins_of, unmix, user_class
from fedlightning.wrappers.muting import frozen_buffers, muted

PERSONAL = "personal_model"
ALPHA = "personal_alpha"
Branch = Literal["mixed", "own", "personal"]


@dataclass
class _Mode:
    """The branch that `forward` takes now, and the tensor used as alpha (`None`: the buffer)."""

    branch: Branch = "mixed"
    detach_own: bool = False
    alpha: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # copies and pickles use the plain mixture


class MixerMixin(AddedParametersMixin):
    """On a module whose `forward` mixes its own output with that of `personal_model`. Mixed in by `mix_logits`.

    Attributes:
        mixer_mode: The branch that `forward` takes now; see `mixer_branch`.
        mixer_originals: Name of each added parameter to name of the parameter whose optimizer group it joins.

    Example:
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers import MixerMixin, mix_logits
        >>> module = mix_logits(Classifier(MLP(4, [3], 2), num_classes=2), MLP(4, [3], 2), alpha=0.25)
        >>> isinstance(module, MixerMixin), module.personal_alpha
        (True, tensor(0.2500))
    """

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
            own_output = call(*args, **kwargs)
        return _interpolate(getattr(self, ALPHA) if mode.alpha is None else mode.alpha, personal, own_output)


def mix_logits(module: LightningModule, personal: nn.Module, alpha: float = 0.5) -> LightningModule:
    """Make `module` predict `alpha * personal(x) + (1 - alpha) * own(x)`, in place.

    `personal` becomes the submodule `personal_model`, alpha the float32 buffer `personal_alpha` of shape `()`. The
    output may be a tensor or a tuple, list or dict of tensors. Own parameters keep their names. Personal parameters
    join the optimizer groups of their namesakes (with another architecture: that of the module's first trainable
    parameter). `fedlightning.wrappers.unmix` removes all of it.

    Args:
        module: The user's module, w.
        personal: v: a module of the same class, or any network with the same output.
        alpha: Share of the personal model, in [0, 1].

    Returns:
        `module` itself.

    Raises:
        ValueError: If alpha is outside [0, 1], the module mixes logits already, or a name is taken.
        TypeError: If the module has no `forward`, so that there is no output to mix.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers import mix_logits, own_state_names
        >>> own, personal, x = Classifier(MLP(4, [], 2), num_classes=2), MLP(4, [], 2), torch.ones(1, 4)
        >>> expected = 0.75 * personal(x) + 0.25 * own(x)
        >>> torch.allclose(mix_logits(own, personal, alpha=0.75)(x), expected)
        True
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
    trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    fallback = next(iter(trainable), "")
    originals = {f"{PERSONAL}.{n}": n if n in trainable else fallback for n, _ in personal.named_parameters()}
    mix(module, MixerMixin)
    vars(module).update(mixer_mode=_Mode(), mixer_originals=originals)
    module.add_module(PERSONAL, mix(personal, _QuietMixin) if isinstance(personal, LightningModule) else personal)
    module.register_buffer(ALPHA, torch.tensor(float(alpha), dtype=torch.float32))
    return module


@contextmanager
def mixer_branch(
    module: nn.Module, branch: Branch = "mixed", *, detach_own: bool = False, alpha: Tensor | None = None
) -> Iterator[None]:
    """Select the output of `forward` inside the block: the mixture, the module's own output, or the personal one.

    Args:
        module: A module from `mix_logits`.
        branch: `"own"` is APFL's step on w, `"mixed"` its step on v, `"personal"` the personal model alone.
        detach_own: Run the own branch without gradients, so that only v and alpha get any.
        alpha: Tensor used instead of the buffer, for instance one that requires gradients.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers import mix_logits, mixer_branch
        >>> personal = MLP(4, [], 2)
        >>> module = mix_logits(Classifier(MLP(4, [], 2), num_classes=2), personal)
        >>> with mixer_branch(module, "personal"):
        ...     bool((module(torch.ones(1, 4)) == personal(torch.ones(1, 4))).all())
        True
    """
    previous = vars(_mixer(module))["mixer_mode"]
    vars(module)["mixer_mode"] = _Mode(branch, detach_own, alpha)
    try:
        yield
    finally:
        vars(module)["mixer_mode"] = previous


def personal_gradients(module: LightningModule, loss: Callable[[], Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return gradients of the mixture's loss for the personal model and for alpha, with the own branch held fixed.

    Only the buffers of the personal model change: logs and metrics are muted, the own buffers are restored, and `.grad`
    is not touched. dL/dalpha = <dL/dh, h_v - h_w> is the exact derivative.

    Args:
        module: A module from `mix_logits`.
        loss: Computes the loss, for instance `lambda: module.training_step(batch, 0)` (or a dict with `"loss"`).

    Returns:
        Gradients by name within `personal_model`, the gradient of alpha with shape `()`, and the detached loss. A
        parameter that the loss does not depend on gets zeros.

    Raises:
        RuntimeError: If the loss does not depend on the mixture.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers import mix_logits, personal_gradients
        >>> module = mix_logits(Classifier(MLP(4, [], 2), num_classes=2), MLP(4, [], 2))
        >>> gradients, _, _ = personal_gradients(module, lambda: module(torch.ones(1, 4)).sum())
        >>> gradients["fc1.bias"]  # the loss is a sum, half of which is the personal model's
        tensor([0.5000, 0.5000])
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
    """Return the `state_dict` names of w, the part that is sent: all but the personal model and alpha.

    Args:
        module: A module from `mix_logits`.

    Example:
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers import mix_logits, own_state_names
        >>> own_state_names(mix_logits(Classifier(MLP(4, [], 2), num_classes=2), MLP(4, [], 2)))
        ['net.fc1.weight', 'net.fc1.bias']
    """
    return [n for n in _mixer(module).state_dict() if n != ALPHA and not n.startswith(f"{PERSONAL}.")]


def uses_forward(module: LightningModule, batch: Any) -> bool:
    """Return True if `training_step` predicts through `self(x)`.

    This is tried on one batch, in a copy that is muted and runs without gradients up to the first call of `forward`.
    The module, the global generators and the Trainer stay as they are. An error of the step before that call is passed
    on.

    Args:
        module: Any LightningModule.
        batch: A training batch on the module's device.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers import uses_forward
        >>> uses_forward(Classifier(MLP(4, [3], 2), num_classes=2), (torch.zeros(1, 4), torch.zeros(1).long()))
        True
    """
    probe = mix(deepcopy(module), _SpyMixin)
    with suppress(RuntimeError):  # raised by a module without a Trainer
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


class _QuietMixin(Mixin):
    """On a personal LightningModule: the module around it does the logging."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class _ForwardCalled(BaseException):
    """Ends the probe of `uses_forward`. Not an `Exception`, which a step might catch."""


class _SpyMixin(Mixin):
    """Ends the step where `forward` is called."""

    wraps = ("forward",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _ForwardCalled


def _mixer(module: nn.Module) -> nn.Module:
    if not isinstance(module, MixerMixin):
        raise TypeError(f"{user_class(module).__name__} does not mix logits; call mix_logits(module, personal) first.")
    return module


def _interpolate(alpha: Tensor, personal: Any, own_output: Any) -> Any:
    """Return alpha * personal + (1 - alpha) * own, leaf by leaf through tuples, lists and dicts."""
    if isinstance(own_output, Tensor) and isinstance(personal, Tensor):
        if own_output.shape != personal.shape:
            raise ValueError(
                f"The personal model gives {tuple(personal.shape)}, the module's own {tuple(own_output.shape)}: logits can "
                f"only be mixed when the shapes are equal."
            )
        if not own_output.is_floating_point():
            return own_output
        weight = alpha.to(own_output.dtype)
        return weight * personal + (1 - weight) * own_output
    if isinstance(own_output, Mapping):
        return {key: _interpolate(alpha, personal[key], value) for key, value in own_output.items()}
    if isinstance(own_output, (tuple, list)):
        mixed = [_interpolate(alpha, *pair) for pair in zip(personal, own_output, strict=True)]
        return type(own_output)(*mixed) if hasattr(own_output, "_fields") else type(own_output)(mixed)
    if own_output is None:
        return None
    raise TypeError(f"Cannot mix outputs of type {type(own_output).__name__}; forward() must give tensors.")
