"""The mixture of FL+DE: the expert with its gate, the module whose predictions they change, and how they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from fedlightning.algorithm import Client, State
from fedlightning.callbacks.shared.representations import head_path, head_widths
from fedlightning.callbacks.shared.second_model import SecondModel
from fedlightning.layers import ordered_layers
from fedlightning.tensors import load_state, module_state
from fedlightning.wrappers import AddedParametersMixin, FeatureTap, Mixin, mix, user_class
from fedlightning.wrappers.follow import follow
from fedlightning.wrappers.mixing import STEPS
from fedlightning.wrappers.muting import evaluating

if TYPE_CHECKING:
    from fedlightning.callbacks.flde import FLDE

EXPERT, GATE = "expert", "expert_gate"
"""Names of the expert in the module, and of the gate in the expert."""


def mix_probabilities(own: Tensor, expert: Tensor, gate: Tensor) -> Tensor:
    """Return `log(a softmax(own) + (1 - a) softmax(expert))` with `a = sigmoid(gate)`, or the logit of one class.

    Args:
        own: Logits of the global model: `(batch, classes, ...)`, or `(batch,)` or `(batch, 1, ...)` of one logit.
        expert: Logits of the expert, of the same shape.
        gate: Logits of the global model's share, one a sample.

    Example:
        >>> equal = torch.tensor([2.0, -1.0])
        >>> mix_probabilities(equal, equal, torch.tensor([0.0, 9.0]))
        tensor([ 2., -1.])
    """
    own, expert = (one.to(torch.promote_types(one.dtype, torch.float32)) for one in (own, expert))
    gate = gate.to(own.dtype).reshape(-1, *[1] * (own.ndim - 1))
    share, rest = F.logsigmoid(gate), F.logsigmoid(-gate)
    if own.ndim > 1 and own.shape[1] > 1:
        return torch.logaddexp(share + own.log_softmax(1), rest + expert.log_softmax(1))
    yes, no = (torch.logaddexp(share + F.logsigmoid(s * own), rest + F.logsigmoid(s * expert)) for s in (1, -1))
    return yes - no


def mix_outputs(own: Tensor, expert: Tensor, gate: Tensor) -> Tensor:
    """Return `a own + (1 - a) expert` with `a = sigmoid(gate)`.

    Example:
        >>> mix_outputs(torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2))[:, 0]
        tensor([0.5000, 0.5000])
    """
    share = gate.sigmoid().to(own.dtype).reshape(-1, *[1] * (own.ndim - 1))
    return share * own + (1 - share) * expert


MIXTURES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "probabilities": mix_probabilities,
    "outputs": mix_outputs,
}


def gate_path(module: LightningModule, options: FLDE) -> str:
    """Return the path of the layer whose input the gate reads."""
    return ordered_layers(module)[0].name if options.gate_input == "input" else head_path(module, options.head)


class ExpertMixin(AddedParametersMixin):
    """On the expert: its gate joins the optimizer group of the head, and only the module around it logs."""

    def added_parameters(self) -> dict[str, str]:
        first = next(name for name, one in self.named_parameters() if one.requires_grad and not name.startswith(GATE))
        return {**super().added_parameters(), **{f"{GATE}.{name}": first for name in ("weight", "bias")}}

    def on_unmix(self) -> None:
        """Remove the gate."""
        delattr(self, GATE)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    log_dict = log


class GatedMixin(Mixin):
    """On the global model: its `forward` gives the mixture with the expert in it.

    Attributes:
        gated: Path of the layer whose input the gate reads, how outputs are mixed, and whether a step has used them.
    """

    wraps = STEPS
    gated: dict[str, Any]

    def on_unmix(self) -> None:
        """Remove the expert."""
        delattr(self, EXPERT)
        del vars(self)["gated"]

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "forward":
            self.gated["used"] = True
            return self._mixture(call, args, kwargs)
        result = call(*args, **kwargs)
        if not self.gated["used"] and (name != "training_step" or result is not None):  # None: a skipped batch
            raise RuntimeError(
                f"FLDE mixes what forward gives, and {name} of {user_class(self).__name__} never calls self(x): it would "
                "have shown the global model alone. Let it predict by self(x)."
            )
        return result

    def _mixture(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        expert: Any = self.get_submodule(EXPERT)
        with FeatureTap(self, self.gated["path"]) as tap, evaluating(self):
            own = call(*args, **kwargs)
            features = tap.features.detach().flatten(1)
        return MIXTURES[self.gated["mix"]](own, expert(*args, **kwargs), expert.get_submodule(GATE)(features))


class ExpertTraining(SecondModel):
    """Steps of a client's expert and gate, on the loss of the mixture with the global model as it is.

    Args:
        client: The client, whose state holds both from its last visit.
        options: The callback with its hyper-parameters.
    """

    entry = EXPERT

    def __init__(self, client: Client, options: FLDE) -> None:
        expert = client.initial_module()
        path = gate_path(expert, options)
        like: Any = expert.get_submodule(path)
        width, _ = head_widths(expert, path)
        gate = nn.Linear(width, 1, dtype=next(like.parameters()).dtype)
        nn.init.zeros_(gate.weight)
        nn.init.constant_(gate.bias, options.gate_bias)
        mix(expert, ExpertMixin).add_module(GATE, gate)
        super().__init__(client, options.key, expert)
        self.options, self.path = options, path

    def deployed(self, module: LightningModule) -> LightningModule:
        """Let the `forward` of `module`, which is the global model, give the mixture."""
        mix(module, GatedMixin).add_module(EXPERT, self.twin)
        vars(module)["gated"] = {"path": self.path, "mix": self.options.mix, "used": False}
        return module

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Put the expert beside a frozen copy of the global model."""
        super().start(trainer, module)
        self.view = self.deployed(self.client.initial_module().requires_grad_(False).to(module.device))
        self.view.trainer = trainer

    def stop(self) -> None:
        """Let go of the trainer."""
        super().stop()
        self.view.trainer = None

    def gradients_of(self, batch: Any, batch_idx: int) -> State:
        """Return the gradient of the mixture's loss by the parameters of expert and gate."""
        follow(self.module, self.twin)
        follow(self.module, self.view)
        load_state(self.view, module_state(self.module))
        _, gradients = self.client.batch_gradient(batch, self.view, update_buffers=True, batch_idx=batch_idx)
        return {name.removeprefix(f"{EXPERT}."): gradient for name, gradient in gradients.items()}

    def follow_schedule(self, main: Optimizer) -> None:
        """Take over the learning rates of the global model's optimizer, times the factor."""
        super().follow_schedule(main)
        for group in self.optimizer.param_groups:
            group["lr"] *= self.options.lr_factor
