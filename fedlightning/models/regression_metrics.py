"""The scores of a regression over a whole split, computed from all samples at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional import mean_absolute_error, mean_squared_error, pearson_corrcoef
from torchmetrics.utilities import dim_zero_cat


class RegressionMetrics(Metric):
    r"""Loss, squared and absolute error, coefficient of determination and correlation of a regression.

    .. math::
        \text{mse} &= \frac{1}{N} \sum_i (\hat y_i - y_i)^2, \quad \text{rmse} = \sqrt{\text{mse}} \\
        \text{mae} &= \frac{1}{N} \sum_i |\hat y_i - y_i| \\
        \text{r2} &= 1 - \frac{\sum_i (\hat y_i - y_i)^2}{\sum_i (\bar y - y_i)^2}

    `pearson` is Pearson's correlation of predictions and targets. With several targets, `mse`, `rmse` and `mae` are over
    all numbers, and `r2` and `pearson` are the means over the targets.

    Predictions and targets are collected on their device and computed in float64 on the CPU at the end. Results
    therefore do not depend on the batch size. Nothing enters a `state_dict`.

    As input to `update` the metric takes

    - `prediction`: Predictions of a batch, shape `(batch, targets)`.
    - `target`: Its targets, of the same shape.
    - `loss`: The mean loss over these samples, shape `()`.

    As output of `compute` it returns a dictionary of float32 scalars: `loss`, `mse`, `rmse`, `mae`, `r2` and `pearson`.
    `r2` is NaN with less than two samples or where all targets are equal; `pearson` also where all predictions are
    equal.

    Example:
        >>> from torch import tensor
        >>> from fedlightning.models import RegressionMetrics
        >>> metrics = RegressionMetrics()
        >>> metrics.update(tensor([[1.0], [2.0], [4.0]]), tensor([[1.0], [3.0], [4.0]]), loss=tensor(0.5))
        >>> {name: round(score.item(), 3) for name, score in metrics.compute().items()}
        {'loss': 0.5, 'mse': 0.333, 'rmse': 0.577, 'mae': 0.333, 'r2': 0.786, 'pearson': 0.929}
    """

    full_state_update = False
    metric_bounds = dict.fromkeys(("mse", "rmse", "mae"), (0.0, math.inf)) | {
        "r2": (-math.inf, 1.0),
        "pearson": (-1.0, 1.0),
    }
    losses: list[Tensor]
    prediction: list[Tensor]
    target: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("losses", "prediction", "target"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, prediction: Tensor, target: Tensor, loss: Tensor) -> None:
        """Add a batch of predictions, targets and its mean loss."""
        self.losses.append((loss.detach() * len(target)).reshape(1).float())
        self.prediction.append(prediction.detach())
        self.target.append(target.detach())

    def compute(self) -> dict[str, Tensor]:
        """Return the scores over all samples since the last reset."""
        prediction = dim_zero_cat(self.prediction).cpu().double()
        target = dim_zero_cat(self.target).cpu().double()
        mse = mean_squared_error(prediction.flatten(), target.flatten())
        by_target = [(r2(one, other), pearson(one, other)) for one, other in zip(prediction.T, target.T, strict=True)]
        scores = {
            "loss": dim_zero_cat(self.losses).cpu().double().sum() / len(target),
            "mse": mse,
            "rmse": mse.sqrt(),
            "mae": mean_absolute_error(prediction.flatten(), target.flatten()),
            "r2": torch.stack([score for score, _ in by_target]).mean(),
            "pearson": torch.stack([score for _, score in by_target]).mean(),
        }
        return {name: value.float().to(self.device) for name, value in scores.items()}


def r2(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the coefficient of determination, NaN where it is not defined.

    Example:
        >>> import torch
        >>> from fedlightning.models.regression_metrics import r2
        >>> r2(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0]))
        tensor(nan)
    """
    # torchmetrics' r2_score takes a spread below 1e-4 for none and says 1, so targets in small units would score 1.
    if len(target) < 2 or not bool((target != target[0]).any()):
        return target.new_tensor(float("nan"))
    return 1 - ((prediction - target) ** 2).sum() / ((target - target.mean()) ** 2).sum()


def pearson(prediction: Tensor, target: Tensor) -> Tensor:
    """Return Pearson's correlation, NaN where it is not defined.

    Example:
        >>> import torch
        >>> from fedlightning.models.regression_metrics import pearson
        >>> pearson(torch.tensor([1.0, 1.0]), torch.tensor([4.0, 5.0]))
        tensor(nan)
    """
    defined = len(target) > 1 and bool((target != target[0]).any()) and bool((prediction != prediction[0]).any())
    if not defined:
        return target.new_tensor(float("nan"))
    # Scaled: torchmetrics compares variances with a constant, whatever the unit of the targets.
    scaled = [(values - values.mean()) / (values - values.mean()).abs().max() for values in (prediction, target)]
    return pearson_corrcoef(scaled[0], scaled[1])
