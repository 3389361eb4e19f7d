"""Networks as ordered lists of blocks: a layer with parameters and what follows it, each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import isolated
from fedlightning.layers import ForwardOrder, Layer, ordered_layers
from fedlightning.wrappers import frozen_buffers, muted

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WAY_OUT = (
    "Give the network a method blocks() that returns its modules in order, each taking what the one before returns"
)


class Block(nn.Module):
    """A layer with parameters and the operations without any that follow it, up to the next layer.

    Operations in `forward` have no module of their own, so the block runs the network's own `forward`: layers before it
    are stubs that return zeros, its layer is given the block's input, and the run ends where the next layer would begin.
    Its parameters and buffers are those of its layer.

    Args:
        shell: The network with stubs in the place of other layers; or the user's module for the block.
        entry: The place at which the input comes in; `None`: it is the network's input.
        whole: Shape of one sample of the network's input.

    Attributes:
        kind: `"conv"`, `"fc"` or `"other"`.
        depth: Its place in its network, from 0.
        rank: 0 up to the network's last convolution, 2 for the last block, 1 between them.
        into: Shape of one sample of its input.
        out: Shape of one sample of its output.
    """

    kind: str
    depth: int
    rank: int
    into: tuple[int, ...]
    out: tuple[int, ...]

    def __init__(self, shell: nn.Module, entry: _Entry | None, whole: tuple[int, ...]) -> None:
        super().__init__()
        self.shell = shell
        self.whole = whole
        self._entry = [] if entry is None else [entry]  # in a list: it is registered in the shell

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the next layer, or the network's output."""
        fed = x
        for entry in self._entry:
            entry.given, fed = x, x.new_zeros(len(x), *self.whole)
        try:
            out: Tensor = self.shell(fed)
        except _ReachedError as reached:
            out = reached.value
        finally:
            for entry in self._entry:
                entry.given = None
        return out

    @property
    def is_last(self) -> bool:
        """Whether it gives the logits of its network."""
        return self.rank == 2


def cut(module: LightningModule, x: Tensor) -> list[Block]:
    """Return the blocks of a network, in order. They hold copies of its parameters, or the modules of its `blocks()`.

    Example:
        >>> import torch
        >>> from fedlightning.models import Classifier, MnistCNN
        >>> x = torch.zeros(2, 1, 8, 8)
        >>> for block in cut(Classifier(MnistCNN(input_size=8, hidden=6, channels=[2, 4]), num_classes=10), x):
        ...     print(block.kind, block.into, block.out)
        conv (1, 8, 8) (2, 4, 4)
        conv (2, 4, 4) (16,)
        fc (16,) (6,)
        fc (6,) (10,)
    """
    whole = tuple(x.shape[1:])
    own = _own_blocks(module)
    made = [Block(part, None, whole) for part in own] if own else _by_layers(module, x)
    kinds = [_kind(block, bool(own)) for block in made]
    last = max((depth for depth, kind in enumerate(kinds) if kind == "conv"), default=-1)
    for depth, (block, kind) in enumerate(zip(made, kinds, strict=True)):
        block.kind, block.depth = kind, depth
        block.rank = 2 if block is made[-1] else int(depth > last)
        block.into = tuple(x.shape[1:])
        with _looking(block):
            x = block(x)
        if not isinstance(x, Tensor) or x.ndim < 2:
            raise ValueError(f"block {depth} gives no rows, one for each sample, but a {type(x).__name__}. {WAY_OUT}")
        block.out = tuple(x.shape[1:])
    return made


def check_cut(owner: str, module: LightningModule, x: Tensor) -> list[Block]:
    """Return the blocks of a network, if together they give what the network gives.

    The comparison is made with noise on all parameters: layers that begin at zero could hide what is missing.
    """
    shaken = copy.deepcopy(module)
    with torch.no_grad(), isolated("blocks"):
        for parameter in shaken.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    name = type(module).__name__
    try:
        blocks, again = cut(shaken, x), x
        for block in blocks:
            with _looking(block):
                again = block(again)
        with _looking(shaken):
            wanted = shaken(x)
        if again.shape != wanted.shape or not torch.allclose(again, wanted, rtol=1e-3, atol=1e-4):
            raise ValueError(
                "its layers, put together one after another, give other outputs than the network (a layer's input depends "
                f"on more than the layer before it, as in residual networks). {WAY_OUT}"
            )
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{owner} cannot take {name} apart into blocks: {str(error).rstrip('.')}.") from error
    return blocks


# -- how a network is taken apart ------------------------------------------------------------------------------------------
class _ReachedError(Exception):
    """The next layer is reached: carries its input."""

    def __init__(self, value: Tensor) -> None:
        super().__init__("the next layer is reached")
        self.value = value


class _Entry(nn.Module):
    """A block's layer: it is called with the block's input, whatever the network gives it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.given: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *rest = args
        return self.layer(first if self.given is None else self.given, *rest, **kwargs)


class _Stub(nn.Module):
    """The place of a layer of another block, before this one: zeros of its output's shape."""

    def __init__(self, path: str, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        self.path, self.shape = path, shape

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.shape is None:
            raise ValueError(f"'{self.path}' is called in training only. {WAY_OUT}.")
        return x.new_zeros(len(x), *self.shape)


class _Exit(nn.Module):
    """The place of the next block's layer: ends the run."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise _ReachedError(x)


def _by_layers(module: LightningModule, x: Tensor) -> list[Block]:
    """Return a block for each layer that a forward pass calls, as :func:`ordered_layers` finds them."""
    with _looking(module):
        called = _Calls(module, x)
    layers = [layer for layer in called.layers if any(path in called.outputs for path in layer.pieces)]
    entries = [next(path for path in called.outputs if path in layer.pieces) for layer in layers]
    if not layers:
        raise ValueError("no layer with parameters is called")
    blocks = []
    for place, layer in enumerate(layers):
        following = entries[place + 1] if place + 1 < len(layers) else None
        memo: dict[int, Any] = {}
        for other in called.layers:
            for path in other.pieces if other is not layer else ():
                stub = _Exit() if path == following else _Stub(path, called.outputs.get(path))
                memo[id(module.get_submodule(path))] = stub
        entry = None
        if place:
            piece = module.get_submodule(entries[place])
            entry = memo[id(piece)] = _Entry(copy.deepcopy(piece))
        blocks.append(Block(copy.deepcopy(module, memo), entry, tuple(x.shape[1:])))
    return blocks


class _Calls:
    """Watches one forward pass: the layers in their order and, by path in order of the calls, the output's shape."""

    def __init__(self, module: LightningModule, x: Tensor) -> None:
        self.outputs: dict[str, tuple[int, ...]] = {}
        paths = [path for layer in ordered_layers(module) for path in layer.pieces]
        modules = dict(module.named_modules())
        held = next((path for path in paths if path not in modules), None)
        if held is not None:
            raise ValueError(f"parameters are held outside of layers ('{held}'). {WAY_OUT}")
        order, handles = ForwardOrder(module), []
        try:
            for path in paths:
                handles.append(modules[path].register_forward_hook(self._note(path, len(x))))
            module(x)
        finally:
            names = order.names()
            for handle in handles:
                handle.remove()
        self.layers: list[Layer] = ordered_layers(module, names)

    def _note(self, path: str, samples: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if path in self.outputs:
                raise ValueError(f"'{path}' is called twice. {WAY_OUT}")
            seen = (*args[:1], output)
            if len(seen) < 2 or not all(isinstance(it, Tensor) and it.ndim > 1 and len(it) == samples for it in seen):
                raise ValueError(f"'{path}' does not turn one tensor into another, sample by sample. {WAY_OUT}")
            self.outputs[path] = tuple(output.shape[1:])

        return hook


def _own_blocks(module: LightningModule) -> list[nn.Module]:
    """Return what the network's own `blocks()` gives, or nothing."""
    for owner in (module, *module.children()):
        method = getattr(owner, "blocks", None)
        if callable(method) and not isinstance(method, nn.Module):
            found = list(method())
            if not found or not all(isinstance(part, nn.Module) for part in found):
                raise ValueError(f"{type(owner).__name__}.blocks() must return modules, one at least")
            return found
    return []


def _kind(block: Block, own: bool) -> str:
    """Return what operation a block is."""
    parts = [part for part in block.modules() if own or any(True for _ in part.parameters(recurse=False))]
    if any(isinstance(part, CONVOLUTIONS) for part in parts):
        return "conv"
    return "fc" if any(isinstance(part, nn.Linear) for part in parts) else "other"


@contextmanager
def _looking(module: nn.Module) -> Iterator[None]:
    """Within the block, a module runs in eval mode without gradients and leaves no trace."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), isolated("blocks"), muted(module), frozen_buffers(module):
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
