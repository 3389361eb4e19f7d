"""Networks for signals: one-dimensional convolutions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedlightning.models.recipes import recorded
from fedlightning.models.sizes import Size


class SignalCNN(nn.Module):
    """Three convolutions over time, the mean over time, and a classifier: for windows of sensors such as UCI-HAR's.

    Input `(batch, channels, length)`, output `(batch, num_classes)`. Layers: `conv1`, `conv2`, `conv3`, `fc` (head).

    Args:
        channels: Number of signals.
        num_classes: Number of outputs.
        width: Filters of the first layer; the others have twice as many.
        kernel: Samples that a filter sees.

    Example:
        >>> import torch
        >>> from fedlightning.models import SignalCNN
        >>> SignalCNN(channels=9, num_classes=6)(torch.zeros(5, 9, 128)).shape
        torch.Size([5, 6])
    """

    head_name = "fc"

    @recorded
    def __init__(self, channels: Size, num_classes: Size, width: Size = 32, kernel: Size = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, width, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv1d(width, 2 * width, kernel, padding=kernel // 2)
        self.conv3 = nn.Conv1d(2 * width, 2 * width, kernel, padding=kernel // 2)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.fc(F.relu(self.conv3(x)).mean(2))
        return logits


class ResNet1d(nn.Module):
    """A residual network over time (after Wang, Yan, Oates 2017, "Time series classification from scratch"), for ECG "
    "such as PTB-XL.

    Each block is two convolutions with group normalisation, and halves the length; group statistics are those of one
    sample, so nothing of a client's data stays in the model but weights. Input `(batch, channels, length)`, output
    `(batch, num_classes)`. Layers: `stem`, `block1`, ..., `fc` (head).

    Args:
        channels: Number of leads.
        num_classes: Number of outputs.
        width: Filters of the first block, a multiple of 8; later blocks have twice as many, at most 8 times.
        blocks: Number of blocks.
        kernel: Samples that a filter sees.

    Example:
        >>> import torch
        >>> from fedlightning.models import ResNet1d
        >>> ResNet1d(channels=12, num_classes=5, width=8)(torch.zeros(2, 12, 1000)).shape
        torch.Size([2, 5])
    """

    head_name = "fc"

    @recorded
    def __init__(self, channels: Size, num_classes: Size, width: Size = 32, blocks: Size = 4, kernel: Size = 7) -> None:
        super().__init__()
        self.blocks = blocks
        widths = [width * min(8, 2**block) for block in range(blocks)]
        self.stem = nn.Conv1d(channels, width, 2 * kernel + 1, stride=2, padding=kernel)
        for place, (into, out) in enumerate(zip([width, *widths], widths, strict=False), start=1):
            self.add_module(f"block{place}", _Block(into, out, kernel))
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for place in range(1, self.blocks + 1):
            x = self.get_submodule(f"block{place}")(x)
        logits: Tensor = self.fc(x.mean(2))
        return logits


class _Block(nn.Module):
    def __init__(self, into: int, out: int, kernel: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(into, out, kernel, stride=2, padding=kernel // 2)
        self.norm1 = nn.GroupNorm(8, out)
        self.conv2 = nn.Conv1d(out, out, kernel, padding=kernel // 2)
        self.norm2 = nn.GroupNorm(8, out)
        self.skip = nn.Conv1d(into, out, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.skip(x))
