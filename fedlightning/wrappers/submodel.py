"""Sub-models: the same network with fewer units per hidden layer, cut out of a larger one.

A *cut* names, for one layer, the layers whose units arrive at it and leave it. The cuts and a choice of units per layer
determine the kept indices of every state entry (`entry_slices`) and the smaller module (`shrink`); `slices` holds the
arithmetic on their states. The caller chooses the units: `first_units`, or one of `units` (a rolling window, a random set).

This works for plain chains of linear and convolutional layers with normalisation, and residual sums of them.
`verify` tests that a module is one, by running a sub-model beside the full model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from fedlightning.layers import ordered_layers
from fedlightning.seeding import isolated
from fedlightning.tensors import module_state
from fedlightning.wrappers.heads import Convolution, find_submodule
from fedlightning.wrappers.mixing import Mixin, mix, user_class
from fedlightning.wrappers.muting import muted
from fedlightning.wrappers.slices import Slices, mesh

Units = Callable[[str, int], Tensor]
"""A function from the path of a layer and its number of units to the indices of the units to keep."""

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Cut:
    """The units that arrive at one layer and leave it.

    Attributes:
        path: Path of the layer.
        arriving: Path of the layer whose units are its inputs. `None`: all stay (inputs of the network).
        leaving: Path of the layer whose units are its outputs. `None`: all stay (the classes).
        block: Consecutive inputs that belong to one arriving unit (a flattened feature map).

    Example:
        >>> from fedlightning.wrappers.submodel import Cut
        >>> Cut("fc2", arriving="fc1", leaving=None)
        Cut(path='fc2', arriving='fc1', leaving=None, block=1)
    """

    path: str
    arriving: str | None
    leaving: str | None
    block: int = 1


class SubmodelMixin(Mixin):
    """On a cut module: its layers differ from those that its class makes, so exports keep the whole module.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers import mixins_of
        >>> from fedlightning.wrappers.submodel import entry_slices, first_units, plan_cuts, shrink
        >>> net = MLP(4, [6], 2)
        >>> [mixin.__name__ for mixin in mixins_of(shrink(net, entry_slices(net, plan_cuts(net), first_units(0.5))))]
        ['SubmodelMixin']
    """


def first_units(rate: float) -> Units:
    """Return the choice of the first `ceil(rate * width)` units of every layer.

    Example:
        >>> from fedlightning.wrappers.submodel import first_units
        >>> first_units(0.5)("fc1", 5)
        tensor([0, 1, 2])
    """
    return lambda path, width: torch.arange(math.ceil(rate * width))


def plan_cuts(module: LightningModule, head: str | None = None) -> list[Cut]:
    """Return the cuts of a chain of layers, in the order in which they are registered.

    The inputs of the first layer and the outputs of the head are never cut.

    Example:
        >>> from fedlightning.models import DigitsCNN
        >>> from fedlightning.wrappers.submodel import plan_cuts
        >>> for cut in plan_cuts(DigitsCNN()):
        ...     print(cut)
        Cut(path='conv1', arriving=None, leaving='conv1', block=1)
        Cut(path='conv2', arriving='conv1', leaving='conv2', block=1)
        Cut(path='fc', arriving='conv2', leaving=None, block=4)
    """
    name, owner = head if head is not None else ordered_layers(module)[-1].name, user_class(module).__name__
    last = find_submodule(module, name)
    widths: dict[str, int] = {}  # units of each layer so far
    cuts: list[Cut] = []
    for path, layer in module.named_modules():
        if isinstance(layer, NORMS) and not parametrize.is_parametrized(layer):
            source = _source(widths, _width(layer, path, owner))[0] if widths else None
            cuts.append(Cut(path, source, source))
        elif _is_layer(layer) and not (parametrize.is_parametrized(layer) or layer.weight.is_complex()):
            inputs, outputs = _sizes(layer, path, owner)
            nearest = module.get_submodule(next(reversed(widths))) if widths else None
            flattens = isinstance(layer, nn.Linear) and isinstance(nearest, Convolution)
            source, block = _source(widths, inputs, flattens) if widths else (None, 1)
            if widths and source is None:
                raise ValueError(
                    f"`{path}` of {owner} takes {inputs} inputs, and no layer before it gives as many: its sub-model is "
                    "unknown. Sub-models are cut from chains of linear and convolutional layers registered in order."
                )
            cuts.append(Cut(path, source, None if layer is last else path, block))
            widths[path] = outputs
        elif any(p.numel() > 1 for p in layer.parameters(recurse=False)) or parametrize.is_parametrized(layer):
            raise ValueError(
                f"`{path or owner}` ({user_class(layer).__name__}) of {owner} cannot be cut into a sub-model: only "
                "plain Linear, Conv and normalisation layers can. Give every client the full model (rate 1), or build "
                "the module from such layers."
            )
    if name not in widths:
        raise ValueError(
            f"The head `{name}` of {owner} is not a Linear or convolutional layer. Set head=... to the last one."
        )
    leaving = {cut.path: cut.leaving for cut in cuts}
    return [Cut(c.path, c.arriving and leaving[c.arriving], c.leaving and leaving[c.leaving], c.block) for c in cuts]


def entry_slices(module: nn.Module, cuts: list[Cut], units: Units) -> Slices:
    """Return the kept indices of every state entry that is cut; entries that stay whole are left out.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.submodel import entry_slices, first_units, plan_cuts
        >>> net = MLP(4, [6], 2)
        >>> list(entry_slices(net, plan_cuts(net), first_units(0.5)))
        ['fc1.weight', 'fc1.bias', 'fc2.weight']
    """
    slices: Slices = {}
    widths = {path: layer.weight.shape[0] for path, layer in module.named_modules() if _is_layer(layer)}

    def kept(path: str | None, block: int = 1) -> Tensor | None:
        chosen = None if path is None else units(path, widths[path])
        if chosen is None or path is None or len(chosen) == widths[path]:
            return None
        return (chosen[:, None] * block + torch.arange(block)).flatten()

    for cut in cuts:
        layer = module.get_submodule(cut.path)
        arriving, leaving = kept(cut.arriving, cut.block), kept(cut.leaving)
        if getattr(layer, "groups", 1) > 1 or not _is_layer(layer):
            arriving = None
        for name, value in module_state(layer).items():
            index = (leaving, arriving, *[None] * value.ndim)[: value.ndim]
            if any(dimension is not None for dimension in index):
                slices[f"{cut.path}.{name}"] = index
    return slices


def shrink(module: LightningModule, slices: Slices) -> LightningModule:
    """Cut `module` in place, so that every layer holds its kept units only.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.submodel import entry_slices, first_units, plan_cuts, shrink
        >>> net = MLP(4, [6], 2)
        >>> shrink(net, entry_slices(net, plan_cuts(net), first_units(0.5))).fc2
        Linear(in_features=3, out_features=2, bias=True)
    """
    tensors_by_id: dict[int, Tensor] = {}  # by id, so that tied parameters stay tied
    for name, index in slices.items():
        path, _, entry = name.rpartition(".")
        shrink_layer(module.get_submodule(path), entry, index, tensors_by_id)
    return mix(module, SubmodelMixin) if slices else module


def shrink_layer(
    layer: nn.Module, entry: str, index: tuple[Tensor | None, ...], tensors_by_id: dict[int, Tensor] | None = None
) -> None:
    """Cut one entry of a layer in place, and tell the layer its new size.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.wrappers.submodel import shrink_layer
        >>> layer = nn.Linear(4, 2)
        >>> shrink_layer(layer, "weight", (None, torch.arange(3)))
        >>> layer
        Linear(in_features=3, out_features=2, bias=True)
    """
    tensors_by_id = {} if tensors_by_id is None else tensors_by_id
    old = getattr(layer, entry)
    if id(old) not in tensors_by_id:
        new = old.detach()[mesh(index, old.shape)].clone()
        tensors_by_id[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    setattr(layer, entry, tensors_by_id[id(old)])
    _tell_sizes(layer, index)


def _source(widths: dict[str, int], inputs: int, flattens: bool = False) -> tuple[str | None, int]:
    """Return the nearest earlier layer that gives `inputs` numbers, and the inputs per unit of a flattened one."""
    nearest = next(reversed(widths))
    if flattens and inputs % widths[nearest] == 0:
        return nearest, inputs // widths[nearest]
    return next((path for path in reversed(widths) if widths[path] == inputs), None), 1


def _width(norm: nn.Module, path: str, owner: str) -> int:
    if isinstance(norm, nn.GroupNorm | _NormBase):
        return int(norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features)
    shape: tuple[int, ...] = norm.normalized_shape  # type: ignore[assignment]
    if len(shape) != 1:
        raise ValueError(f"`{path}` of {owner} normalises over {shape}, not over channels alone: it cannot be cut.")
    return shape[0]


def _sizes(layer: nn.Module, path: str, owner: str) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs, groups = int(layer.in_channels), int(layer.out_channels), int(layer.groups)  # type: ignore[arg-type]
    if groups > 1 and not groups == inputs == outputs:
        raise ValueError(f"`{path}` of {owner} is a convolution in {groups} groups; only depthwise ones can be cut.")
    return inputs, outputs


def _is_layer(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, *Convolution))


def _tell_sizes(layer: nn.Module, index: tuple[Tensor | None, ...]) -> None:
    """Update the attributes in which a cut layer records its sizes."""
    names = {0: ("out_features", "out_channels", "num_features", "num_channels"), 1: ("in_features", "in_channels")}
    depthwise = getattr(layer, "groups", 1) > 1
    for dimension, kept in enumerate(index[:2]):
        if kept is None:
            continue
        for name in names[dimension] + (("in_channels", "groups") if depthwise else ()):
            if hasattr(layer, name):
                setattr(layer, name, len(kept))
        if hasattr(layer, "normalized_shape"):
            layer.normalized_shape = (len(kept),)  # type: ignore[assignment]
        if isinstance(layer, nn.GroupNorm):
            layer.num_groups = math.gcd(layer.num_groups, len(kept))


def verify(module: LightningModule, cuts: list[Cut], units: Units, run: Callable[[LightningModule], Tensor]) -> None:
    """Check that the sub-model computes what the full model does when all but the kept units are silent.

    Both are copies with random weights and without normalisation. `module` stays as it is.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.submodel import first_units, plan_cuts
        >>> from fedlightning.wrappers.submodel import verify
        >>> module = Classifier(MLP(4, [6], 2), num_classes=2)
        >>> verify(module, plan_cuts(module), first_units(0.5), lambda net: net(torch.ones(1, 4)).sum())
    """
    full, owner = copy.deepcopy(module).eval(), user_class(module).__name__
    slices = entry_slices(full, cuts, units)
    way_out = "Only chains of linear and convolutional layers, with residual sums, have sub-models"
    with torch.no_grad(), isolated("verify"), muted(full):
        for parameter in full.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * scale)
        small = shrink(copy.deepcopy(full), slices)
        for name, parameter in full.named_parameters(remove_duplicate=False):
            if name in slices:
                at = mesh(slices[name], parameter.shape)
                parameter.copy_(torch.zeros_like(parameter).index_put(at, parameter[at]))
        for model in (full, small):
            for path, layer in list(model.named_modules()):
                if isinstance(layer, NORMS):
                    parent, _, child = path.rpartition(".")
                    setattr(model.get_submodule(parent), child, nn.Identity())
        expected = run(full)
        try:
            with muted(small):
                output = run(small)
        except Exception as error:
            raise ValueError(f"A sub-model of {owner} does not run: {error}. {way_out}.") from error
    if not torch.allclose(output, expected, rtol=1e-3, atol=1e-4):
        raise ValueError(f"A sub-model of {owner} does not compute what its units do in the full model. {way_out}.")
