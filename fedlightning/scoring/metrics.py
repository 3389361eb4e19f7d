"""What a metric's name says about it."""

from __future__ import annotations

LOWER_IS_BETTER = ("loss", "ece", "error", "err", "perplexity", "mse", "rmse", "mae", "nll", "brier", "divergence")
"""Words (parts of a name between underscores) of metrics where less is better."""


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
