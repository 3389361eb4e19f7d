"""A module as a list of layers, for algorithms that decide layer by layer what is shared.

Layer-wise and partial-sharing algorithms speak of "layer l of L". PyTorch has no such notion: it has a tree of modules
and a flat `state_dict`. This file defines one, by module types and module paths, never by parts of names:

* Every leaf module with parameters is one layer. A module that is one operation but consists of several modules is one
  layer too (`nn.MultiheadAttention` with its `out_proj`, an LSTM, a module under `torch.nn.utils.parametrize`).
* Normalisation layers and `nn.PReLU` join the layer before them, with their buffers. One that comes before everything
  else is a layer by itself.
* Parameters that a container holds directly (`cls_token`, `pos_embed`) form one layer, before its children.
* A tied parameter belongs to the layer that registered it first, under the name that `named_parameters()` gives it.
* Metrics, other modules without parameters, and buffers that are not in `state_dict` are ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
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
        >>> from fedlightning.algorithm import Layer, ordered_layers
        >>> from fedlightning.models import MLP
        >>> ordered_layers(MLP(4, [3], 2))[0]
        Layer(name='fc1', parameters=('fc1.weight', 'fc1.bias'), buffers=(), pieces=('fc1',))
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()


def ordered_layers(module: nn.Module, order: Sequence[str] | None = None) -> list[Layer]:
    """Return the layers of a module from input to output.

    Args:
        module: Any module. Frozen parameters are included like all others.
        order: Names as `forward_order` returns them. Pieces that it leaves out follow in registration order, except
            that a normalisation layer stays behind its predecessor. `None` means registration order, the order of
            `state_dict`.

    Raises:
        ValueError: If a name in `order` is not a piece with parameters of `module`.

    Example:
        >>> from fedlightning.algorithm import ordered_layers
        >>> from fedlightning.models import DigitsCNN
        >>> for layer in ordered_layers(DigitsCNN(norm="batch")):
        ...     print(layer.name, layer.pieces)
        conv1 ('conv1', 'norm1')
        conv2 ('conv2', 'norm2')
        fc ('fc',)
    """
    leaves = {leaf.layer.name: leaf for leaf in _leaves(module)}
    if order is not None:
        for name in order:
            if name not in leaves:
                raise ValueError(_unknown(name, leaves, "is no layer of " + type(module).__name__))
        leaves = _rearranged(leaves, list(dict.fromkeys(order)))
    layers: list[Layer] = []
    early: list[Layer] = []  # statistics of norms without parameters, before every layer: they join the first
    for leaf in leaves.values():
        if leaf.joins and layers:
            layers[-1] = _joined(layers[-1], leaf.layer)
        elif leaf.layer.parameters:
            layers.append(_joined(leaf.layer, *early))
            early = []
        else:
            early.append(leaf.layer)
    return layers


def pieces(module: nn.Module) -> list[Layer]:
    """Return every piece with parameters as a layer of its own, in registration order.

    These are what `ordered_layers` orders and joins: normalisation layers are still separate.

    Args:
        module: Any module.

    Example:
        >>> from fedlightning.algorithm import pieces
        >>> from fedlightning.models import DigitsCNN
        >>> [piece.name for piece in pieces(DigitsCNN(norm="batch"))]
        ['conv1', 'norm1', 'conv2', 'norm2', 'fc']
    """
    return [leaf.layer for leaf in _leaves(module)]


class ForwardOrder:
    """A recorder of the order in which the pieces of a module are first called, normalisation layers included.

    Create it, run the module in any way, then read `names`. Pieces that were not called as modules follow in
    registration order. Parameters that a container holds (or a `ParameterList` in it) count as used when the container
    or the first of its children is called. Their true place cannot be seen from outside: pass an explicit order if it
    matters.

    Args:
        module: The module to watch, until `names` is called.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import ForwardOrder
        >>> from fedlightning.models import MLP
        >>> net = MLP(4, [3], 2)
        >>> order = ForwardOrder(net)
        >>> _ = net.fc2(net.fc1(torch.zeros(1, 4)))
        >>> order.names()
        ['fc1', 'fc2']
    """

    def __init__(self, module: nn.Module) -> None:
        self._leaves = _leaves(module)
        self._seen: dict[str, None] = {}
        hooks = ((child, self._called(path)) for path, child in module.named_modules())
        self._handles = [child.register_forward_pre_hook(hook) for child, hook in hooks]

    def _called(self, path: str) -> Callable[..., None]:
        around = [
            leaf for leaf in self._leaves if leaf.container and (not leaf.path or path.startswith(leaf.path + "."))
        ]
        own = [leaf for leaf in self._leaves if leaf.path == path]
        mine = list(dict.fromkeys(leaf.layer.name for leaf in (*around, *own)))
        return lambda *_: self._seen.update(dict.fromkeys(name for name in mine if name not in self._seen))

    def names(self) -> list[str]:
        """Stop watching and return the names, as `ordered_layers` takes them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return list(self._seen) + [leaf.layer.name for leaf in self._leaves if leaf.layer.name not in self._seen]


def forward_order(module: nn.Module, run: Callable[[], object]) -> list[str]:
    """Return the names of the pieces of `module` in the order in which `run()` first calls them; see `ForwardOrder`.

    Args:
        module: The module to watch.
        run: Runs the module. It is called once; gradients, buffers and random generators that it changes stay changed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.layers import forward_order
        >>> net = nn.ModuleDict({"head": nn.Linear(2, 1), "body": nn.Linear(2, 2)})
        >>> forward_order(net, lambda: net["head"](net["body"](torch.zeros(1, 2))))
        ['body', 'head']
    """
    order = ForwardOrder(module)
    try:
        run()
    finally:
        names = order.names()
    return names


def head_names(module: nn.Module, num_layers: int = 1, order: Sequence[str] | None = None) -> list[str]:
    """Return the state names of the last `num_layers` layers: the head of a split model.

    Args:
        module: Any module.
        num_layers: Layers in the head. Normalisation layers that joined them are included.
        order: Order of the layers, as in `ordered_layers`.

    Raises:
        ValueError: If `num_layers` is not between 1 and the number of layers.

    Example:
        >>> from fedlightning.algorithm import head_names
        >>> from fedlightning.models import MLP
        >>> head_names(MLP(4, [3], 2))
        ['fc2.weight', 'fc2.bias']
    """
    layers = ordered_layers(module, order)
    if not 1 <= num_layers <= len(layers):
        raise ValueError(
            f"A head of {num_layers} layers cannot be cut from {type(module).__name__}, which has {len(layers)}: "
            f"{', '.join(layer.name for layer in layers)}. Choose from 1 to {len(layers)}."
        )
    return [name for layer in layers[-num_layers:] for name in state_names(layer)]


def partition(module: nn.Module) -> dict[str, list[str]]:
    """Divide the state of a module into groups: its layers by name, in order, then the rest under `""`.

    Every entry is in exactly one group. Other names of a tied parameter go with the layer that registered it first. The
    rest is what belongs to no layer, such as buffers of modules without parameters.

    Args:
        module: Any module.

    Example:
        >>> from fedlightning.algorithm import partition
        >>> from fedlightning.models import MLP
        >>> partition(MLP(4, [3], 2))
        {'fc1': ['fc1.weight', 'fc1.bias'], 'fc2': ['fc2.weight', 'fc2.bias']}
    """
    layers = ordered_layers(module)
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    layer_of = {name: layer.name for layer in layers for name in state_names(layer)}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first[id(parameter)] in layer_of:
            layer_of.setdefault(name, layer_of[first[id(parameter)]])
    groups: dict[str, list[str]] = {name: [] for name in (*(layer.name for layer in layers), "")}
    for name in module.state_dict():
        groups[layer_of.get(name, "")].append(name)
    return {group: names for group, names in groups.items() if names}


def expand(names: Iterable[str], available: Iterable[str]) -> list[str]:
    """Return exact names for a list of names and module paths, in the order of `available` and each once.

    `"layer1"` (or `"layer1."`) means everything inside the module `layer1` and nothing inside `layer10`.

    Args:
        names: Exact `state_dict` names or module paths; one or several.
        available: The names to choose from.

    Raises:
        ValueError: If an entry matches nothing. The message names it and close matches.

    Example:
        >>> from fedlightning.algorithm import expand
        >>> expand("fc1", ["fc1.weight", "fc1.bias", "fc10.weight"])
        ['fc1.weight', 'fc1.bias']
    """
    pool = list(dict.fromkeys(available))
    chosen: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        path = name.removesuffix(".")
        found = [candidate for candidate in pool if candidate == path or (path and candidate.startswith(path + "."))]
        if not found:
            paths = {full.rsplit(".", cut)[0] for full in pool for cut in range(full.count(".") + 1)}
            raise ValueError(_unknown(name, sorted(paths), "is neither a name in the state nor a module path in it"))
        chosen.update(found)
    return [name for name in pool if name in chosen]


def state_names(layer: Layer) -> list[str]:
    """Return the names of everything in a layer, parameters then buffers, as in `state_dict`.

    Args:
        layer: A layer from `ordered_layers` or `pieces`.

    Example:
        >>> from fedlightning.algorithm import ordered_layers, state_names
        >>> from fedlightning.models import MLP
        >>> state_names(ordered_layers(MLP(4, [3], 2))[-1])
        ['fc2.weight', 'fc2.bias']
    """
    return [*layer.parameters, *layer.buffers]


def as_names(names: str | Iterable[str] | None) -> list[str]:
    """Return names of entries or modules as a list.

    Args:
        names: One name, several, or `None` for none.

    Example:
        >>> from fedlightning.algorithm import as_names
        >>> as_names("net.head"), as_names(["a", "b"]), as_names(None)
        (['net.head'], ['a', 'b'], [])
    """
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(names)


@dataclass(frozen=True)
class _Leaf:
    """A part of a layer before normalisation layers are joined: the module at `path`, or what it holds directly."""

    layer: Layer
    path: str  # path of the module whose call uses it
    container: bool  # holds parameters beside children that are layers: used when any of its children is called
    joins: bool


def _joined(layer: Layer, *others: Layer) -> Layer:
    parts = (layer, *others)
    return Layer(
        layer.name,
        tuple(name for part in parts for name in part.parameters),
        tuple(name for part in parts for name in part.buffers),
        tuple(name for part in parts for name in part.pieces),
    )


def _unknown(name: str, known: Iterable[str], what: str) -> str:
    """Return the sentence for a name that does not exist, with close matches."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = "Close matches" if close else "There are"
    return f"{name!r} {what}. {hint}: {', '.join(map(repr, close or known[:10])) or 'none at all'}."


def _rearranged(leaves: dict[str, _Leaf], order: list[str]) -> dict[str, _Leaf]:
    """Return `leaves` in `order`. A norm left out follows its predecessor in registration, other leaves go last."""
    listed = set(order)
    previous: str | None = None
    for name, leaf in leaves.items():
        if name not in listed:
            order.insert(order.index(previous) + 1 if leaf.joins and previous is not None else len(order), name)
        previous = name
    return {name: leaves[name] for name in order}


def _leaves(module: nn.Module) -> list[_Leaf]:
    """Return the parts with parameters in registration order, each tied parameter in its first part only."""
    leaves: list[_Leaf] = []
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    inside: set[int] = set()  # modules that belong to a piece already taken, or to a metric
    for path, child in module.named_modules():
        if id(child) in inside:
            continue
        if _is_metric(child):
            inside.update(map(id, child.modules()))
            continue
        whole = _is_whole(child)
        parameters = [own.pop(id(p)) for p in child.parameters(recurse=whole) if id(p) in own]
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
        listed = isinstance(child, (nn.ParameterList, nn.ParameterDict)) and bool(
            path
        )  # its owner is called, it is not
        caller = path.rpartition(".")[0] if listed else path
        layer = Layer(name, tuple(parameters), tuple(buffers), (name,))
        leaves.append(_Leaf(layer, caller, container or listed, joins))
    return leaves


def _is_whole(module: nn.Module) -> bool:
    """Return True for one operation with parameters in itself and perhaps in children: a torch or parametrised one."""
    if parametrize.is_parametrized(module) or isinstance(module, nn.MultiheadAttention):
        return True
    return bool(module._parameters) and type(module).__module__.startswith("torch.nn.")


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
