"""The one regression module: any network, one target or several.

The scores of a regression over a whole split, computed from all samples at once.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.functional import mean_absolute_error, mean_squared_error, pearson_corrcoef
from torchmetrics.utilities import dim_zero_cat

from fedlightning.models.supervised import SupervisedModule
from fedlightning.ranges import PositiveFloat, check_arguments


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
        by_target = [(r2(out, other), pearson(out, other)) for out, other in zip(prediction.T, target.T, strict=True)]
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
        >>> from fedlightning.models.regressor import r2
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
        >>> from fedlightning.models.regressor import pearson
        >>> pearson(torch.tensor([1.0, 1.0]), torch.tensor([4.0, 5.0]))
        tensor(nan)
    """
    defined = len(target) > 1 and bool((target != target[0]).any()) and bool((prediction != prediction[0]).any())
    if not defined:
        return target.new_tensor(float("nan"))
    # Scaled: torchmetrics compares variances with a constant, whatever the unit of the targets.
    scaled = [(values - values.mean()) / (values - values.mean()).abs().max() for values in (prediction, target)]
    return pearson_corrcoef(scaled[0], scaled[1])


class Regressor(SupervisedModule):
    """A LightningModule that trains and scores a network whose targets are numbers, on batches `(x, y)`.

    `y` holds one target a sample, `(batch,)` or `(batch, 1)`, or several, `(batch, targets)`. The network returns as
    many outputs; `(batch,)` and `(batch, 1)` are the same. Integer targets are taken as numbers.

    Logged once at the end of an epoch, over all samples: `train_loss`, and with the prefixes `val_` and `test_` the
    scores `loss` (of the kind that is trained), `mse`, `rmse`, `mae`, `r2` and `pearson`. `RegressionMetrics` defines
    each of them. `predict_step` returns the network's outputs.

    Checkpoints hold plain values only, as those of `Classifier`.

    Args:
        net: The network. `net(x)` returns the predictions.
        optimizer: Makes the optimizer from the parameters. `None` is `torch.optim.SGD` with `lr`.
        scheduler: Makes the learning-rate scheduler from the optimizer. `ReduceLROnPlateau` monitors `val_loss`.
        lr: Learning rate of the default optimizer; `None` is 0.01. Not allowed together with `optimizer`. Features and
            targets of order 1 train with it.
        loss: `"mse"`, the squared error; `"l1"`, the absolute error; or `"huber"`, squared below `huber_delta` and
            absolute beyond.
        huber_delta: Error at which the Huber loss changes (Huber 1964).
        scheduler_interval: When the scheduler steps: once an `"epoch"` or once a `"step"`.

    Raises:
        ValueError: If both `lr` and `optimizer` are given, or a value is out of its range.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Regressor
        >>> module = Regressor(MLP(4, [8], 1), loss="huber")
        >>> module.predict_step((torch.zeros(5, 4), torch.zeros(5))).shape
        torch.Size([5])
    """

    default_lr = 0.01  # squared errors have steeper gradients than cross entropy

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable | None = None,
        scheduler: LRSchedulerCallable | None = None,
        lr: float | None = None,
        loss: Literal["mse", "l1", "huber"] = "mse",
        huber_delta: PositiveFloat = 1.0,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__()
        check_arguments(self, Regressor.__init__, locals())
        self.save_hyperparameters(ignore=["net", "optimizer", "scheduler"])
        self.loss_name, self.huber_delta = loss, huber_delta
        self.take_over(net, optimizer, scheduler, lr, scheduler_interval)
        self.val_metrics, self.test_metrics = RegressionMetrics(), RegressionMetrics()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch, a scalar."""
        prediction, y = self._predicted(batch)
        loss = self.loss(prediction, y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(y))
        return loss

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return predictions for a batch `x` or `(x, y)`: `(batch,)` for one target, else `(batch, targets)`."""
        prediction = self(batch[0] if isinstance(batch, list | tuple) else batch)
        return prediction.squeeze(1) if prediction.ndim == 2 and prediction.shape[1] == 1 else prediction

    def loss(self, prediction: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss, in at least float32.

        Args:
            prediction: Predictions, shape `(batch, targets)`.
            y: Targets, shape `(batch, targets)`.
        """
        if self.loss_name == "huber":
            return F.huber_loss(prediction, y, delta=self.huber_delta)
        return F.l1_loss(prediction, y) if self.loss_name == "l1" else F.mse_loss(prediction, y)

    def _predicted(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of a batch, both `(batch, targets)` in at least float32."""
        x, y = self._pair(batch)
        prediction = self(x)
        shapes = tuple(prediction.shape), tuple(y.shape)
        columns = [value.unsqueeze(1) if value.ndim == 1 else value for value in (prediction, y)]
        if columns[0].shape != columns[1].shape:
            # Broadcasting (n,) against (n, 1) would make n * n differences without a word.
            raise ValueError(
                f"{type(self.net).__name__} returned predictions of shape {shapes[0]} for targets of shape {shapes[1]}. "
                "Give the network one output for each target of a sample."
            )
        wide = [
            value.float() if not value.is_floating_point() or value.element_size() < 4 else value for value in columns
        ]
        return wide[0], wide[1].to(wide[0].dtype)

    def _score(self, metrics: RegressionMetrics, batch: Any, batch_idx: int) -> None:
        prediction, y = self._predicted(batch)
        metrics.update(prediction, y, self.loss(prediction, y))
