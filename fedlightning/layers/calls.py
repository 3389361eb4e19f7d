"""The order in which the parts of a module are called."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedlightning.layers.leaves import leaves_of


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
