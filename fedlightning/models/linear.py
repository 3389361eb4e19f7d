"""A linear map that begins at given weights, for runs whose trajectory is known on paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedlightning.models.recipes import recorded


class GivenLinear(nn.Module):
    """A linear map to one number, without bias, whose weights begin where they are told.

    With `Regressor` and `GivenDataModule` each client has a quadratic objective: the mean of `(w x - y)^2`. Input `(batch,
    features)`, output `(batch, 1)`. Layers: `fc` (head).

    Args:
        weights: The first weights, one for each feature.

    Example:
        >>> import torch
        >>> from fedlightning.models import GivenLinear
        >>> GivenLinear([2.0, -1.0])(torch.ones(1, 2)).item()
        1.0
    """

    head_name = "fc"

    @recorded
    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.fc = nn.Linear(len(weights), 1, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([weights], dtype=self.fc.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.fc(x.flatten(1))
        return prediction
