"""A module seen as a list of layers, for algorithms that decide layer by layer what is shared.

Layer-wise and partial-sharing algorithms all speak of "layer l of L". PyTorch has no such
notion: it has a tree of modules, and a flat state_dict. This file fixes one, by module type and module path, never by
parts of names:

* one layer per leaf module that holds parameters; a module that is one operation though it is made of several is one
  layer (``nn.MultiheadAttention`` with its ``out_proj``, an LSTM, a module under ``torch.nn.utils.parametrize``);
* normalisation layers (and ``nn.PReLU``) are no layers of their own: they join the layer before them, with their
  buffers; only one that comes before everything else stands alone;
* parameters that a container holds directly (``cls_token``, ``pos_embed``) form one layer, before its children;
* a tied parameter belongs to the layer that registered it first, under the name that ``named_parameters()`` gives it;
* metrics and other modules without parameters are not looked at, nor are buffers that state_dict leaves out.
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
    """One layer.

    Attributes:
        name: a module path (``"net.conv1"``), or what a container holds itself (``"encoder.cls_token+pos_embed"``).
        parameters: names as in ``state_dict``.
        buffers: names as in ``state_dict``.
        pieces: names of the modules in it: its own, then the normalisation layers that joined.
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Leaf:
    """A piece of a layer before normalisation layers are joined: the module at ``path``, or what it holds directly."""

    layer: Layer
    path: str  # of the module whose call uses it
    container: bool  # holds parameters beside children that are layers: runs when any of its children does
    joins: bool


def as_names(names: str | Iterable[str] | None) -> list[str]:
    """Return names of entries or modules as a list.

    Args:
        names: One name, several, or `None` for none.

    Example:
        >>> as_names("net.head"), as_names(["a", "b"]), as_names(None)
        (['net.head'], ['a', 'b'], [])
    """
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(names)


def state_names(layer: Layer) -> list[str]:
    """Names of everything in ``layer``, parameters then buffers, as in ``state_dict``."""
    return [*layer.parameters, *layer.buffers]


def ordered_layers(module: nn.Module, order: Sequence[str] | None = None) -> list[Layer]:
    """The layers of ``module`` from input to output.

    Args:
        module: any module; frozen parameters are members like all others.
        order: names as :func:`forward_order` returns them; those it leaves out follow in registration order, but a
            norm stays behind its predecessor. ``None`` is registration order, which is the order of ``state_dict``.

    Raises:
        ValueError: a name in ``order`` is no parametrised piece of ``module``.
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
    """What :func:`ordered_layers` orders and joins: every parametrised piece by itself, in registration order."""
    return [leaf.layer for leaf in _leaves(module)]


def _joined(layer: Layer, *others: Layer) -> Layer:
    parts = (layer, *others)
    return Layer(
        layer.name,
        tuple(name for part in parts for name in part.parameters),
        tuple(name for part in parts for name in part.buffers),
        tuple(name for part in parts for name in part.pieces),
    )


class ForwardOrder:
    """Watches a module and notes in which order its parametrised pieces, norms too, are first called.

    ``order = ForwardOrder(module)``, then anything that runs the module, then ``order.names()``. What has not been
    called as a module follows in registration order. Parameters held by a container (or by a ``ParameterList`` in it)
    count as used when the container or the first of its children is called: their true place cannot be seen from
    outside (name it in an explicit order if it matters).
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
        """Stop watching; the names, for :func:`ordered_layers`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return list(self._seen) + [leaf.layer.name for leaf in self._leaves if leaf.layer.name not in self._seen]


def forward_order(module: nn.Module, run: Callable[[], object]) -> list[str]:
    """Names of the parametrised pieces of ``module`` in the order in which ``run()`` first calls them.

    See :class:`ForwardOrder`. ``run`` is called once; what it does to gradients, buffers and generators is its own
    affair.
    """
    order = ForwardOrder(module)
    try:
        run()
    finally:
        names = order.names()
    return names


def head_names(module: nn.Module, num_layers: int = 1, order: Sequence[str] | None = None) -> list[str]:
    """State names of the last ``num_layers`` layers with the norms joined to them: the head of a split model.

    Raises:
        ValueError: ``num_layers`` is not between 1 and the number of layers.
    """
    layers = ordered_layers(module, order)
    if not 1 <= num_layers <= len(layers):
        raise ValueError(
            f"A head of {num_layers} layers cannot be cut from {type(module).__name__}, which has {len(layers)}: "
            f"{', '.join(layer.name for layer in layers)}. Choose from 1 to {len(layers)}."
        )
    return [name for layer in layers[-num_layers:] for name in state_names(layer)]


def partition(module: nn.Module) -> dict[str, list[str]]:
    """Every entry of the state in exactly one group: the layers by name, in order, then the rest under ``""``.

    Other names of a tied parameter go with the layer that registered it first; the rest is what belongs to no layer
    (buffers of modules without parameters, say).
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
    """Turn exact names and module prefixes into exact names, in the order of ``available`` and each once.

    ``"layer1"`` (or ``"layer1."``) means everything inside the module ``layer1`` and nothing inside ``layer10``.

    Args:
        names: exact ``state_dict`` names or module paths.
        available: the names to choose from.

    Raises:
        ValueError: an entry matches nothing; the message names it and what comes close.
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


def _unknown(name: str, known: Iterable[str], what: str) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = "Close matches" if close else "There are"
    return f"{name!r} {what}. {hint}: {', '.join(map(repr, close or known[:10])) or 'none at all'}."


def _rearranged(leaves: dict[str, _Leaf], order: list[str]) -> dict[str, _Leaf]:
    """``leaves`` in ``order``; a norm left out comes after its predecessor in registration, other leaves at the end."""
    listed = set(order)
    previous: str | None = None
    for name, leaf in leaves.items():
        if name not in listed:
            order.insert(order.index(previous) + 1 if leaf.joins and previous is not None else len(order), name)
        previous = name
    return {name: leaves[name] for name in order}


def _leaves(module: nn.Module) -> list[_Leaf]:
    """Parametrised pieces in registration order, tied parameters in the first only."""
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
        listed = isinstance(child, (nn.ParameterList, nn.ParameterDict)) and bool(path)  # never called: its owner is
        caller = path.rpartition(".")[0] if listed else path
        layer = Layer(name, tuple(parameters), tuple(buffers), (name,))
        leaves.append(_Leaf(layer, caller, container or listed, joins))
    return leaves


def _is_whole(module: nn.Module) -> bool:
    """One operation with parameters in itself and perhaps in children: a torch layer, or one under parametrisation."""
    if parametrize.is_parametrized(module) or isinstance(module, nn.MultiheadAttention):
        return True
    return bool(module._parameters) and type(module).__module__.startswith("torch.nn.")


def _is_metric(module: nn.Module) -> bool:
    return any(kind.__module__.split(".")[0] == "torchmetrics" for kind in type(module).__mro__)


def _looks_like_norm(module: nn.Module) -> bool:
    """Norms from outside torch: running statistics, or a class called ...Norm... with vectors only (RMSNorm, say)."""
    if any(True for child in module.children() for _ in child.parameters()):
        return False
    if {"running_mean", "running_var"} <= module._buffers.keys():
        return True
    vectors = [p.ndim <= 1 for p in module.parameters(recurse=False)] if "norm" in type(module).__name__.lower() else []
    return bool(vectors) and all(vectors)


def _buffers(path: str, module: nn.Module) -> list[str]:
    """Names of the buffers that ``module`` holds directly and saves."""
    unsaved = module._non_persistent_buffers_set
    kept = (name for name, buffer in module._buffers.items() if buffer is not None and name not in unsaved)
    return [f"{path}.{name}" if path else name for name in kept]
