"""What a metric's name says about it."""

from __future__ import annotations

from collections.abc import Sequence

LOWER_IS_BETTER = ("loss", "ece", "error", "err", "perplexity", "mse", "rmse", "mae", "nll", "brier", "divergence")
"""Words (parts of a name between underscores) of metrics where less is better."""

DEFAULTS = ("accuracy", "rmse", "loss")
"""Metrics that runs are compared by if nobody says, the first that all of them have."""


def bare(metric: str) -> str:
    """The name without its split: ``test_accuracy`` is ``accuracy``."""
    for split in ("train", "val", "test"):
        metric = metric.removeprefix(f"{split}_")
    return metric


def higher_is_better(metric: str) -> bool:
    """Whether more is better; False for losses and errors, known by the words of their names.

    >>> higher_is_better("test_accuracy"), higher_is_better("val_loss"), higher_is_better("ece")
    (True, False, False)
    """
    return not any(word in LOWER_IS_BETTER for word in bare(metric).lower().split("_"))


def choose_metric(known: Sequence[Sequence[str]]) -> str:
    """Return the metric to compare runs by if nobody says: one that all have, accuracy before rmse before loss.

    Args:
        known: The metrics of each run, without their split. Without any it is accuracy.

    Example:
        >>> choose_metric([["loss", "accuracy"], ["loss", "accuracy", "auroc"]]), choose_metric([["loss", "rmse", "mae"]])
        ('accuracy', 'rmse')
    """
    common = [name for name in known[0] if all(name in metrics for metrics in known)] if known else []
    return next((name for name in (*DEFAULTS, *common) if name in common), DEFAULTS[0])
