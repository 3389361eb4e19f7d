"""Layers from input to output, and what is made of them: the head of a model, groups of its entries.

The order in which the parts of a module are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from fedlightning.layers.leaves import Layer, Leaf, leaves_of
from fedlightning.layers.names import state_names, unknown_name


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
        >>> from fedlightning.layers import ForwardOrder
        >>> from fedlightning.models import MLP
        >>> net = MLP(4, [3], 2)
        >>> order = ForwardOrder(net)
        >>> _ = net.fc2(net.fc1(torch.zeros(1, 4)))
        >>> order.names()
        ['fc1', 'fc2']
    """

    def __init__(self, module: nn.Module) -> None:
        self._leaves = leaves_of(module)
        self._called_names: dict[str, None] = {}
        hooks = ((child, self._called(path)) for path, child in module.named_modules())
        self._handles = [child.register_forward_pre_hook(hook) for child, hook in hooks]

    def _called(self, path: str) -> Callable[..., None]:
        around = [
            leaf for leaf in self._leaves if leaf.container and (not leaf.path or path.startswith(leaf.path + "."))
        ]
        called = [leaf for leaf in self._leaves if leaf.path == path]
        mine = list(dict.fromkeys(leaf.layer.name for leaf in (*around, *called)))
        return lambda *_: self._called_names.update(
            dict.fromkeys(name for name in mine if name not in self._called_names)
        )

    def names(self) -> list[str]:
        """Stop watching and return the names, as `ordered_layers` takes them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return list(self._called_names) + [
            leaf.layer.name for leaf in self._leaves if leaf.layer.name not in self._called_names
        ]


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
        >>> from fedlightning.layers import ordered_layers
        >>> from fedlightning.models import DigitsCNN
        >>> for layer in ordered_layers(DigitsCNN(norm="batch")):
        ...     print(layer.name, layer.pieces)
        conv1 ('conv1', 'norm1')
        conv2 ('conv2', 'norm2')
        fc ('fc',)
    """
    leaf_by_name = {leaf.layer.name: leaf for leaf in leaves_of(module)}
    if order is not None:
        for name in order:
            if name not in leaf_by_name:
                raise ValueError(unknown_name(name, leaf_by_name, "is not a layer of " + type(module).__name__))
        leaf_by_name = _rearranged(leaf_by_name, list(dict.fromkeys(order)))
    layers: list[Layer] = []
    early: list[Layer] = []  # statistics of norms without parameters, before every layer: they join the first
    for leaf in leaf_by_name.values():
        if leaf.joins and layers:
            layers[-1] = _joined(layers[-1], leaf.layer)
        elif leaf.layer.parameters:
            layers.append(_joined(leaf.layer, *early))
            early = []
        else:
            early.append(leaf.layer)
    return layers


def head_names(module: nn.Module, num_layers: int = 1, order: Sequence[str] | None = None) -> list[str]:
    """Return the state names of the last `num_layers` layers: the head of a split model.

    Args:
        module: Any module.
        num_layers: Layers in the head. Normalisation layers that joined them are included.
        order: Order of the layers, as in `ordered_layers`.

    Raises:
        ValueError: If `num_layers` is not between 1 and the number of layers.

    Example:
        >>> from fedlightning.layers import head_names
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
        >>> from fedlightning.layers import partition
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


def _joined(layer: Layer, *others: Layer) -> Layer:
    parts = (layer, *others)
    return Layer(
        layer.name,
        tuple(name for part in parts for name in part.parameters),
        tuple(name for part in parts for name in part.buffers),
        tuple(name for part in parts for name in part.pieces),
    )


def _rearranged(leaf_by_name: dict[str, Leaf], order: list[str]) -> dict[str, Leaf]:
    """Return the leaves in `order`. A norm left out follows its predecessor in registration, other leaves go last."""
    listed = set(order)
    previous: str | None = None
    for name, leaf in leaf_by_name.items():
        if name not in listed:
            order.insert(order.index(previous) + 1 if leaf.joins and previous is not None else len(order), name)
        previous = name
    return {name: leaf_by_name[name] for name in order}
