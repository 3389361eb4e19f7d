"""The update of `torch.optim.SGD` on a CPU without the calls around it, which cost more than a small update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer


def applies(optimizer: Optimizer) -> bool:
    """Return True if :func:`update` equals `optimizer.step()`: torch's own SGD, in its form for single tensors."""
    if type(optimizer) is not SGD or not _is_torch_own(SGD.step):
        return False
    for group in optimizer.param_groups:
        if group["differentiable"] or group["fused"] or group["foreach"] or isinstance(group["weight_decay"], Tensor):
            return False
        if any(parameter.device.type != "cpu" for parameter in group["params"]):
            return False
    return all(not isinstance(group["lr"], Tensor) for group in optimizer.param_groups)


def _is_torch_own(step: Any) -> bool:
    """Return True if `step` is torch's own (inside torch's profiler record of it), not a replacement."""
    inner = getattr(step, "__wrapped__", step)
    return bool(
        inner.__code__.co_filename == torch_optimizer.__file__
    )  # the file of the decorator that torch puts on it


def update(optimizer: Optimizer) -> None:
    """Move the parameters by the operations of `torch.optim.sgd` in its order, so that the bits are the same."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if group["maximize"]:
                    gradient = -gradient
                if decay != 0:
                    gradient = gradient.add(parameter, alpha=decay)
                if momentum != 0:
                    gradient = _with_momentum(optimizer.state[parameter], gradient, group)
                parameter.add_(gradient, alpha=-lr)


def _with_momentum(state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> Tensor:
    momentum, buffer = group["momentum"], state.get("momentum_buffer")
    if buffer is None:
        buffer = state["momentum_buffer"] = gradient.detach().clone()
    else:
        buffer.mul_(momentum).add_(gradient, alpha=1 - group["dampening"])
    return gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
