"""The one regression module: any network, one target or several."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from fedlightning.models.regression_metrics import RegressionMetrics
from fedlightning.models.supervised import SupervisedModule
from fedlightning.ranges import PositiveFloat, check_arguments


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
        given = tuple(prediction.shape), tuple(y.shape)
        columns = [value.unsqueeze(1) if value.ndim == 1 else value for value in (prediction, y)]
        if columns[0].shape != columns[1].shape:
            # Broadcasting (n,) against (n, 1) would make n * n differences without a word.
            raise ValueError(
                f"{type(self.net).__name__} returned predictions of shape {given[0]} for targets of shape {given[1]}. "
                "Give the network one output for each target of a sample."
            )
        wide = [
            value.float() if not value.is_floating_point() or value.element_size() < 4 else value for value in columns
        ]
        return wide[0], wide[1].to(wide[0].dtype)

    def _score(self, metrics: RegressionMetrics, batch: Any, batch_idx: int) -> None:
        prediction, y = self._predicted(batch)
        metrics.update(prediction, y, self.loss(prediction, y))
