"""A small transformer for text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedlightning.models.recipes import recorded
from fedlightning.models.sizes import Size


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
