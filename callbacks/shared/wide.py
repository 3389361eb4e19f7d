"""The precision in which sums of squares and products are accumulated."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return `tensor` in float64, or in float32 on Apple's GPUs, which have no float64.

    Example:
        >>> wide(torch.ones(2)).dtype
        torch.float64
    """
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)
