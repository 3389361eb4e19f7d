"""The one survival module: any network with one output, as the log hazard of a proportional hazards model.

Scores of survival models: the partial likelihood of Cox, and the concordance index within and across sites.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from fedlightning.models.supervised import SupervisedModule
from fedlightning.ranges import NonNegativeInt, PositiveFloat, check_arguments, checked

CHUNK = 1024
"""Events that are compared with all samples at a time: 8 MB of comparisons for 1000 samples."""


def cox_loss(
    risk: Tensor, time: Tensor, event: Tensor, reduction: Literal["samples", "events", "sum"] = "samples"
) -> Tensor:
    r"""Return the negative log partial likelihood (Cox 1972), ties by Breslow.

    .. math::
        \ell = -\sum_{i: e_i = 1} \Big( r_i - \log \sum_{j: t_j \ge t_i} \exp r_j \Big)

    The risk set of an event is made of the samples that are given here. Of a batch it is the batch; of a whole client it
    is the client. The sum over clients of whole-client losses is the loss of a *stratified* Cox model, with a baseline
    hazard of its own at each site: patients of two sites are never compared. It is not the loss of the pooled data.

    Args:
        risk: Log hazards r, shape `(batch,)`.
        time: Times of event or censoring t, shape `(batch,)`.
        event: 1 for an event, 0 for a censored sample, shape `(batch,)`.
        reduction: Divide by the number of `"samples"` (FLamby), of `"events"`, or by nothing (`"sum"`). With `"samples"`,
            a mean of clients weighted by samples is the stratified likelihood divided by all samples.

    Example:
        >>> import torch
        >>> from fedlightning.models.survival import cox_loss
        >>> cox_loss(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 0.0]), "sum")  # log 3
        tensor(1.0986)
    """
    order = torch.argsort(time, descending=True, stable=True)
    risk, event, later = risk[order], event[order].to(risk.dtype), -time[order]
    last = torch.searchsorted(later, later, right=True) - 1  # samples of equal time are in each other's risk sets
    loss = ((torch.logcumsumexp(risk, 0)[last] - risk) * event).sum()
    if reduction == "sum":
        return loss
    return loss / (len(risk) if reduction == "samples" else event.sum().clamp(min=1))


def concordance(risk: Tensor, time: Tensor, event: Tensor) -> tuple[float, int]:
    r"""Return concordant and comparable pairs (Harrell 1982).

    A pair is comparable if the sample with the earlier time has an event; a sample censored at the time of an event
    outlived it. It is concordant if that sample has the higher risk; equal risks count half. Two events at one time are
    not comparable. Ratios of sums of both numbers over sites are the C-index stratified by site.

    Args:
        risk: Predicted risks, shape `(samples,)`: the higher, the earlier the event.
        time: Times of event or censoring, shape `(samples,)`.
        event: 1 for an event, 0 for a censored sample, shape `(samples,)`.

    Example:
        >>> import torch
        >>> from fedlightning.models.survival import concordance
        >>> concordance(torch.tensor([2.0, 1.0, 1.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 1, 0]))
        (2.5, 3)
    """
    concordant, comparable = _pairs_of_events(risk, time, event.bool())
    return float(concordant.sum()), int(comparable.sum())


def uno_concordance(risk: Tensor, time: Tensor, event: Tensor, horizon: float) -> tuple[float, float]:
    r"""Return the weights of concordant and of comparable pairs up to a horizon (Uno et al. 2011).

    Harrell's index depends on the censoring, because pairs of which nobody saw the end are left out. Here each pair whose
    earlier sample i has its event before the horizon :math:`\tau` counts :math:`\hat G(t_i^-)^{-2}`, with
    :math:`\hat G` the Kaplan-Meier estimate of the probability not to be censored. The ratio then estimates
    :math:`P(r_i > r_j \mid t_i < t_j, t_i < \tau)`, if censoring depends neither on time of event nor on risk.

    :math:`\hat G` is estimated from these samples, the evaluated ones; scikit-survival takes it from training samples, and at
    :math:`t_i`, which is another number where events and censorings have one time. Where
    a censoring and an event have one time, the event was first. Pairs are comparable, and ties count, as in `concordance`.

    Args:
        risk: Predicted risks, shape `(samples,)`.
        time: Times of event or censoring, shape `(samples,)`.
        event: 1 for an event, 0 for a censored sample, shape `(samples,)`.
        horizon: Time before which an event has to be. Take one at which enough samples are still followed.

    Example:
        >>> import torch
        >>> from fedlightning.models.survival import uno_concordance
        >>> risk, time, event = torch.tensor([3.0, 0.0, 1.0, 2.0]), torch.arange(4.0), torch.tensor([1, 0, 1, 1])
        >>> uno_concordance(risk, time, event, horizon=3.0)  # G is 2 / 3 after time 1: the pair (2, 3) counts 2.25
        (3.0, 5.25)
    """
    died = event.bool()
    concordant, comparable = _pairs_of_events(risk, time, died)
    event_times = time[died]
    weights = _uncensored_before(event_times, time, died).pow(-2) * (event_times < horizon)
    return float((weights * concordant).sum()), float((weights * comparable).sum())


def _pairs_of_events(risk: Tensor, time: Tensor, died: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each event its concordant and its comparable pairs with samples that outlived it, float64 `(events,)`."""
    concordant, comparable = [risk.new_zeros(0).double()], [risk.new_zeros(0).double()]
    for rows in torch.nonzero(died).squeeze(1).split(CHUNK):
        later = (time[rows, None] < time) | ((time[rows, None] == time) & ~died)
        higher, equal = risk[rows, None] > risk, risk[rows, None] == risk
        concordant.append((later & higher).sum(1).double() + 0.5 * (later & equal).sum(1).double())
        comparable.append(later.sum(1).double())
    return torch.cat(concordant), torch.cat(comparable)


def _uncensored_before(at: Tensor, time: Tensor, died: Tensor) -> Tensor:
    """Return the Kaplan-Meier estimate of not being censored before each time of `at`, float64."""
    times, place = time.unique(return_inverse=True)
    events = torch.bincount(place[died], minlength=len(times)).double()
    censored = torch.bincount(place[~died], minlength=len(times)).double()
    at_risk = (events + censored).flip(0).cumsum(0).flip(0) - events  # who has an event at a time is not censored at it
    stays = torch.where(censored > 0, 1 - censored / at_risk.clamp(min=1), torch.ones_like(censored))
    after = torch.cat([stays.new_ones(1), stays.cumprod(0)])
    return after[torch.searchsorted(times, at)]


def stratified_c_index(counts: Iterable[tuple[float, float]]) -> float:
    """Return the C-index over pairs within sites, from each site's concordant and comparable pairs; NaN without pairs.

    Example:
        >>> from fedlightning.models.survival import stratified_c_index
        >>> stratified_c_index([(6.0, 8), (1.0, 2)])
        0.7
    """
    concordant, comparable = (sum(column) for column in zip((0.0, 0.0), *counts, strict=True))
    return concordant / comparable if comparable else math.nan


class SurvivalMetrics(Metric):
    r"""Cox loss and concordance index over a whole split.

    The loss is `cox_loss` of all samples of the split together, not a mean of batches. The C-index is
    :math:`C = \text{concordant} / \text{comparable}` pairs, of all samples (*pooled*), or of those within a stratum where
    `update` is given strata (*stratified*). The two are different numbers: where sites differ in follow-up or in risk,
    pairs across sites are easier or harder than pairs within.

    Samples are collected on their device and computed in float64 on the CPU at the end. Results therefore do not depend
    on the batch size. Nothing enters a `state_dict`.

    As input to `update` the metric takes `risk`, `time`, `event` and, if wanted, `stratum`, all of shape `(batch,)`. As
    output of `compute` it returns a dictionary of float32 scalars: `loss`, `c_index`, with a `horizon` also `uno_c_index`
    (`uno_concordance`; weights by stratum), and with `pair_counts` also `concordant_pairs` and `comparable_pairs`, from which
    `stratified_c_index` makes the number over sites. A C-index is NaN with fewer than `min_events` events (Uno's: before the
    horizon) and without a comparable pair; a NaN risk makes it NaN, too.

    Args:
        reduction: What the loss is divided by, as in `cox_loss`.
        min_events: Fewest events of which the C-index is given. With three events it takes few values, by chance.
        pair_counts: Return the numbers of pairs, too.
        horizon: Time before which events count in Uno's C-index. `None` leaves it out.

    Example:
        >>> from torch import tensor
        >>> from fedlightning.models import SurvivalMetrics
        >>> metrics = SurvivalMetrics(min_events=2)
        >>> metrics.update(tensor([2.0, 1.0, 0.0]), time=tensor([1.0, 2.0, 3.0]), event=tensor([1.0, 1.0, 0.0]))
        >>> {name: round(score.item(), 3) for name, score in metrics.compute().items()}
        {'loss': 0.24, 'c_index': 1.0}
    """

    full_state_update = False
    metric_bounds = {
        "c_index": (0.0, 1.0),
        "uno_c_index": (0.0, 1.0),
        "concordant_pairs": (0.0, math.inf),
        "comparable_pairs": (0.0, math.inf),
    }
    risk: list[Tensor]
    time: list[Tensor]
    event: list[Tensor]
    stratum: list[Tensor]

    @checked
    def __init__(
        self,
        reduction: Literal["samples", "events", "sum"] = "samples",
        min_events: NonNegativeInt = 5,
        pair_counts: bool = False,
        horizon: PositiveFloat | None = None,
    ) -> None:
        super().__init__()
        self.reduction, self.min_events, self.pair_counts = reduction, min_events, pair_counts
        self.horizon = horizon
        for name in ("risk", "time", "event", "stratum"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, risk: Tensor, time: Tensor, event: Tensor, stratum: Tensor | None = None) -> None:
        """Add a batch."""
        strata = torch.zeros_like(event, dtype=torch.int64) if stratum is None else stratum.to(torch.int64)
        for name, values in (("risk", risk), ("time", time), ("event", event), ("stratum", strata)):
            getattr(self, name).append(values.detach().reshape(-1))

    def compute(self) -> dict[str, Tensor]:
        """Return the scores over all samples since the last reset."""
        risk, time, event = (dim_zero_cat(part).cpu().double() for part in (self.risk, self.time, self.event))
        strata = dim_zero_cat(self.stratum).cpu()
        parts = [(risk[rows], time[rows], event[rows]) for rows in (strata == value for value in strata.unique())]
        counts = [concordance(*part) for part in parts]
        is_ranked = not bool(risk.isnan().any())
        enough = int(event.sum()) >= self.min_events and is_ranked
        scores = {
            "loss": float(cox_loss(risk, time, event, self.reduction)),
            "c_index": stratified_c_index(counts) if enough else math.nan,
        }
        if self.horizon is not None:
            early = int(event[time < self.horizon].sum()) >= self.min_events and is_ranked
            weights = [uno_concordance(*part, self.horizon) for part in parts] if early else []
            scores["uno_c_index"] = stratified_c_index(weights)
        if self.pair_counts:
            totals = zip(("concordant_pairs", "comparable_pairs"), map(sum, zip(*counts, strict=True)), strict=True)
            scores |= {name: float(value) for name, value in totals}
        return {name: torch.tensor(value, dtype=torch.float32, device=self.device) for name, value in scores.items()}


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

    def _risk(self, hazards: Tensor) -> Tensor:
        if hazards.ndim == 2 and hazards.shape[1] == 1:
            hazards = hazards.squeeze(1)
        if hazards.ndim != 1:
            raise ValueError(
                f"{type(self.net).__name__} returned {tuple(hazards.shape)} for log hazards; give it one output for a sample."
            )
        return hazards.float() if hazards.dtype in (torch.float16, torch.bfloat16) else hazards

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
