"""Networks for signals: one-dimensional convolutions.

Recurrent networks for characters and words.

A small transformer for text.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlightning.models.networks import Size
from fedlightning.models.recipes import recorded


class SmallTransformer(nn.Module):
    """A transformer encoder that classifies sequences of tokens.

    Token and position embeddings, encoder blocks, the mean over the tokens that are not padding, a projection and a
    classifier. For text tasks of the kind of PLayer-FL's Sent140 (arXiv 2502.08829), which has one attention block and
    pretrained embeddings; this network is our own and starts from scratch. Train it with AdamW at about 1e-3: plain SGD
    is slow here.

    Input: token numbers `(batch, length)` with `length <= max_length`, padded with `padding_idx`. A sample of padding
    alone is read as its first padding token. Layers: `embedding`, `position`, `block1`, ..., `projection`, `fc` (head).

    Args:
        vocab_size: Number of different tokens, padding included.
        num_classes: Number of outputs.
        max_length: Longest sequence.
        dim: Width of the embeddings and blocks; a multiple of `num_heads`.
        num_heads: Number of attention heads.
        num_layers: Number of encoder blocks.
        dropout: Dropout probability within the blocks.
        padding_idx: Token that stands for padding.

    Example:
        >>> import torch
        >>> from fedlightning.models import SmallTransformer
        >>> net = SmallTransformer(vocab_size=20, num_classes=2, dim=8, num_heads=2)
        >>> net(torch.randint(20, (5, 12))).shape
        torch.Size([5, 2])
    """

    head_name = "fc"

    @recorded
    def __init__(
        self,
        vocab_size: Size,
        num_classes: Size,
        max_length: Size = 128,
        dim: Size = 64,
        num_heads: Size = 4,
        num_layers: Size = 2,
        dropout: float = 0.1,
        padding_idx: int = 0,
    ) -> None:
        super().__init__()
        self.max_length, self.num_layers, self.padding_idx = max_length, num_layers, padding_idx
        self.embedding = nn.Embedding(vocab_size, dim, padding_idx=padding_idx)
        self.position = nn.Embedding(max_length, dim)
        for index in range(num_layers):
            block = nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, dropout, batch_first=True, norm_first=True)
            self.add_module(f"block{index + 1}", block)
        self.projection = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())
        self.fc = nn.Linear(dim, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `(batch, num_classes)` for tokens `(batch, length)`.

        Raises:
            ValueError: If a sequence is longer than `max_length`.
        """
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"SmallTransformer(max_length={self.max_length}) got sequences of {length} tokens. Cut them or raise "
                "max_length."
            )
        padding = tokens == self.padding_idx
        first = torch.arange(length, device=tokens.device) == 0
        padding = padding & ~(padding.all(dim=1, keepdim=True) & first)  # attention over nothing would be NaN
        x = self.embedding(tokens) + self.position.weight[:length]
        for index in range(self.num_layers):
            x = self.get_submodule(f"block{index + 1}")(x, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1).to(x.dtype)
        x = (x * kept).sum(dim=1) / kept.sum(dim=1)
        logits: Tensor = self.fc(self.projection(x))
        return logits


class TextLSTM(nn.Module):
    """LEAF's stacked LSTM (Caldas et al. 2018): an embedding, recurrent layers, and a classifier of the last output.

    `TextLSTM(80, 80)` is its network for Shakespeare: embedding 8, two layers of 256. (LEAF's cells have one bias where
    torch's have two, which is the same function.) `TextLSTM(buckets + 1, 2, embedding=100, hidden=100)` is of the size
    of its network for Sent140. Input: tokens `(batch, length)`; output `(batch, num_classes)`. Layers: `embedding`,
    `rnn`, `fc` (head).

    Args:
        vocab_size: Number of different tokens.
        num_classes: Number of outputs.
        embedding: Width of the embedding.
        hidden: Width of a recurrent layer.
        layers: Number of recurrent layers.
        cell: `"lstm"` or `"gru"`.

    Example:
        >>> import torch
        >>> from fedlightning.models import TextLSTM
        >>> TextLSTM(vocab_size=80, num_classes=80, hidden=16)(torch.randint(80, (5, 12))).shape
        torch.Size([5, 80])
    """

    head_name = "fc"

    @recorded
    def __init__(
        self,
        vocab_size: Size,
        num_classes: Size,
        embedding: Size = 8,
        hidden: Size = 256,
        layers: Size = 2,
        cell: Literal["lstm", "gru"] = "lstm",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding)
        kind = nn.LSTM if cell == "lstm" else nn.GRU
        self.rnn = kind(embedding, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.rnn(self.embedding(tokens))
        logits: Tensor = self.fc(outputs[:, -1])
        return logits


class TextCNN(nn.Module):
    """Convolutions over words and the largest value of each (Kim 2014, "Convolutional Neural Networks for Sentence
    Classification").

    Input: tokens `(batch, length)` with `length` at least the widest filter; output `(batch, num_classes)`. Layers:
    `embedding`, `convolutions`, `fc` (head).

    Args:
        vocab_size: Number of different tokens, padding (0) included.
        num_classes: Number of outputs.
        embedding: Width of the embedding.
        filters: Number of filters of each width.
        widths: Words that a filter sees (Kim: 3, 4, 5).
        dropout: Dropout probability before the head (Kim: 0.5).

    Example:
        >>> import torch
        >>> from fedlightning.models import TextCNN
        >>> TextCNN(vocab_size=100, num_classes=2)(torch.randint(100, (5, 25))).shape
        torch.Size([5, 2])
    """

    head_name = "fc"

    @recorded
    def __init__(
        self,
        vocab_size: Size,
        num_classes: Size,
        embedding: Size = 64,
        filters: Size = 64,
        widths: tuple[int, ...] = (3, 4, 5),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(embedding, filters, width) for width in widths)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(filters * len(widths), num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embedding(tokens).transpose(1, 2)
        features = torch.cat([convolution(words).relu().amax(2) for convolution in self.convolutions], dim=1)
        logits: Tensor = self.fc(self.dropout(features))
        return logits


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
