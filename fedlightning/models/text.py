"""Recurrent networks for characters and words."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedlightning.models.recipes import recorded
from fedlightning.models.sizes import Size


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
    """Convolutions over words and the largest value of each (Kim 2014, "Convolutional Neural Networks for Sentence "
    "Classification").

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
