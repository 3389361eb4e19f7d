"""A linear map that begins where it is told."""

from __future__ import annotations

import torch

from fedlightning.models import GivenLinear, Regressor


def test_one_step_goes_where_the_formula_says():
    module = Regressor(GivenLinear([1.0, 0.0]), lr=0.1)
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])
    (optimizer := module.configure_optimizers()).zero_grad()
    module.loss(module(x), y.unsqueeze(1)).backward()
    optimizer.step()
    error = 1.0 - 3.0  # w x - y
    torch.testing.assert_close(
        module.net.fc.weight, torch.tensor([[1.0 - 0.1 * 2 * error * 1.0, -0.1 * 2 * error * 2.0]])
    )
