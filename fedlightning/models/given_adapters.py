"""A module whose clients train to adapters that are known beforehand, to work out what an aggregation makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

SHAPE, RANK = (6, 5), 2
"""Outputs and inputs of the layer, and the rank of the adapters."""


class GivenAdapters(LightningModule):
    """One linear layer of zeros; a step with learning rate 1 takes the adapters of client `i` to given ones `B_i A_i`.

    `numpy.random.default_rng(seed)` draws all `B_i`, and then all `A_i`, from a standard normal distribution. A batch is `(i,
    y)`, with the client's number in each row of `i`; `GivenDataModule` makes such. Scores have `error`, the Frobenius norm of
    the deployed layer minus `sum_i p_i B_i A_i`: zero where an aggregation is exact. For methods whose adapters have
    `alpha = r`, with `precision="64-true"`. Layers: `layer`.

    Args:
        shares: The clients' weights `p_i`.
        common: Whether `A` is one for all and does not train: it stands for every `A_i`.
        seed: Seed of the draws.

    Example:
        >>> import torch
        >>> from fedlightning.models import GivenAdapters
        >>> module = GivenAdapters([0.5, 0.3, 0.2]).double()
        >>> round(module.error().item(), 6)  # the layer is zero: the norm of the mean itself
        4.318781
    """

    def __init__(self, shares: list[float], common: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        draw, (outputs, inputs) = np.random.default_rng(seed), SHAPE
        self.given = {"B": [torch.tensor(draw.standard_normal((outputs, RANK))) for _ in shares]}
        self.given["A"] = [torch.tensor(draw.standard_normal((RANK, inputs))) for _ in shares]
        self.shares, self.common = shares, common
        self.layer = nn.Linear(inputs, outputs, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs."""
        outputs: Tensor = self.layer(x)
        return outputs

    def error(self) -> Tensor:
        """Return the distance of the deployed layer from the mean of the clients' products."""
        firsts = self.given["A"]
        if self.common:
            (first,) = (value for name, value in self.named_parameters() if ".lora_A." in name)
            firsts = [first] * len(self.shares)
        factors = zip(self.shares, self.given["B"], firsts, strict=True)
        mean = sum((share * b @ a for share, b, a in factors), torch.zeros(SHAPE, dtype=torch.float64))
        return torch.linalg.matrix_norm(self(torch.eye(SHAPE[1], dtype=self.layer.weight.dtype)).T - mean)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return half the squared distance of the client's adapters from its given ones."""
        client, loss = int(batch[0].flatten()[0]), torch.zeros((), dtype=torch.float64)
        for name, parameter in self.named_parameters():
            for factor, adapters in self.given.items():
                if f".lora_{factor}." in name and parameter.requires_grad:
                    loss = loss + (parameter - adapters[client]).square().sum() / 2
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the error."""
        self.log("val_error", self.error(), batch_size=1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the error."""
        self.log("test_error", self.error(), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD of learning rate 1."""
        return torch.optim.SGD(self.parameters(), lr=1.0)
