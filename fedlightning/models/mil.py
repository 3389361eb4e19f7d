"""Multiple-instance learning: one label for a bag of instances."""

from __future__ import annotations

from torch import Tensor, nn

from fedlightning.models.recipes import recorded
from fedlightning.models.sizes import Size


class DeepMIL(nn.Module):
    """Attention over a bag of instances (Ilse, Tomczak, Welling 2018, equation 9), with FLamby's sizes for Fed-Camelyon16.

    Input `(batch, instances, features)`, where rows of zeros are no instances; output `(batch, num_classes)`. Layers:
    `embedding`, `values`, `gates`, `attention`, `fc1`, `fc2`, `fc` (head).

    Args:
        features: Width of an instance.
        width: Width of the embedding and of the attention.
        num_classes: Number of outputs; 1 is a single logit.

    Example:
        >>> import torch
        >>> from fedlightning.models import DeepMIL
        >>> DeepMIL(features=16, width=8)(torch.ones(5, 30, 16)).shape
        torch.Size([5, 1])
    """

    head_name = "fc"

    @recorded
    def __init__(self, features: Size = 2048, width: Size = 128, num_classes: Size = 1) -> None:
        super().__init__()
        self.embedding = nn.Linear(features, width)
        self.values, self.gates = nn.Linear(width, width), nn.Linear(width, width)
        self.attention = nn.Linear(width, 1)
        self.fc1, self.fc2 = nn.Linear(width, 128), nn.Linear(128, 64)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, bags: Tensor) -> Tensor:
        inside = self.embedding(bags)
        scores = self.attention(self.values(inside).tanh() * self.gates(inside).sigmoid()).squeeze(2)
        filled = (bags == 0).all(dim=2)
        filled = filled & ~filled.all(dim=1, keepdim=True)  # attention over nothing would be NaN
        weights = scores.masked_fill(filled, float("-inf")).softmax(1)
        pooled = (weights.unsqueeze(2) * inside).sum(1)
        logits: Tensor = self.fc(self.fc2(self.fc1(pooled).relu()).relu())
        return logits
