"""Outputs of a module over a loader: teachers, and predictions that travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from fedlightning.client.probes import move_batch
from fedlightning.seeding import isolated
from fedlightning.wrappers.muting import evaluating, frozen_buffers, muted

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module; the CPU if it holds no tensor.

    Example:
        >>> device_of(nn.Linear(1, 1))
        device(type='cpu')
    """
    held = next(module.parameters(), next(module.buffers(), None))
    return torch.device("cpu") if held is None else held.device


def outputs(
    module: ModuleT,
    loader: Iterable[Any],
    forward: Callable[[ModuleT, Any], Tensor],
    device: torch.device,
    precision: Precision,
    *seed: object,
) -> Tensor:
    """Return the rows that `forward` gives for every batch, in eval mode and without gradients. Leaves no trace.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader, net = DataLoader(torch.ones(5, 2), 2), nn.Flatten()
        >>> rows = outputs(net, loader, lambda net, x: net(x), torch.device("cpu"), Precision())
        >>> rows.shape
        torch.Size([5, 2])
    """
    home, found = device_of(module), list[Tensor]()
    try:
        module.to(device)
        with (
            isolated(*seed), evaluating(module), muted(module), frozen_buffers(module), torch.no_grad(),
            precision.forward_context(),
        ):  # fmt: skip
            for batch in loader:
                batch = precision.convert_input(batch)
                if isinstance(module, LightningModule):
                    batch = move_batch(module, batch)
                else:
                    batch = move_data_to_device(batch, device)
                rows = forward(module, batch)
                if not isinstance(rows, Tensor) or rows.ndim == 0:
                    what = "a single number" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
                    raise ValueError(
                        f"outputs(forward=...) returned {what}; return a tensor with a row for each sample."
                    )
                found.append(rows.to("cpu", torch.promote_types(rows.dtype, torch.float32)))
    finally:
        module.to(home)
    return torch.cat(found) if found else torch.empty(0)
