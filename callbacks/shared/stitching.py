"""Networks stitched together out of blocks of others, and their description as named tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import State, isolated
from fedlightning.callbacks.shared.blocks import Block

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
        found = [x]
        for place, block in enumerate(self.parts):
            if str(place) in self.stitches:
                x = self.stitches[str(place)](x.flatten(1))
                x = (x.relu() if self.relu else x).reshape(len(x), *block.into)
            x = block(x)
            found.append(x)
        return found

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
