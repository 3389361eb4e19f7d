"""What methods share in which clients train parts of a model: the scaler and the masked loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import State
from fedlightning.wrappers import Mixin, mix
from fedlightning.wrappers.heads import Convolution
from fedlightning.wrappers.slices import Slices


class ScaledMixin(Mixin):
    """On a layer: its outputs are divided by the rate in training, so that sums keep their size."""

    wraps = ("forward",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = call(*args, **kwargs)
        return output / vars(self)["submodel_rate"] if self.training else output


class MaskedMixin(Mixin):
    """On a head: in training the logits of classes that the client does not have are 0."""

    wraps = ("forward",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        logits = call(*args, **kwargs)
        absent: Tensor = vars(self)["submodel_absent"]
        return logits.index_fill(-1, absent.to(logits.device), 0.0) if self.training else logits


def scale_in_training(module: LightningModule, head: str, rate: float) -> None:
    """Put the scaler on every linear and convolutional layer but the head."""
    last = module.get_submodule(head)
    for layer in list(module.modules()):
        if isinstance(layer, (nn.Linear, *Convolution)) and layer is not last:
            vars(mix(layer, ScaledMixin))["submodel_rate"] = rate


def limit_labels(module: LightningModule, head: str, counts: Sequence[int]) -> Tensor | None:
    """Mask the head's outputs for classes without samples.

    Returns:
        The classes that have samples; ``None`` where the head's outputs are not one for each class (a single logit).
    """
    layer = module.get_submodule(head)
    if not isinstance(layer, nn.Linear) or layer.out_features < max(2, len(counts)):
        return None
    padded = torch.zeros(layer.out_features, dtype=torch.long)
    padded[: len(counts)] = torch.tensor(counts)
    absent = torch.nonzero(padded == 0).flatten()
    if len(absent):
        vars(mix(layer, MaskedMixin))["submodel_absent"] = absent
    return torch.nonzero(padded).flatten()


def narrow_to_labels(state: Mapping[str, Tensor], slices: Slices, head: str, labels: Tensor) -> tuple[State, Slices]:
    """Keep only the head's rows of ``labels``, in a state and in what it says it holds."""
    narrow, held = dict(state), dict(slices)
    for name, value in state.items():
        if name.rpartition(".")[0] == head:
            narrow[name] = value[labels]
            held[name] = (labels, *slices.get(name, (None,) * value.ndim)[1:])
    return narrow, held
