"""The scores of a classifier over a whole split, computed from all samples at once and never averaged over batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import (
    binary_average_precision,
    multiclass_calibration_error,
    multiclass_cohen_kappa,
)
from torchmetrics.utilities import dim_zero_cat

from fedlightning.ranges import checked

FEW_SAMPLES = 256
"""Up to so many samples the scores are computed here."""
BINS = 15
"""Bins of the calibration error."""


class ClassificationMetrics(Metric):
    r"""Loss, accuracy, balanced accuracy, two macro F1 scores, AUROC and calibration error of a classifier.

    With :math:`TP_c, FP_c, FN_c` the counts of class :math:`c` among :math:`N` samples and :math:`C` classes:

    .. math::
        \text{loss} &= \frac{1}{N} \sum_i \ell_i \\
        \text{accuracy} &= \frac{1}{N} \sum_c TP_c \\
        \text{balanced\_accuracy} &= \frac{1}{|S|} \sum_{c \in S} \frac{TP_c}{TP_c + FN_c} \\
        \text{f1\_macro} &= \frac{1}{|T|} \sum_{c \in T} \frac{2 TP_c}{2 TP_c + FP_c + FN_c} \\
        \text{f1\_macro\_all} &= \frac{1}{C} \sum_{c \in T} \frac{2 TP_c}{2 TP_c + FP_c + FN_c}

    where :math:`S` are the classes that occur in the labels and :math:`T` those that occur in the labels or the
    predictions. For the other two scores see the functions `auroc` and `calibration_error`.

    All scores but `ece` equal scikit-learn's on the same samples. Logits and labels are collected on their device, and
    everything is computed in float64 on the CPU at the end. Results therefore do not depend on the batch size or the
    precision of training. Nothing enters a `state_dict`.

    As input to `update` the metric takes

    - `logits`: Logits of a batch, shape `(batch, num_classes)`.
    - `target`: Its labels `0 .. num_classes - 1`, shape `(batch,)`.
    - `loss`: The mean loss over these samples, shape `()`.

    As output of `compute` it returns a dictionary of float32 scalars

    - `loss`: Mean over samples of the losses given.
    - `accuracy`: Share of samples with the right label.
    - `balanced_accuracy`: Mean recall over the classes that occur in the labels.
    - `f1_macro`: Mean F1 over the classes that occur in the labels or the predictions (scikit-learn's default).
    - `f1_macro_all`: Mean F1 over all classes. A class that never occurs counts 0, so this is never above `f1_macro`.
    - `auroc`: Area under the ROC curve. NaN if no class has both positives and negatives in the labels (a client whose
      data hold one class only), or if a logit is NaN.
    - `ece`: Expected calibration error with 15 bins. NaN if a logit is NaN.
    - `kappa`, if asked for: Cohen's kappa; see `cohen_kappa`. NaN if labels and predictions are all of one class.
    - `pr_auc`, if asked for: area under the precision-recall curve; see `average_precision`. NaN where `auroc` is.

    Args:
        num_classes: Number of columns of the logits, at least 2.
        more: Scores beside the usual ones, of `MORE`. They are torchmetrics' own; for their cost see `Classifier`.

    Raises:
        ValueError: If `more` names an unknown score.

    Example:
        >>> from torch import tensor
        >>> from fedlightning.models import ClassificationMetrics
        >>> metrics = ClassificationMetrics(num_classes=3)
        >>> logits = tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 2.0, 0.0], [2.0, 0.0, 0.0]])
        >>> metrics.update(logits, target=tensor([0, 1, 0, 0]), loss=tensor(0.5))
        >>> {name: round(score.item(), 3) for name, score in metrics.compute().items()}  # class 2 never occurs
        {'loss': 0.5, 'accuracy': 0.75, 'balanced_accuracy': 0.833, 'f1_macro': 0.733, 'f1_macro_all': 0.489,
         'auroc': 0.833, 'ece': 0.037}
    """

    full_state_update = False
    metric_bounds = dict.fromkeys(
        ("accuracy", "balanced_accuracy", "f1_macro", "f1_macro_all", "auroc", "ece", "pr_auc"), (0.0, 1.0)
    ) | {"kappa": (-1.0, 1.0)}
    losses: list[Tensor]
    logits: list[Tensor]
    target: list[Tensor]

    @checked
    def __init__(self, num_classes: int, more: Sequence[Literal["kappa", "pr_auc"]] = ()) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.more = tuple(more)
        for name in ("losses", "logits", "target"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, target: Tensor, loss: Tensor) -> None:
        """Add a batch of logits, labels and its mean loss."""
        self.losses.append((loss.detach() * len(target)).reshape(1).float())
        self.logits.append(logits.detach().float())
        self.target.append(target.detach())

    def compute(self) -> dict[str, Tensor]:
        """Return the scores over all samples since the last reset."""
        logits = _joined(self.logits).cpu().double()
        target = _joined(self.target).cpu()
        samples = len(target)
        loss = float(_joined(self.losses).cpu().double().sum())
        scores = {"loss": loss / samples if samples else math.nan}
        usual = 0 < samples <= FEW_SAMPLES and logits.shape[1] == self.num_classes
        if usual and np.isfinite(logits.numpy()).all():
            scores |= scores_of_few(logits, target)
        else:
            chances = logits.softmax(1)
            scores |= counted_scores(logits.argmax(1).numpy(), target.numpy(), self.num_classes)
            scores["auroc"] = auroc(logits, chances, target)
            scores["ece"] = calibration_error(logits, chances, target)
        scores |= {name: float(MORE[name](logits, target)) for name in self.more}
        values = torch.tensor(list(scores.values()), dtype=torch.float32, device=self.device)
        return dict(zip(scores, values.unbind(), strict=True))


def _joined(states: list[Tensor] | Tensor) -> Tensor:
    return states[0] if isinstance(states, list) and len(states) == 1 else dim_zero_cat(states)


def cohen_kappa(logits: Tensor, target: Tensor) -> Tensor:
    r"""Return Cohen's kappa of labels and predictions (torchmetrics).

    .. math:: \kappa = (p_o - p_e) / (1 - p_e)

    with :math:`p_o` the accuracy, and :math:`p_e` the accuracy by chance: the sum over classes of the share of the class
    among the labels times that among the predictions.

    Example:
        >>> import torch
        >>> from fedlightning.models.metrics import cohen_kappa
        >>> cohen_kappa(torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 0])).item()
        0.5
    """
    predicted, classes = logits.argmax(1), logits.shape[1]
    if bool((target == target[:1]).all()) and bool((predicted == target).all()):
        return torch.tensor(math.nan)
    return multiclass_cohen_kappa(predicted, target, num_classes=classes, validate_args=False)


def average_precision(logits: Tensor, target: Tensor) -> Tensor:
    r"""Return the area under the precision-recall curve: the average precision (torchmetrics).

    .. math:: A_c = \sum_n (R_n - R_{n-1}) P_n

    with precision and recall at every threshold. Two classes: that of class 1, by the difference of the logits. More
    classes: the mean over the classes with both positives and negatives, by softmax probabilities; as for `auroc`.

    Example:
        >>> import torch
        >>> from fedlightning.models.metrics import average_precision
        >>> average_precision(torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]]), torch.tensor([0, 1, 0])).item()
        1.0
    """
    two = logits.shape[1] == 2
    scores = (logits[:, 1:] - logits[:, :1]) if two else logits.softmax(1)
    if bool(scores.isnan().any()):
        return torch.tensor(math.nan)
    areas = []
    for column in range(scores.shape[1]):
        positive = (target == column + two).long()
        if 0 < int(positive.sum()) < len(positive):
            # Ranks, because torchmetrics takes a sigmoid of scores outside [0, 1], where large ones would tie.
            places = scores[:, column].unique(return_inverse=True)[1].double() / len(positive)
            areas.append(binary_average_precision(places, positive, validate_args=False))
    return torch.stack(areas).mean() if areas else torch.tensor(math.nan)


MORE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kappa": cohen_kappa, "pr_auc": average_precision}
"""Scores that a `Classifier` computes if it is asked to (`more_metrics`)."""


def auroc(logits: Tensor, chances: Tensor, target: Tensor) -> float:
    r"""Return the area under the ROC curve.

    .. math::
        A_c = \frac{1}{P_c N_c} \sum_{i: y_i = c} \, \sum_{j: y_j \neq c}
        [s_{ic} > s_{jc}] + \tfrac{1}{2} [s_{ic} = s_{jc}]

    where :math:`P_c` and :math:`N_c` are the numbers of samples with and without label :math:`c`. Two classes: the area
    of class 1, with the difference of the two logits as score. More classes: the mean over the classes that have both
    positives and negatives, with softmax probabilities as scores.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]])
        >>> auroc(logits, logits.softmax(1), torch.tensor([0, 1, 0]))
        1.0
    """
    # Two classes are ranked by the difference of their logits: probabilities near 1 would tie.
    two = logits.shape[1] == 2
    ranked = (logits[:, 1:] - logits[:, :1]) if two else chances
    if bool(ranked.isnan().any()):
        return math.nan
    areas = [_area(ranked[:, column], target == column + two) for column in range(ranked.shape[1])]
    defined_areas = [area for area in areas if area is not None]
    return float(torch.stack(defined_areas).mean()) if defined_areas else math.nan


def calibration_error(logits: Tensor, chances: Tensor, target: Tensor) -> float:
    r"""Return the expected calibration error (L1).

    .. math::
        \text{ECE} = \sum_b \frac{n_b}{N} \, | \text{accuracy}_b - \text{confidence}_b |

    over bins :math:`b` of equal width of the largest softmax probability, with :math:`n_b` of the :math:`N` samples
    each.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])  # confidence 0.88, accuracy 0.5
        >>> round(calibration_error(logits, logits.softmax(1), torch.tensor([0, 1])), 2)
        0.38
    """
    if bool(logits.isnan().any()):
        return math.nan
    if len(target) <= FEW_SAMPLES and not bool(logits.isinf().any()):
        return calibration_gap(chances.numpy(), target.numpy())
    classes = logits.shape[1]
    return float(multiclass_calibration_error(chances, target, num_classes=classes, n_bins=BINS, norm="l1"))


def _area(score: Tensor, positive: Tensor) -> Tensor | None:
    """Return the Mann-Whitney statistic: the chance that a positive scores above a negative, ties counting half.

    `None` without both positives and negatives.
    """
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return None
    _, place, count = score.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2.0)[place]  # ties share their middle rank
    return (rank[positive].sum().double() - positives * (positives + 1) / 2) / (positives * negatives)


# -- few samples: the same bits as from torch, by fewer and shorter calls in numpy. A federation scores a thousand clients of
# twenty samples each, where a score costs its calls and no arithmetic to speak of.
def scores_of_few(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return all scores that `ClassificationMetrics` always gives, the loss aside; formulas there.

    Example:
        >>> import torch
        >>> from fedlightning.models.metrics import scores_of_few
        >>> scores_of_few(torch.eye(2).double()[[0, 1, 1, 0]], torch.tensor([0, 1, 0, 0]))["accuracy"]
        0.75
    """
    labels, values = target.numpy(), logits.numpy()
    chances = logits.softmax(1).numpy()  # torch's exponential function rounds in its own way
    scores, in_target = _counted(values.argmax(1), labels, values.shape[1])
    # Two classes are ranked by the difference of their logits: probabilities near 1 would tie.
    ranked = values[:, 1:] - values[:, :1] if values.shape[1] == 2 else chances
    scores["auroc"] = _mean(areas(ranked, labels, in_target))
    scores["ece"] = calibration_gap(chances, labels)
    return scores


def counted_scores(predicted: Any, labels: Any, num_classes: int) -> dict[str, float]:
    """Return accuracy, balanced accuracy and both macro F1 scores.

    Example:
        >>> import numpy as np
        >>> from fedlightning.models.metrics import counted_scores
        >>> counted_scores(np.array([0, 1]), np.array([0, 0]), num_classes=2)["accuracy"]
        0.5
    """
    return _counted(predicted, labels, num_classes)[0]


def _counted(predicted: Any, labels: Any, num_classes: int) -> tuple[dict[str, float], Any]:
    right = np.bincount(labels[labels == predicted], minlength=num_classes)
    in_target, in_predicted = (np.bincount(classes, minlength=num_classes) for classes in (labels, predicted))
    in_either = in_target + in_predicted
    f1 = 2 * right / np.maximum(in_either, 1)  # 2TP / (2TP + FP + FN), 0 where undefined
    present = in_target > 0
    scores = {
        "accuracy": float(np.add.reduce(right)) / len(labels) if len(labels) else math.nan,
        "balanced_accuracy": _mean(right[present] / in_target[present]),
        "f1_macro": _mean(f1[in_either > 0]),
        "f1_macro_all": _mean(f1),
    }
    return scores, in_target


def areas(ranked: Any, labels: Any, in_target: Any) -> Any:
    """Return the areas under the ROC curve of the classes that have one; all numbers but the quotient are exact."""
    own_columns = labels if ranked.shape[1] > 1 else np.zeros_like(labels)
    scores = ranked[:, own_columns]  # a sample is ranked in the column of its own class only
    samples = len(labels)
    # As many as are below a sample, less those above it: ties share their middle rank.
    rank = (np.add.reduce(np.sign(scores.diagonal() - scores), 0) + (samples + 1)) * 0.5
    sums = np.bincount(labels, rank, len(in_target))
    pairs = in_target * (samples - in_target)
    has_pairs = pairs > 0
    if ranked.shape[1] == 1:
        has_pairs[0] = False
    return (sums - in_target * (in_target + 1) / 2)[has_pairs] / pairs[has_pairs]


def calibration_gap(chances: Any, labels: Any, bins: int = BINS) -> float:
    """Return the expected calibration error (L1), rounded as torchmetrics' is."""
    confidence = np.maximum.reduce(chances, 1).astype(np.float32)
    place = _edges(bins).searchsorted(confidence, "right") - 1
    count = np.bincount(place, minlength=bins + 1).astype(np.float32)
    right = np.bincount(place[chances.argmax(1) == labels], minlength=bins + 1).astype(np.float32)
    divisor = np.maximum(count, 1)
    total = np.zeros(bins + 1, np.float32)
    np.add.at(total, place, confidence)  # in single precision and in order, as torchmetrics adds them up
    gaps = np.abs(right / divisor - total / divisor) * (count / np.float32(len(labels)))
    return float(torch.from_numpy(gaps).sum())


@cache
def _edges(bins: int) -> Any:
    return torch.linspace(0, 1, bins + 1, dtype=torch.float32).numpy()


def _mean(values: Any) -> float:
    """Return the mean, added up in torch's order; NaN of nothing."""
    return float(torch.from_numpy(values).sum()) / len(values) if len(values) else math.nan
