"""What metrics can be, by their names and by the objects that compute them."""

from __future__ import annotations

import math

import torchmetrics
from torch import nn

from fedlightning.scores.metric_names import bounds_of, outside


class Module(nn.Module):
    def __init__(self, said=None):
        super().__init__()
        self.val_spread = torchmetrics.MeanSquaredError()
        self.agreement = torchmetrics.CohenKappa("binary")
        self.scores = torchmetrics.MetricCollection([torchmetrics.MatthewsCorrCoef("binary"), torchmetrics.R2Score()])
        self.mean = torchmetrics.MeanMetric()
        if said is not None:
            self.metric_bounds = said


def test_the_best_that_a_metric_can_be_is_its_bound():
    bounds = bounds_of(Module().modules())
    refused = {
        "val_spread": -1e300,
        "test/agreement": 1e300,
        "val_BinaryMatthewsCorrCoef": 1e9,
        "val_mse": -1e-3,
        "rmse": -1,
    }
    assert all(outside(bounds, name, value) for name, value in refused.items())
    taken = {
        "val_spread": 1e300,
        "agreement": -0.5,
        "val_agreement": 87.0,
        "mean": -1e300,
        "R2Score": -1e9,
        "loss": -5.0,
    }
    assert not any(outside(bounds, name, value) for name, value in taken.items())


def test_what_a_module_says_holds():
    said = {"spread": (-10.0, 10.0), "accuracy": (0.0, 1.0)}
    assert bounds_of(Module(said).modules()) | said == bounds_of(Module(said).modules())
    assert bounds_of([object(), Module()])["mse"] == (0.0, math.inf)
