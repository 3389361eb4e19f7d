"""Training parts of a model: the scaler, and a loss without the classes that a client does not have."""

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
    """Put the scaler on every linear and convolutional layer but the head, in place.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> module = BoringModel()
        >>> module.layer = nn.Sequential(nn.Linear(32, 1), nn.Linear(1, 2))
        >>> before = module.layer[0](torch.ones(32))
        >>> scale_in_training(module, head="layer.1", rate=0.5)
        >>> (module.layer[0](torch.ones(32)) / before).item()
        2.0
    """
    last = module.get_submodule(head)
    for layer in list(module.modules()):
        if isinstance(layer, (nn.Linear, *Convolution)) and layer is not last:
            vars(mix(layer, ScaledMixin))["submodel_rate"] = rate


def limit_labels(module: LightningModule, head: str, counts: Sequence[int]) -> Tensor | None:
    """Mask the head's outputs for classes without samples, in place.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> module = BoringModel()
        >>> limit_labels(module, "layer", counts=[0, 7])
        tensor([1])
        >>> module.layer(torch.ones(32))[0].item()
        0.0
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
    """Keep only the head's rows of some classes, in a state and in the indices that it holds.

    Example:
        >>> state, slices = narrow_to_labels({"fc.bias": torch.tensor([5.0, 6.0])}, {}, "fc", torch.tensor([1]))
        >>> state["fc.bias"], slices
        (tensor([6.]), {'fc.bias': (tensor([1]),)})
    """
    narrow, held = dict(state), dict(slices)
    for name, value in state.items():
        if name.rpartition(".")[0] == head:
            narrow[name] = value[labels]
            held[name] = (labels, *slices.get(name, (None,) * value.ndim)[1:])
    return narrow, held
