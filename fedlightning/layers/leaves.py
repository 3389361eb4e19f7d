"""The parts of a module that are one operation each: what a piece is, and what a normalisation layer is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

_JOINED = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)


@dataclass(frozen=True)
class Layer:
    """One layer: its name and the state entries that belong to it.

    Attributes:
        name: A module path (`"net.conv1"`), or what a container holds directly (`"encoder.cls_token+pos_embed"`).
        parameters: Names of its parameters, as in `state_dict`.
        buffers: Names of its buffers, as in `state_dict`.
        pieces: Names of the modules in it: its own, then the normalisation layers that joined.

    Example:
        >>> from fedlightning.layers import Layer, ordered_layers
        >>> from fedlightning.models import MLP
        >>> ordered_layers(MLP(4, [3], 2))[0]
        Layer(name='fc1', parameters=('fc1.weight', 'fc1.bias'), buffers=(), pieces=('fc1',))
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Leaf:
    """A part of a layer before normalisation layers are joined: the module at `path`, or what it holds directly."""

    layer: Layer
    path: str  # path of the module whose call uses it
    container: bool  # holds parameters beside children that are layers: used when any of its children is called
    joins: bool


def pieces(module: nn.Module) -> list[Layer]:
    """Return every piece with parameters as a layer of its own, in registration order.

    These are what `ordered_layers` orders and joins: normalisation layers are still separate.

    Args:
        module: Any module.

    Example:
        >>> from fedlightning.layers import pieces
        >>> from fedlightning.models import DigitsCNN
        >>> [piece.name for piece in pieces(DigitsCNN(norm="batch"))]
        ['conv1', 'norm1', 'conv2', 'norm2', 'fc']
    """
    return [leaf.layer for leaf in leaves_of(module)]


def leaves_of(module: nn.Module) -> list[Leaf]:
    """Return the parts with parameters in registration order, each tied parameter in its first part only."""
    leaves: list[Leaf] = []
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    inside: set[int] = set()  # modules that belong to a piece already taken, or to a metric
    for path, child in module.named_modules():
        if id(child) in inside:
            continue
        if _is_metric(child):
            inside.update(map(id, child.modules()))
            continue
        whole = _is_whole(child)
        parameters = [names.pop(id(p)) for p in child.parameters(recurse=whole) if id(p) in names]
        if whole:
            inside.update(map(id, child.modules()))
        joins = isinstance(child, _JOINED) or _looks_like_norm(child)
        pieces = child.named_modules(prefix=path) if whole else [(path, child)]
        buffers = [name for piece_path, piece in pieces for name in _buffers(piece_path, piece)]
        if not parameters and not (joins and buffers):
            continue
        container = not whole and any(True for part in child.children() for _ in part.parameters())
        prefix = path + "." if path else ""
        name = prefix + "+".join(p.removeprefix(prefix) for p in parameters) if container or not path else path
        # its owner is called, it is not
        listed = isinstance(child, (nn.ParameterList, nn.ParameterDict)) and bool(path)
        caller = path.rpartition(".")[0] if listed else path
        layer = Layer(name, tuple(parameters), tuple(buffers), (name,))
        leaves.append(Leaf(layer, caller, container or listed, joins))
    return leaves


def _is_whole(module: nn.Module) -> bool:
    """Return True for one operation with parameters in itself and perhaps in children: a torch or parametrised one."""
    if parametrize.is_parametrized(module) or isinstance(module, nn.MultiheadAttention) or _is_adapted(module):
        return True
    return bool(module._parameters) and type(module).__module__.startswith("torch.nn.")


def _is_adapted(module: nn.Module) -> bool:
    """Return True for a layer of peft around another one: what it adds means nothing without the rest of it."""
    return "base_layer" in module._modules and any(
        kind.__module__.split(".")[0] == "peft" for kind in type(module).__mro__
    )


def _is_metric(module: nn.Module) -> bool:
    return any(kind.__module__.split(".")[0] == "torchmetrics" for kind in type(module).__mro__)


def _looks_like_norm(module: nn.Module) -> bool:
    """Return True for norms from outside torch: running statistics, or vectors only and a class name with "norm"."""
    if any(True for child in module.children() for _ in child.parameters()):
        return False
    if {"running_mean", "running_var"} <= module._buffers.keys():
        return True
    vectors = [p.ndim <= 1 for p in module.parameters(recurse=False)] if "norm" in type(module).__name__.lower() else []
    return bool(vectors) and all(vectors)


def _buffers(path: str, module: nn.Module) -> list[str]:
    """Return the names of the buffers that `module` holds directly and saves."""
    unsaved = module._non_persistent_buffers_set
    kept = (name for name, buffer in module._buffers.items() if buffer is not None and name not in unsaved)
    return [f"{path}.{name}" if path else name for name in kept]
