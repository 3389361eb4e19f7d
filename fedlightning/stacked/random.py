"""Dropout on a stack: each client's masks are drawn from its own addressed generator, as when it trains alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Noise(torch.autograd.Function):
    """Scaled dropout noise: without a gradient, and with one mask for each client under :func:`torch.func.vmap`."""

    @staticmethod
    def forward(row: Tensor, draw: Callable[..., Tensor], shape: torch.Size, p: float, dtype: torch.dtype) -> Tensor:
        return draw(shape, p, dtype, row.device)[0]  # a stack of one client

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing, since there is no gradient."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        row: Tensor,
        draw: Callable[..., Tensor],
        shape: torch.Size,
        p: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, int]:
        return draw(shape, p, dtype, row.device), 0


class ClientDraws(TorchFunctionMode):
    """Context in which dropout draws from one generator for each client of the step.

    On the CPU the numbers are those that `torch.nn.functional.dropout` draws from the same generator. Other random
    functions are left to `vmap`, which refuses them.

    Attributes:
        generators: The clients' generators.
        row: A tensor of the map, through which dropout learns that it is mapped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generators: Sequence[torch.Generator] = ()
        self.row: Tensor | None = None

    def noise(self, shape: torch.Size, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return masks `(clients, *shape)`: 0 with probability `p`, else `1 / (1 - p)`."""
        drawn = torch.empty((len(self.generators), *shape), dtype=dtype)
        for mask, generator in zip(drawn, self.generators, strict=True):
            mask.bernoulli_(1 - p, generator=generator)
        return drawn.div_(1 - p).to(device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.dropout or func is F.dropout2d:
            return self._dropout(func is F.dropout2d, *args, **(kwargs or {}))
        if func is torch.dropout:
            return self._dropout(False, args[0], *args[1:], **{_NAMES.get(k, k): v for k, v in (kwargs or {}).items()})
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0 or input.numel() == 0:
            return input
        if channels and input.dim() != 4:
            raise RuntimeError("dropout2d of a stack takes inputs (N, C, H, W)")
        shape = torch.Size((*input.shape[:2], 1, 1)) if channels else input.shape
        if p == 1:
            noise = input.new_zeros(())
        else:
            noise = cast(Tensor, _Noise.apply(self.row, self.noise, shape, p, input.dtype))
        return input.mul_(noise) if inplace else input * noise


_NAMES = {"train": "training"}
