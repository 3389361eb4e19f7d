"""The scores of a classifier on few samples, in numpy: the same bits as from torch, by fewer and shorter calls.

A federation scores a thousand clients of twenty samples each. There a score costs its calls and no arithmetic to speak of.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

FEW = 256
"""Up to so many samples the scores are computed here."""
BINS = 15
"""Bins of the calibration error."""


def scores_of_few(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return all scores that `ClassificationMetrics` always gives, the loss aside; formulas there.

    Example:
        >>> import torch
        >>> from fedlightning.models.few import scores_of_few
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
        >>> from fedlightning.models.few import counted_scores
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
    known = pairs > 0
    if ranked.shape[1] == 1:
        known[0] = False
    return (sums - in_target * (in_target + 1) / 2)[known] / pairs[known]


def calibration_gap(chances: Any, labels: Any, bins: int = BINS) -> float:
    """Return the expected calibration error (L1), rounded as torchmetrics' is."""
    confidence = np.maximum.reduce(chances, 1).astype(np.float32)
    place = _edges(bins).searchsorted(confidence, "right") - 1
    count = np.bincount(place, minlength=bins + 1).astype(np.float32)
    right = np.bincount(place[chances.argmax(1) == labels], minlength=bins + 1).astype(np.float32)
    held = np.maximum(count, 1)
    total = np.zeros(bins + 1, np.float32)
    np.add.at(total, place, confidence)  # in single precision and in order, as torchmetrics adds them up
    gaps = np.abs(right / held - total / held) * (count / np.float32(len(labels)))
    return float(torch.from_numpy(gaps).sum())


@cache
def _edges(bins: int) -> Any:
    return torch.linspace(0, 1, bins + 1, dtype=torch.float32).numpy()


def _mean(values: Any) -> float:
    """Return the mean, added up in torch's order; NaN of nothing."""
    return float(torch.from_numpy(values).sum()) / len(values) if len(values) else math.nan
