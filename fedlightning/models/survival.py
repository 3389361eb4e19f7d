"""The one survival module: any network with one output, as the log hazard of a proportional hazards model."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from fedlightning.models.supervised import SupervisedModule
from fedlightning.models.survival_metrics import SurvivalMetrics, cox_loss
from fedlightning.ranges import NonNegativeInt, PositiveFloat, check_arguments


class CoxRegressor(SupervisedModule):
    """A LightningModule that trains and scores a proportional hazards model on batches `(x, y)` (Cox 1972).

    `y` is `(batch, 2)`: column 0 is 1 for an event and 0 for a censored sample, column 1 the time, as in FLamby. The network
    returns the log hazard, `(batch,)` or `(batch, 1)`. `LogisticRegression(in_features)` is Cox's linear model (its constant
    has no effect); any other network with one output is DeepSurv's.

    The loss of a batch compares its samples with each other. With a batch size of at least the largest client, that is
    the client's whole partial likelihood; the federation then fits a Cox model *stratified* by client (`cox_loss`), which is
    what separate sites can fit without showing a patient. It is not the pooled Cox model. With smaller batches it is
    FLamby's stochastic approximation of that.

    Logged once at the end of an epoch: `train_loss`, the mean over batches, and with the prefixes `val_` and `test_` the
    scores `loss` and `c_index` of all samples of the split (`SurvivalMetrics`). The mean of the clients' C-indices, the
    C-index over all pairs within clients (`stratified_c_index`, from `pair_counts`), and that of the pooled test data,
    pairs across clients included, are three numbers. `predict_step` returns log hazards `(batch,)`.

    Checkpoints hold plain values only, as those of `Classifier`.

    Args:
        net: The network. `net(x)` returns the log hazard.
        optimizer: Makes the optimizer from the parameters. `None` is `torch.optim.SGD` with `lr`.
        scheduler: Makes the learning-rate scheduler from the optimizer. `ReduceLROnPlateau` monitors `val_loss`.
        lr: Learning rate of the default optimizer; `None` is 0.1 (FLamby). Not allowed together with `optimizer`.
        reduction: What a batch's loss is divided by: its `"samples"` (FLamby) or its `"events"`.
        min_events: Fewest events of which a C-index is given; below, it is a gap (NaN).
        pair_counts: Log `concordant_pairs` and `comparable_pairs`, too.
        scheduler_interval: When the scheduler steps: once an `"epoch"` or once a `"step"`.
        horizon: Log Uno's C-index of events before this time, `uno_c_index`, too.

    Raises:
        ValueError: If both `lr` and `optimizer` are given, or a value is out of its range.

    Example:
        >>> import torch
        >>> from fedlightning.models import CoxRegressor, LogisticRegression
        >>> module = CoxRegressor(LogisticRegression(in_features=39))
        >>> module.predict_step((torch.zeros(5, 39), torch.zeros(5, 2))).shape
        torch.Size([5])
    """

    shown = ("loss", "c_index")
    default_lr = 0.1

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable | None = None,
        scheduler: LRSchedulerCallable | None = None,
        lr: float | None = None,
        reduction: Literal["samples", "events"] = "samples",
        min_events: NonNegativeInt = 5,
        pair_counts: bool = False,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        horizon: PositiveFloat | None = None,
    ) -> None:
        super().__init__()
        check_arguments(self, CoxRegressor.__init__, locals())
        self.save_hyperparameters(ignore=["net", "optimizer", "scheduler"])
        self.reduction = reduction
        self.take_over(net, optimizer, scheduler, lr, scheduler_interval)
        self.val_metrics = SurvivalMetrics(reduction, min_events, pair_counts, horizon)
        self.test_metrics = SurvivalMetrics(reduction, min_events, pair_counts, horizon)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch, a scalar: 0, with gradients of 0, if it has no event."""
        risk, event, time = self._hazards(batch)
        loss = cox_loss(risk, time, event, self.reduction)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(risk))
        return loss

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return log hazards `(batch,)` for a batch `x` or `(x, y)`."""
        return self._risk(self(batch[0] if isinstance(batch, list | tuple) else batch))

    def _risk(self, found: Tensor) -> Tensor:
        if found.ndim == 2 and found.shape[1] == 1:
            found = found.squeeze(1)
        if found.ndim != 1:
            raise ValueError(
                f"{type(self.net).__name__} returned {tuple(found.shape)} for log hazards; give it one output for a sample."
            )
        return found.float() if found.dtype in (torch.float16, torch.bfloat16) else found

    def _hazards(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return log hazards, events and times of a batch, each `(batch,)`."""
        x, y = self._pair(batch)
        if y.ndim != 2 or y.shape[1] != 2:
            raise ValueError(
                f"CoxRegressor got targets of shape {tuple(y.shape)}; give (batch, 2): events (1, or 0 if censored) "
                "and times."
            )
        event, time = y[:, 0], y[:, 1]
        if y.device.type == "cpu" and not bool(((event == 0) | (event == 1)).all()):
            strange = event[(event != 0) & (event != 1)][0].item()
            raise ValueError(
                f"CoxRegressor got an event of {strange:g}; column 0 of the targets is 1 or 0, column 1 the time."
            )
        return self._risk(self(x)), event, time

    def _score(self, metrics: SurvivalMetrics, batch: Any, batch_idx: int) -> None:
        risk, event, time = self._hazards(batch)
        metrics.update(risk, time, event)
