"""What a metric's name says about it.

Results of a run: statistics over clients of the rows of one model, stage, checkpoint, data, split and metric.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedlightning.scores.rows import KIND, Row

LOWER_IS_BETTER = (
    *("loss", "ece", "error", "err", "perplexity", "mse", "rmse", "mae", "nll", "brier"),
    *("divergence", "distance"),
)
"""Words of metrics where less is better, as parts of a name: `val_loss`, `test/loss`, `MeanSquaredError`."""

ACCURACY = ("accuracy", "acc")
"""Names of the share of right answers; every metric of that name is counted as one."""
DEFAULTS = (
    *(*ACCURACY, "balanced_accuracy", "f1_macro", "auroc"),
    *("rmse", "mae", "c_index", "dice", "iou", "f1", "loss"),
)
"""Metrics in the order of importance. Runs are compared by the first that all of them have, if nobody says."""

SHARES = (
    "accuracy",
    "acc",
    "balanced_accuracy",
    "f1",
    "f1_macro",
    "f1_macro_all",
    "auroc",
    "auc",
    "pr_auc",
    "ece",
    "precision",
    "recall",
    "specificity",
)
"""Metrics that are shares whoever logs them; some log percents."""
ERRORS = ("mse", "rmse", "mae", "mape", "brier", "perplexity")
"""Metrics that are never below 0, whoever logs them."""


LABELS = {
    "auroc": "AUROC",
    "balanced_accuracy": "balanced accuracy",
    "c_index": "C-index",
    "ece": "calibration error",
    "f1_macro": "macro F1",
    "f1_macro_all": "macro F1 over all classes",
    "mae": "MAE",
    "mse": "MSE",
    "pearson": "Pearson's r",
    "r2": "R²",
    "rmse": "RMSE",
}
"""Metric -> its name for readers."""


def metric_label(name: str) -> str:
    """Return the name of a metric for readers.

    Example:
        >>> metric_label("rmse"), metric_label("top_5")
        ('RMSE', 'top 5')
    """
    return LABELS.get(name, name.replace("_", " "))


def bounds_of(modules: Iterable[Any]) -> dict[str, tuple[float, float]]:
    """Return what metrics can be, by their bare names: what modules say by `metric_bounds`; of shares at least `[0, 100]`.

    Of a torchmetrics object the best that it can be, under its attribute's name. The other end of what torchmetrics draws its
    plots in is not a bound: there Cohen's kappa begins at 0.
    """
    bounds = dict.fromkeys(SHARES, (0.0, 100.0)) | dict.fromkeys(ERRORS, (0.0, math.inf))
    declared: dict[str, tuple[float, float]] = {}
    for module in modules:
        bounds_of_module = getattr(module, "metric_bounds", None)
        declared |= bounds_of_module if isinstance(bounds_of_module, dict) else {}
        for name, child in module.named_children() if hasattr(module, "named_children") else ():
            if (best := _best_of(child)) is not None:
                bounds.setdefault(bare(name), best)
    return bounds | declared


def _best_of(metric: Any) -> tuple[float, float] | None:
    """Return the range of a torchmetrics object, open at its worse end; some log percents."""
    better = getattr(metric, "higher_is_better", None)
    if better is False and getattr(metric, "plot_lower_bound", None) == 0:
        return 0.0, math.inf
    return (-math.inf, 100.0) if better is True and getattr(metric, "plot_upper_bound", None) == 1 else None


def outside(bounds: Mapping[str, tuple[float, float]], metric: str, value: float) -> str | None:
    """Return the range that a score should be in, where it is not; `None` if it is, or is not defined (NaN).

    Example:
        >>> outside({"accuracy": (0.0, 1.0)}, "val_accuracy", 7), outside({"accuracy": (0.0, 1.0)}, "val_accuracy", 0.5)
        ('[0, 1]', None)
    """
    low, high = bounds.get(bare(metric), (-math.inf, math.inf))
    slack = 1e-6 * max(1.0, abs(value))  # a mean of float32 numbers
    return f"[{low:g}, {high:g}]" if value < low - slack or value > high + slack else None


def bare(metric: str) -> str:
    """The name without its split: ``test_accuracy`` and ``test/accuracy`` are ``accuracy``."""
    for split in ("train", "val", "test"):
        metric = metric.removeprefix(f"{split}_").removeprefix(f"{split}/")
    return metric


def higher_is_better(metric: str) -> bool:
    """Whether more is better; False for losses and errors, known by the words of their names.

    >>> higher_is_better("test_accuracy"), higher_is_better("val_loss"), higher_is_better("ece")
    (True, False, False)
    >>> higher_is_better("val/loss"), higher_is_better("test_MeanAbsoluteError"), higher_is_better("test/F1Score")
    (False, False, True)
    """
    # at signs, digits and capitals: torchmetrics' class names
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", metric)
    return not any(word.lower() in LOWER_IS_BETTER for word in words)


def choose_metric(metrics_by_run: Sequence[Sequence[str]]) -> str:
    """Return the metric to compare runs by if nobody says: one that all have, accuracy before rmse before loss.

    Example:
        >>> choose_metric([["loss", "accuracy"], ["loss", "accuracy", "auroc"]]), choose_metric([["loss", "rmse", "mae"]])
        ('accuracy', 'rmse')
        >>> choose_metric([["loss", "acc"]]), choose_metric([["loss", "f1", "iou"]])
        ('acc', 'iou')
    """
    common = (
        [name for name in metrics_by_run[0] if all(name in metrics for metrics in metrics_by_run)]
        if metrics_by_run
        else []
    )
    return next((name for name in (*DEFAULTS, *common) if name in common), DEFAULTS[0])


def summarise(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows of ``summary.json``: per model, stage, checkpoint, data, split and metric the statistics over clients.

    ``mean`` is uniform over clients, ``weighted_mean`` by evaluated samples, ``std`` and ``variance`` those of the
    population, ``worst`` and ``tenth_percentile`` taken from the bad end (the top for a loss). A value that is not
    defined for a client (AUROC with one class) is ``null`` there and left out of the statistics, which are over
    ``clients`` clients.
    """
    import numpy as np  # not by the process that watches runs, which imports this file

    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(KIND(row), []).append(row)
    out = []
    for key, members in groups.items():
        scores = np.array([row.value for row in members], dtype=float)
        defined = np.isfinite(scores)
        values = scores[defined]
        weights = np.array([row.num_samples for row in members], dtype=float)[defined]
        some = len(values) > 0
        good = higher_is_better(key[-1])
        out.append(
            dict(zip(("model", "stage", "checkpoint", "data", "split", "metric"), key, strict=True))
            | {
                "mean": float(values.mean()) if some else None,
                "weighted_mean": float((values * weights).sum() / weights.sum()) if some else None,
                "std": float(values.std()) if some else None,
                "variance": float(values.var()) if some else None,
                "median": float(np.median(values)) if some else None,
                "worst": float(values.min() if good else values.max()) if some else None,
                "tenth_percentile": float(np.percentile(values, 10 if good else 90)) if some else None,
                "clients": len(values),
                "per_client": {
                    row.client: row.value if finite else None
                    for row, finite in zip(members, defined.tolist(), strict=True)
                },
            }
        )
    return out
