"""The scores of a classifier over a whole split, from all its samples at once and never from averages over batches."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import multiclass_calibration_error
from torchmetrics.utilities import dim_zero_cat


class ClassificationMetrics(Metric):
    """Loss, accuracy, balanced accuracy, two macro F1 scores, AUROC and calibration error.

    All but the last equal scikit-learn's on the same samples.

    Collects logits and labels (on their device) and computes everything in float64 on the CPU at the end, so results
    do not depend on the batch size or the precision of training. Nothing enters a ``state_dict``.

    ``compute()`` returns float32 scalars:

    - ``loss``: mean over samples of the losses given.
    - ``accuracy``: share of samples with the right label.
    - ``balanced_accuracy``: mean recall over the classes that occur in the labels.
    - ``f1_macro``: mean F1 over the classes that occur among the labels or the predictions (scikit-learn's default).
    - ``f1_macro_all``: mean F1 over all classes; one that never occurs counts 0. Never above ``f1_macro``.
    - ``auroc``: two classes: the area under the ROC curve. More: the mean of the one-against-the-rest areas (ranked by
      softmax probability) over the classes that have both positives and negatives in the labels. NaN when there is no
      such class (a client whose data hold one class only) and when a logit is NaN.

    Args:
        num_classes: number of columns of the logits, at least 2.
    """

    full_state_update = False
    losses: list[Tensor]
    logits: list[Tensor]
    target: list[Tensor]

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        for name in ("losses", "logits", "target"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, target: Tensor, loss: Tensor) -> None:
        """Add a batch: logits ``(N, num_classes)``, labels ``(N,)``, the mean loss over these N samples (scalar)."""
        self.losses.append((loss.detach() * len(target)).reshape(1).float())
        self.logits.append(logits.detach().float())
        self.target.append(target.detach())

    def compute(self) -> dict[str, Tensor]:
        """The scores over all samples since the last reset."""
        logits = dim_zero_cat(self.logits).cpu().double()
        target = dim_zero_cat(self.target).cpu()
        loss = dim_zero_cat(self.losses).cpu().double().sum() / len(target)
        scores = {"loss": loss, **confusion_scores(logits.argmax(1), target, self.num_classes)}
        scores["auroc"] = auroc(logits, target)
        scores["ece"] = calibration_error(logits, target)
        return {name: value.float().to(self.device) for name, value in scores.items()}


def confusion_scores(predicted: Tensor, target: Tensor, num_classes: int) -> dict[str, Tensor]:
    """Accuracy, balanced accuracy and both macro F1 scores of integer labels of shape ``(N,)``, in float64."""
    cells = torch.bincount(target * num_classes + predicted, minlength=num_classes**2)
    confusion = cells.reshape(num_classes, num_classes).double()  # rows: labels, columns: predictions
    right, in_target, in_predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    f1 = 2 * right / (in_target + in_predicted).clamp(min=1)  # 2TP / (2TP + FP + FN), 0 where undefined
    return {
        "accuracy": right.sum() / confusion.sum(),
        "balanced_accuracy": (right / in_target)[in_target > 0].mean(),
        "f1_macro": f1[in_target + in_predicted > 0].mean(),
        "f1_macro_all": f1.mean(),
    }


def auroc(logits: Tensor, target: Tensor) -> Tensor:
    """Area under the ROC curve from logits ``(N, C)`` and labels ``(N,)``; see ``ClassificationMetrics``."""
    # Two classes are ranked by the difference of their logits: probabilities near 1 would tie.
    two = logits.shape[1] == 2
    ranked = (logits[:, 1:] - logits[:, :1]) if two else logits.softmax(1)
    areas = [_area(ranked[:, column], target == column + two) for column in range(ranked.shape[1])]
    known = [area for area in areas if area is not None]
    if not known or bool(ranked.isnan().any()):
        return torch.tensor(torch.nan, dtype=torch.float64)
    return torch.stack(known).mean()


def calibration_error(logits: Tensor, target: Tensor, bins: int = 15) -> Tensor:
    """Expected calibration error, L1, of logits ``(N, C)`` and labels ``(N,)``; see ``ClassificationMetrics``."""
    if bool(logits.isnan().any()):
        return torch.tensor(torch.nan, dtype=torch.float64)
    return multiclass_calibration_error(logits.softmax(1), target, num_classes=logits.shape[1], n_bins=bins, norm="l1")


def _area(score: Tensor, positive: Tensor) -> Tensor | None:
    """Mann-Whitney: the chance that a positive scores above a negative, ties counting half. None without a pair."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return None
    _, place, count = score.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2.0)[place]  # ties share their middle rank
    return (rank[positive].sum().double() - positives * (positives + 1) / 2) / (positives * negatives)
