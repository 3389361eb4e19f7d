"""The hypernetwork of pFedLA."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HyperNetwork(nn.Module):
    """An embedding, a perceptron of three layers, and for every layer a row of weights over the clients; in float64."""

    def __init__(self, embedding: int, hidden: int, shape: tuple[int, int], normalise: str) -> None:
        super().__init__()
        self.normalise = normalise
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(embedding))
        self.body = nn.Sequential(
            *(nn.Linear(embedding, hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.ReLU()),
            *(nn.Linear(hidden, hidden), nn.ReLU()),
        )
        self.heads = nn.Linear(hidden, shape[0] * shape[1])
        if normalise == "relu":
            nn.init.ones_(self.heads.bias)
        self.double()

    def forward(self) -> Tensor:
        """Rows that sum to 1."""
        scores: Tensor = self.heads(self.body(self.embedding)).view(self.shape)
        if self.normalise == "softmax":
            return scores.softmax(dim=1)
        positive = scores.relu()
        total = positive.sum(dim=1, keepdim=True)
        even = torch.full_like(positive, 1.0 / self.shape[1])
        return torch.where(total > 0, positive / total.clamp_min(torch.finfo(total.dtype).tiny), even)
