"""What a module logs, as plain numbers.

Metrics that callbacks and schedulers monitor, and the visits that must validate to have them.

A visit does not validate inside training unless something needs it. Whether something does only shows when a module has
logged: a monitored metric that training did not log asks for validation. The visit is then carried out again with
validation on the client's own data, as all that follow are (:func:`~fedlightning.client.visit.carry_out`); a visit has
changed nothing before it ends.

Metrics of torchmetrics that are not defined on a client's data: NaN in place of the number that torchmetrics gives.

On labels of one class torchmetrics returns 0 for the area under a ROC curve, and a recall of 0 for a class that no sample
has. Such numbers would enter the means over clients. Inside :func:`nan_where_undefined` the metric objects of a module
return NaN instead, whichever way the module logs them. What is undefined is read from the state of the metric; for
classes that have no rule here, from the warning that `compute` gives.

A macro or weighted average is taken over the classes that are defined, and is NaN if none is.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, classification, regression
from torchmetrics.utilities import dim_zero_cat

from fedlightning.contract import FederatedCallback
from fedlightning.errors import Restart
from fedlightning.wrappers import user_class

WARNS = re.compile(r"meaningless|undefined|ill-defined|not (well[- ]?)?defined|at least two samples", re.IGNORECASE)
"""Words by which torchmetrics and scikit-learn say that they return a number for what is not defined."""


def nan_where_undefined(module: nn.Module) -> AbstractContextManager[Any]:
    """Within the block, the metrics of a module compute NaN where they are not defined on the data that they have seen."""
    metrics = _metrics_of(module)
    if not metrics:
        return nullcontext()
    with ExitStack() as stack:
        for metric in metrics:
            attributes = vars(metric)
            # else `compute` is the class's own, as in arithmetic with metrics: its parts are here
            if "compute" in attributes:
                stack.callback(attributes.__setitem__, "compute", attributes["compute"])
                attributes["compute"] = _marked(metric, attributes["compute"])
        return stack.pop_all()


def _metrics_of(module: nn.Module) -> list[Metric]:
    """Return the metrics of a module, also those that it holds in plain lists and dictionaries."""
    metrics = {id(child): child for child in module.modules() if isinstance(child, Metric)}
    for value in vars(module).values():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for entry in inside:
            if isinstance(entry, nn.Module) and value is not module._modules:
                metrics |= {id(child): child for child in entry.modules() if isinstance(child, Metric)}
    return list(metrics.values())


def _marked(metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `compute` of a metric with NaN for what is undefined."""
    rule = next((rule for kinds, rule in RULES.items() if isinstance(metric, kinds)), None)

    @wraps(compute)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if rule is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=f".*({WARNS.pattern})", category=UserWarning)
                return rule(metric, partial(compute, *args, **kwargs))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = compute(*args, **kwargs)
        undefined = [warning for warning in caught if WARNS.search(str(warning.message))]
        for warning in caught:
            if warning not in undefined:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        is_scalar = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
        return torch.full_like(value, torch.nan) if undefined and is_scalar else value

    return marked


Compute = Callable[[], Any]
"""`compute` of a metric."""


def _by_class(
    metric: Any, compute: Compute, defined: Tensor, support: Tensor | None = None, changes: bool = True
) -> Any:
    """Return the value of a metric over classes, of which some are undefined.

    Args:
        metric: The metric.
        compute: Its `compute`.
        defined: Whether it is defined for each class, `(num_classes,)`; `()` where there are no classes.
        support: Weight of each class in a weighted average.
        changes: Whether torchmetrics counts undefined classes in an average.
    """
    if bool(defined.all()):
        return compute()
    average = getattr(metric, "average", None)
    if defined.ndim and bool(defined.any()) and average in ("macro", "weighted"):
        if not changes:
            return compute()
        values = _computed_with(metric, average="none")[defined]
        weights = torch.ones_like(values) if support is None or average == "macro" else support[defined].to(values)
        return (values * weights).sum() / weights.sum()
    value = compute()
    if isinstance(value, Tensor) and value.shape == defined.shape:
        return value.float().masked_fill(~defined.to(value.device), torch.nan)
    return torch.full_like(value, torch.nan, dtype=torch.float) if not bool(defined.any()) else value


def _computed_with(metric: Any, **settings: Any) -> Tensor:
    """Return what a metric computes with other settings; neither cached nor gathered from other processes."""
    before = {name: getattr(metric, name) for name in settings}
    try:
        vars(metric).update(settings)
        value: Tensor = type(metric).compute(metric)
        return value
    finally:
        vars(metric).update(before)


# -- curves: areas under them, precision at thresholds -----------------------------------------------------------------
def _ranking(metric: Any, compute: Compute) -> Any:
    """ROC curves need samples with and without a class; curves of precision and recall, samples with it."""
    if not isinstance(metric, AREAS):
        return compute()  # a curve: no number
    positives, negatives = _positives_and_negatives(metric)
    if getattr(metric, "average", None) == "micro":
        positives, negatives = positives.sum(), negatives.sum()
    defined = positives > 0 if isinstance(metric, PRECISION) else (positives > 0) & (negatives > 0)
    return _by_class(metric, compute, defined, positives)


def _positives_and_negatives(metric: Any) -> tuple[Tensor, Tensor]:
    if metric.thresholds is not None:
        counts = metric.confmat[0].sum(-1)  # at any threshold: `(..., label)`
        return counts[..., 1], counts[..., 0]
    target = dim_zero_cat(metric.target)
    if isinstance(metric, classification.MulticlassPrecisionRecallCurve):
        classes = target.flatten()[(target.flatten() >= 0) & (target.flatten() < metric.num_classes)].long()
        if getattr(metric, "average", None) != "micro":  # else the targets are of every sample and class already
            counts = torch.bincount(classes, minlength=metric.num_classes)
            return counts, counts.sum() - counts
    if isinstance(metric, classification.MultilabelPrecisionRecallCurve):
        return (target == 1).sum(0), (target == 0).sum(0)
    return (target == 1).sum(), (target == 0).sum()


# -- counts of right and wrong predictions -----------------------------------------------------------------------------
def _counted(metric: Any, compute: Compute) -> Any:
    """Recall needs samples with the class, specificity samples without it; precision and F1 need either or a prediction."""
    if not isinstance(metric.tp, Tensor) or getattr(metric, "zero_division", None):
        return compute()  # sample by sample, or the user has said what an undefined value shall be
    counts = {name: getattr(metric, name) for name in ("tp", "fp", "tn", "fn")}
    if getattr(metric, "average", None) == "micro":
        counts = {name: count.sum() for name, count in counts.items()}
    tp, fp, tn, fn = counts.values()
    if isinstance(metric, OF_POSITIVES):
        total = tp + fn
    elif isinstance(metric, SPECIFICITY):
        total = tn + fp
    elif isinstance(metric, NEGATIVE_VALUE):
        total = tn + fp + fn
    elif isinstance(metric, PRECISION_AND_F1):
        total = tp + fp + fn
    else:
        return compute()
    counts_in_mean = tp + fp + fn > 0 if isinstance(metric, MULTICLASS) else torch.ones_like(total, dtype=torch.bool)
    if getattr(metric, "average", None) == "weighted":
        counts_in_mean = tp + fn > 0
    return _by_class(metric, compute, total > 0, tp + fn, changes=bool(((total == 0) & counts_in_mean).any()))


def _jaccard(metric: Any, compute: Compute) -> Any:
    """The Jaccard index needs a sample or a prediction of the class."""
    counts = metric.confmat
    if getattr(metric, "zero_division", None) or getattr(metric, "average", None) == "micro":
        return compute()
    if isinstance(metric, classification.MulticlassJaccardIndex):
        return _by_class(metric, compute, counts.sum(0) + counts.sum(1) > 0, changes=False)
    defined = counts[..., 1, 1] + counts[..., 0, 1] + counts[..., 1, 0] > 0
    return _by_class(metric, compute, defined)


def _matthews(metric: Any, compute: Compute) -> Any:
    """Matthews' correlation needs labels of two classes."""
    counts = metric.confmat.sum(0) if metric.confmat.ndim == 3 else metric.confmat
    return _or_nan(compute, int((counts.sum(1) > 0).sum()) > 1)


# -- regression --------------------------------------------------------------------------------------------------------
def _or_nan(compute: Compute, defined: bool | Tensor) -> Any:
    """Return the value, or NaN; element by element where there are several."""
    mask = torch.as_tensor(defined)
    if not bool(mask.any()):
        return torch.full(mask.shape if mask.ndim and mask.numel() > 1 else (), torch.nan, device=mask.device)
    value = compute()
    if bool(mask.all()) or not isinstance(value, Tensor):
        return value
    if value.shape != mask.shape:  # an average over targets
        return torch.full_like(value, torch.nan)
    return value.masked_fill(~mask.to(value.device), torch.nan)


def _r2(metric: Any, compute: Compute) -> Any:
    total = metric.total
    return _of_varying(compute, total, metric.sum_squared_error - metric.sum_error * metric.sum_error / total)


def _explained_variance(metric: Any, compute: Compute) -> Any:
    total = metric.num_obs
    return _of_varying(compute, total, metric.sum_squared_target - metric.sum_target**2 / total)


def _of_varying(compute: Compute, total: Any, squares: Tensor) -> Any:
    """What is relative to the variance of the targets needs two of them that differ."""
    return _or_nan(compute, (squares.abs() > 1e-4) if int(total) > 1 else torch.zeros_like(squares, dtype=torch.bool))


def _rank_correlation(metric: Any, compute: Compute) -> Any:
    """A correlation needs two samples, and neither predictions nor targets that are all equal."""
    both = [dim_zero_cat(state).reshape(len(dim_zero_cat(state)), -1) for state in (metric.preds, metric.target)]
    varies = [(values != values[:1]).any(0) for values in both]
    defined = varies[0] & varies[1]
    return _or_nan(compute, defined if defined.numel() > 1 else defined.reshape(()))


Kinds = tuple[type[Metric], ...]


def _kinds(*names: str, of: str = "Binary Multiclass Multilabel") -> Kinds:
    return tuple(getattr(classification, f"{kind}{name}") for name in names for kind in of.split())


PRECISION = _kinds("AveragePrecision")
AREAS = (*_kinds("AUROC", "LogAUC", "EER"), *PRECISION)
OF_POSITIVES = (*_kinds("Recall"), *_kinds("Accuracy", "HammingDistance", of="Multiclass"))
SPECIFICITY = _kinds("Specificity")
NEGATIVE_VALUE = _kinds("NegativePredictiveValue")
PRECISION_AND_F1 = _kinds("Precision", "FBetaScore")
MULTICLASS: Kinds = (classification.MulticlassStatScores,)

RULES: dict[Kinds, Callable[[Any, Compute], Any]] = {
    _kinds("PrecisionRecallCurve"): _ranking,
    _kinds("StatScores"): _counted,
    _kinds("JaccardIndex"): _jaccard,
    _kinds("MatthewsCorrCoef"): _matthews,
    (regression.R2Score, regression.RelativeSquaredError): _r2,
    (regression.ExplainedVariance,): _explained_variance,
    (regression.SpearmanCorrCoef,): _rank_correlation,
}
"""Kinds of metrics -> rule that computes their value. Metrics that give NaN themselves need none."""


class Monitor(NamedTuple):
    """A metric that somebody waits for.

    Attributes:
        owner: Class of the callback or scheduler.
        metric: Name of the metric.
    """

    owner: str
    metric: str

    def __str__(self) -> str:
        return f"{self.owner} monitors '{self.metric}'"


class ValidationRequired(Restart):
    """Asks for a visit with validation.

    Args:
        monitor: The metric that training alone does not give.
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(str(monitor))
        self.monitor = monitor

    def apply(self, runner: Any) -> None:
        """Validate inside visits from now on."""
        runner.validate_visits(self.monitor)


def monitors(trainer: Any) -> Iterator[Monitor]:
    """Yield what the ordinary callbacks and the plateau schedulers of a Trainer (or its stand-in) monitor."""
    for callback in trainer.callbacks:
        name = getattr(callback, "monitor", None)
        if isinstance(name, str) and not isinstance(callback, FederatedCallback):
            yield Monitor(type(callback).__name__, name)
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and isinstance(config.monitor, str):
            yield Monitor(type(config.scheduler).__name__, config.monitor)


def missing(trainer: Any) -> list[Monitor]:
    """Return what is monitored but has not been logged."""
    metrics = trainer.callback_metrics
    return [monitor for monitor in monitors(trainer) if monitor.metric not in metrics]


def require(trainer: Any, module: str, validates: bool, error: BaseException | None = None) -> None:
    """Ask for validation, or report a metric that is not there even with it."""
    unmet = [] if trainer is None else missing(trainer)
    unmet = [monitor for monitor in unmet if error is None or monitor.metric in str(error)]
    if not unmet:
        return
    if not validates:
        raise ValidationRequired(unmet[0]) from error
    names = sorted(trainer.callback_metrics)
    every = trainer.check_val_every_n_epoch or 1
    sentence = f"{unmet[0]}, but {module} logs " + (", ".join(names) if names else "nothing") + " in a visit"
    if 0 < trainer.max_epochs < every:
        sentence += f", which has {trainer.max_epochs} local epoch(s): check_val_every_n_epoch={every} never validates"
    sentence += (
        f". Set monitor to a metric that it logs, or log '{unmet[0].metric}' in training_step or validation_step."
    )
    if error is None:
        warnings.warn(sentence, UserWarning, stacklevel=2)
    else:
        raise ValueError(sentence) from error


class NotOneNumberError(ValueError):
    """A module logs under a name what is not a single number."""

    WAY_OUT = "Log its mean, or a number for each class (torchmetrics.ClasswiseWrapper)"


def one_number(name: str, value: Any, owner: LightningModule | None) -> Any:
    """Return a logged value if it is a single number.

    Raises:
        NotOneNumberError: With its name and its shape.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        module = "The module" if owner is None else user_class(owner).__name__
        raise NotOneNumberError(
            f"{module} logs '{name}' as a tensor of shape {tuple(value.shape)}, and what is logged is one number. "
            f"{NotOneNumberError.WAY_OUT}"
        )
    return value


def numbers(logged: Mapping[str, Any], owner: LightningModule) -> dict[str, float]:
    """Return logged values as plain numbers."""
    return {name: float(one_number(name, value, owner)) for name, value in logged.items()}
