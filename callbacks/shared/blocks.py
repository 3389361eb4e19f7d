"""Networks as ordered lists of blocks: a layer with parameters and what follows it, each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import State, isolated
from fedlightning.layers import ForwardOrder, Layer, ordered_layers
from fedlightning.tensors import ties
from fedlightning.wrappers import frozen_buffers, muted

MIN_NORM = 1e-12
TRIES = 200
"""Draws for each candidate that is wanted."""


@dataclass(frozen=True)
class Part:
    """A block of a client's network as the rules see it.

    Attributes:
        client: The client's place among those whose networks are reassembled.
        depth: The block's place in its network.
        rank: 0 up to the network's last convolution, 2 for its last block, 1 between them.
        kind: Its operation: `"conv"`, `"fc"` or `"other"`.
    """

    client: int
    depth: int
    rank: int
    kind: str


def unit_gram(rows: Tensor) -> Tensor:
    """Return the centred Gram matrix of some rows, as a vector of length 1; zeros if all rows are equal."""
    flat = rows.flatten(1).double()
    flat = flat - flat.mean(0)
    top = flat.abs().max()
    if not float(top) > 0:
        return torch.zeros(len(flat) ** 2, dtype=torch.float64)
    flat = flat / top  # fourth powers of small numbers would vanish
    gram = (flat @ flat.T).flatten()
    return gram / gram.norm()


def cka(first: Tensor, second: Tensor) -> float:
    r"""Return the linear CKA of what two blocks give for the same samples, in [0, 1].

    `<K_c, L_c>_F / (||K_c||_F ||L_c||_F)` with `K = X X^T` and the subscript for centring (Kornblith et al., 2019). Turns,
    shifts and scales do not change it. A block that gives the same for all samples has 0 with every other.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 5.0]])
        >>> round(cka(x, 3 * x.flip(1) + 7), 6)
        1.0
    """
    return float((unit_gram(first) @ unit_gram(second)).clamp(0, 1))


def similarities(into: Sequence[Tensor], out: Sequence[Tensor]) -> Tensor:
    """Return `CKA(X_a, X_b) + CKA(Y_a, Y_b)` for all pairs of blocks, `(blocks, blocks)`, fp64."""
    x, y = torch.stack(list(into)), torch.stack(list(out))
    return (x @ x.T).clamp(0, 1) + (y @ y.T).clamp(0, 1)


def grouped(alike: Tensor, count: int, how: Literal["medoids", "means"], seed: int) -> list[int]:
    """Return the group of each block, from 0: each is in exactly one, and no group is empty.

    Example:
        >>> alike = torch.tensor([[2.0, 1.9, 0.1], [1.9, 2.0, 0.1], [0.1, 0.1, 2.0]], dtype=torch.float64)
        >>> grouped(alike, 2, "medoids", 0), grouped(alike, 2, "means", 0)
        ([0, 0, 1], [0, 0, 1])
    """
    from sklearn.cluster import KMeans  # slow to import

    count = min(count, len(alike))
    if how == "means":
        same = ties.representatives(alike)
        each = list(dict.fromkeys(same))  # blocks that are equal stand once, with their number as weight
        values, vectors = torch.linalg.eigh(alike[each][:, each])
        rows = vectors * torch.where(values > MIN_NORM * values.max(), values, torch.zeros_like(values)).sqrt()
        means = KMeans(min(count, len(each)), n_init=10, random_state=seed % 2**32)
        groups = means.fit_predict(rows.numpy(), sample_weight=[same.count(block) for block in each]).tolist()
        labels = [groups[each.index(block)] for block in same]
    else:
        labels = _by_medoids(1 / alike.clamp(min=MIN_NORM), count)
    order = list(dict.fromkeys(labels))
    return [order.index(group) for group in labels]


def _by_medoids(apart: Tensor, count: int) -> list[int]:
    """Return the place of each row's medoid: greedy starts, then the best swap as long as one helps (PAM)."""
    apart = apart.clone().fill_diagonal_(0.0)  # a medoid is in its own group, whoever is as near

    def cost(medoids: Sequence[int]) -> float:
        return float(apart[:, list(medoids)].min(1).values.sum())

    def cheapest(choices: Sequence[list[int]]) -> list[int]:
        return choices[int(ties.first_least(torch.tensor([cost(choice) for choice in choices], dtype=torch.float64)))]

    everybody = range(len(apart))
    medoids: list[int] = []
    for _ in range(count):
        medoids = cheapest([[*medoids, new] for new in everybody if new not in medoids])
    best = cost(medoids)
    while True:
        swaps = [
            [new if it == old else it for it in medoids] for old in medoids for new in everybody if new not in medoids
        ]
        if not swaps or not (swapped := cheapest(swaps)) or cost(swapped) >= best * (1 - ties.CLOSE):
            break
        medoids, best = swapped, cost(swapped)
    medoids.sort()
    nearest = ties.first_least(apart[:, medoids], 1).tolist()
    return [medoids.index(row) if row in medoids else nearest[row] for row in everybody]


def candidates(
    parts: Sequence[Part],
    groups: Sequence[int],
    count: int,
    depths: tuple[int, int],
    required: Sequence[str],
    draw: torch.Generator,
    fits: Callable[[Sequence[int]], bool] = lambda places: True,
) -> list[list[int]]:
    """Draw different candidates: places of blocks, in the order in which they are put together.

    Rules: the number of blocks is within `depths` (of fewer blocks all may be taken); every group has one; every required
    operation is there; the order is the natural one, by rank (convolutional stages, the others, last blocks), then by depth.
    """
    members = [[place for place, group in enumerate(groups) if group == k] for k in range(max(groups) + 1)]
    least = max(min(depths[0], len(parts)), len(members))
    most = max(min(depths[1], len(parts)), least)
    drawn: dict[tuple[int, ...], None] = {}
    for _ in range(TRIES * count):
        if len(drawn) == count:
            break
        chosen = [group[int(torch.randint(len(group), (1,), generator=draw))] for group in members]
        size = int(torch.randint(least, most + 1, (1,), generator=draw))
        others = [place for place in torch.randperm(len(parts), generator=draw).tolist() if place not in chosen]
        chosen += others[: size - len(chosen)]
        places = tuple(sorted(chosen, key=lambda it: (parts[it].rank, parts[it].depth, parts[it].client)))
        if set(required) <= {parts[it].kind for it in places} and places not in drawn and fits(places):
            drawn[places] = None
    return [list(places) for places in drawn]


def nearest_teachers(models: Sequence[Tensor], offered: Sequence[Tensor]) -> list[int]:
    """Return for each model the candidate whose outputs have the largest mean cosine with its own; the first of several.

    Example:
        >>> nearest_teachers([torch.tensor([[1.0, 0.0]])], [torch.tensor([[0.0, 2.0]]), torch.tensor([[3.0, 1.0]])])
        [1]
    """
    table = [[float(F.cosine_similarity(rows.double(), other.double()).mean()) for other in offered] for rows in models]
    return ties.first_largest(torch.tensor(table, dtype=torch.float64), 1).tolist()


def contrastive(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return NT-Xent: of all other samples in both views, each is told from its own other view (SimCLR, Chen et al. 2020).

    Example:
        >>> z = torch.eye(2)
        >>> round(float(contrastive(z, z, 1.0)), 4), round(float(contrastive(z, z.flip(0), 1.0)), 4)
        (0.5514, 1.5514)
    """
    z = F.normalize(torch.cat([first, second]).flatten(1).float(), dim=1)
    alike = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(first))
    return F.cross_entropy(alike, partner)


def view(x: Tensor, noise: float) -> Tensor:
    """Return an augmented view of a batch: noise of `noise` standard deviations; images are shifted besides."""
    seen = x + noise * x.std() * torch.randn_like(x)
    if x.ndim != 4:
        return seen
    high, wide = (max(1, side // 8) for side in x.shape[2:])
    padded = F.pad(seen, (wide, wide, high, high))
    down = torch.randint(2 * high + 1, (len(x),)).to(x.device)[:, None] + torch.arange(x.shape[2], device=x.device)
    along = torch.randint(2 * wide + 1, (len(x),)).to(x.device)[:, None] + torch.arange(x.shape[3], device=x.device)
    every = torch.arange(len(x), device=x.device)[:, None, None]
    return padded.transpose(1, 2).transpose(2, 3)[every, down[:, :, None], along[:, None, :]].permute(0, 3, 1, 2)


BLOCKS = "blocks"
"""Name of the table of a description: by place, the index of the architecture and the depth of the block in it."""


class Stitched(LightningModule):
    """Blocks of several networks in a row, with stitches between them.

    Where a block's output has another shape than the next one's input there is a linear layer on the flattened output.
    The last block's output goes through a linear classifier, unless it is a network's last block.

    Args:
        blocks: The blocks, in order.
        whole: Shape of one sample of the input.
        classes: Numbers that come out.
        relu: Whether a stitch ends with ReLU.
        host: Module whose batch transfer hooks this one uses; none if it is given batches on the device.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        whole: tuple[int, ...],
        classes: int,
        relu: bool = True,
        host: LightningModule | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.stitches = nn.ModuleDict()
        dtype = next((it.dtype for it in self.parameters() if it.is_floating_point()), None)
        for place, (rows, columns) in stitch_sizes(blocks, whole).items():
            self.stitches[str(place)] = nn.Linear(columns, rows, dtype=dtype)
        self.head = None if blocks[-1].is_last else nn.Linear(math.prod(blocks[-1].out), classes, dtype=dtype)
        self.whole = whole
        self.relu = relu
        self._host = (host,)  # in a tuple: it is not registered

    @property
    def parts(self) -> list[Block]:
        """The blocks, in order."""
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def host(self) -> LightningModule | None:
        """As given."""
        return self._host[0]

    def activations(self, x: Tensor) -> list[Tensor]:
        """Return the input, then the output of every block."""
        outputs = [x]
        for place, block in enumerate(self.parts):
            if str(place) in self.stitches:
                x = self.stitches[str(place)](x.flatten(1))
                x = (x.relu() if self.relu else x).reshape(len(x), *block.into)
            x = block(x)
            outputs.append(x)
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        out = self.activations(x)[-1]
        return out if self.head is None else self.head(out.flatten(1))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Do as the host does."""
        return batch if self.host is None else self.host.on_before_batch_transfer(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Do as the host does."""
        mover: Any = super() if self.host is None else self.host
        return mover.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Do as the host does."""
        return batch if self.host is None else self.host.on_after_batch_transfer(batch, dataloader_idx)


def stitch_sizes(blocks: Sequence[Block], whole: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """Return rows and columns of the stitch before each block that needs one, by its place."""
    shapes = [whole, *(block.out for block in blocks)]
    return {
        place: (math.prod(block.into), math.prod(before))
        for place, (before, block) in enumerate(zip(shapes, blocks, strict=False))
        if before != block.into
    }


def row_of(module: LightningModule, blocks: Sequence[Block], relu: bool = True) -> Stitched:
    """Return a network as the row of its own blocks, which needs no stitches."""
    return Stitched(blocks, blocks[0].whole, math.prod(blocks[-1].out), relu, module)


def assembled(rows: Sequence[Stitched], places: Sequence[tuple[int, int]], *address: object) -> Stitched:
    """Return a network of copies of some blocks, with new stitches, in the eyes of the first block's host."""
    first, classes = rows[places[0][0]], math.prod(rows[0].parts[-1].out)
    with isolated(*address):
        blocks = [copy.deepcopy(rows[row].parts[depth]) for row, depth in places]
        return Stitched(blocks, first.whole, classes, first.relu, first.host)


def describe(blocks: Sequence[tuple[int, int]], net: Stitched) -> State:
    """Return a stitched network as named tensors: which blocks of which architectures, and all that it has learned."""
    return {BLOCKS: torch.tensor(blocks), **{f"net.{name}": value.cpu() for name, value in net.state_dict().items()}}


def rebuild(described: Mapping[str, Tensor], parts: Mapping[int, Sequence[Block]], relu: bool) -> Stitched:
    """Return the network of a description, on the CPU."""
    places = described[BLOCKS].tolist()
    state = {name.removeprefix("net."): value for name, value in described.items() if name != BLOCKS}
    classes = len(state["head.bias"]) if "head.bias" in state else 0
    blocks = [copy.deepcopy(parts[index][depth]) for index, depth in places]
    with isolated("rebuild"):  # what it draws is replaced
        net = Stitched(blocks, blocks[0].whole, classes, relu)
    net.load_state_dict(state)
    return net


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
        shell: The network with stubs instead of other layers; or the user's module for the block.
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
    own_modules = _own_blocks(module)
    blocks = [Block(part, None, whole) for part in own_modules] if own_modules else _by_layers(module, x)
    kinds = [_kind(block, bool(own_modules)) for block in blocks]
    last = max((depth for depth, kind in enumerate(kinds) if kind == "conv"), default=-1)
    for depth, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
        block.kind, block.depth = kind, depth
        block.rank = 2 if block is blocks[-1] else int(depth > last)
        block.into = tuple(x.shape[1:])
        with _looking(block):
            x = block(x)
        if not isinstance(x, Tensor) or x.ndim < 2:
            raise ValueError(f"block {depth} gives no rows, one for each sample, but a {type(x).__name__}. {WAY_OUT}")
        block.out = tuple(x.shape[1:])
    return blocks


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
        loose_path = next((path for path in paths if path not in modules), None)
        if loose_path is not None:
            raise ValueError(f"parameters are held outside of layers ('{loose_path}'). {WAY_OUT}")
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
            parts = list(method())
            if not parts or not all(isinstance(part, nn.Module) for part in parts):
                raise ValueError(f"{type(owner).__name__}.blocks() must return modules, one at least")
            return parts
    return []


def _kind(block: Block, is_own_block: bool) -> str:
    """Return what operation a block is."""
    parts = [part for part in block.modules() if is_own_block or any(True for _ in part.parameters(recurse=False))]
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
