"""The hypernetwork of pFedLA."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HyperNetwork(nn.Module):
    """A learned vector, a perceptron, and for every layer of a model a row of weights over the clients; in float64.

    Args:
        embedding: Size of the learned input vector.
        hidden: Width of the perceptron's three layers.
        shape: ``(num_layers, num_clients)`` of the output.
        normalise: ``"softmax"``, or ``"relu"``: rectified and divided by their sum, even where all are zero.

    Example:
        >>> from fedlightning.callbacks.hypernetwork import HyperNetwork
        >>> alpha = HyperNetwork(4, 8, (2, 3), "softmax")()
        >>> alpha.shape, [round(total, 6) for total in alpha.sum(1).tolist()]
        (torch.Size([2, 3]), [1.0, 1.0])
    """

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
        """Return weights of shape ``(num_layers, num_clients)`` whose rows sum to 1."""
        scores: Tensor = self.heads(self.body(self.embedding)).view(self.shape)
        if self.normalise == "softmax":
            return scores.softmax(dim=1)
        positive = scores.relu()
        total = positive.sum(dim=1, keepdim=True)
        even = torch.full_like(positive, 1.0 / self.shape[1])
        return torch.where(total > 0, positive / total.clamp_min(torch.finfo(total.dtype).tiny), even)
