"""Ordered dropout inside a module: in training its layers compute with the first of their units only, as many as asked for.

The parameters stay whole. A narrower layer reads the first rows and columns of them, so gradients of the others are zero,
and its optimizer and state are the whole layer's. Running statistics of the units in use move in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedlightning.tensors import module_state
from fedlightning.wrappers.mixing import Mixin, mix
from fedlightning.wrappers.submodel import Cut, Units, entry_slices, shrink_layer


class NarrowedMixin(Mixin):
    """On a layer: in training it computes at the width that is set, if one is."""

    wraps = ("forward",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        widths: Widths = vars(self)["ordered_widths"]
        if widths.now is None or not self.training:
            return call(*args, **kwargs)
        small, sizes = widths.layers[widths.now][vars(self)["ordered_path"]]
        small.train(self.training)
        entries = dict(self.named_parameters()) | dict(self.named_buffers())
        return functional_call(
            small, {entry: prefix(entries[entry], size) for entry, size in sizes.items()}, args, kwargs
        )


class Widths:
    """The widths at which a module can compute, and the one that is set.

    Args:
        module: Its layers are mixed with :class:`NarrowedMixin`, in place.
        cuts: Cuts of the module, from `plan_cuts`.
        units: By width, the units to use; each must be a prefix (`first_units`).

    Attributes:
        now: The width that is set; `None`: every layer computes with all its units.
        layers: By width and path, the layer at that width (its own values are never used) and the sizes of its entries.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.submodel import first_units, plan_cuts
        >>> from fedlightning.wrappers.widths import Widths
        >>> net = MLP(4, [6], 2)
        >>> widths = Widths(net, plan_cuts(net), {0.5: first_units(0.5)})
        >>> with widths.at(0.5):
        ...     net.fc1(torch.ones(1, 4)).shape, net(torch.ones(1, 4)).shape
        (torch.Size([1, 3]), torch.Size([1, 2]))
    """

    def __init__(self, module: nn.Module, cuts: list[Cut], units: dict[float, Units]) -> None:
        self.now: float | None = None
        self.layers: dict[float, dict[str, tuple[nn.Module, dict[str, tuple[int, ...]]]]] = {}
        for width, chosen in units.items():
            slices = entry_slices(module, cuts, chosen)
            self.layers[width] = {}
            for cut in cuts:
                small = copy.deepcopy(module.get_submodule(cut.path))
                for entry in module_state(small):
                    if f"{cut.path}.{entry}" in slices:
                        shrink_layer(small, entry, slices[f"{cut.path}.{entry}"])
                sizes = {entry: tuple(value.shape) for entry, value in module_state(small).items()}
                self.layers[width][cut.path] = small, sizes
        for cut in cuts:
            layer = mix(module.get_submodule(cut.path), NarrowedMixin)
            vars(layer)["ordered_widths"], vars(layer)["ordered_path"] = self, cut.path

    @contextmanager
    def at(self, width: float | None) -> Iterator[None]:
        """Set a width within a block."""
        before, self.now = self.now, width
        try:
            yield
        finally:
            self.now = before


def prefix(value: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return a view of the first elements in every dimension.

    Example:
        >>> import torch
        >>> from fedlightning.wrappers.widths import prefix
        >>> prefix(torch.arange(6).view(2, 3), (1, 2))
        tensor([[0, 1]])
    """
    return value[tuple(slice(length) for length in size)] if value.ndim else value
