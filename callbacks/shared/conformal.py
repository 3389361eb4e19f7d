"""Conformal prediction sets: classes that hold the true one with a chosen probability (RAPS)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TEMPERATURES = 0.1, 10.0
"""Range in which the temperature is sought: without an error among the samples, there is no best one."""


@dataclass(frozen=True)
class PredictionSets:
    """Regularised adaptive prediction sets of one model, calibrated.

    Angelopoulos, Bates, Malik, Jordan, "Uncertainty sets for image classifiers using conformal prediction", ICLR 2021.
    Nothing is randomised, and the most probable class is always in, so that no set is empty: this only adds classes.

    Attributes:
        temperature: The logits are divided by it.
        threshold: Largest score of a class in the set; infinite where there are too few samples to tell, then all are in.
        lambda_reg: Penalty on every rank above `k_reg`.
        k_reg: Ranks without a penalty.

    Example:
        >>> from fedlightning.callbacks.shared.conformal import PredictionSets
        >>> sets = PredictionSets(temperature=1.0, threshold=0.9, lambda_reg=0.0, k_reg=5)
        >>> sets(torch.tensor([[2.0, 1.0, -1.0], [9.0, 0.0, 0.0]])).long()
        tensor([[1, 0, 0],
                [1, 0, 0]])
    """

    temperature: float
    threshold: float
    lambda_reg: float
    k_reg: int

    def scores(self, logits: Tensor) -> Tensor:
        """Return each class's score: the probability of it and all more probable ones, and the penalty."""
        probabilities, order = (logits / self.temperature).softmax(1).sort(dim=1, descending=True, stable=True)
        ranks = torch.arange(1, logits.shape[1] + 1, device=logits.device)
        sums = probabilities.cumsum(1).clamp(max=1.0)
        sums[:, -1] = 1.0  # whatever the rounding: a threshold that one sample's last class has is that of all
        sums = sums + self.lambda_reg * (ranks - self.k_reg).clamp(min=0)
        return torch.empty_like(sums).scatter_(1, order, sums)

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> Tensor:
        """Return which classes are in the set of each sample, boolean `(samples, classes)`."""
        inside = self.scores(logits) <= self.threshold
        return inside.scatter_(1, logits.argmax(1, keepdim=True), True)


def calibrate(logits: Tensor, labels: Tensor, alpha: float, lambda_reg: float, k_reg: int) -> PredictionSets:
    """Return prediction sets that hold the class of a new sample with probability `1 - alpha` at least.

    That is so if the samples are exchangeable with the new one and the model has not trained on them. The threshold is the
    `ceil((n + 1)(1 - alpha))`-th smallest of their `n` scores; the temperature, one number, is fitted to the same samples.

    Example:
        >>> from fedlightning.callbacks.shared.conformal import calibrate
        >>> calibrate(torch.zeros(8, 3), torch.zeros(8).long(), alpha=0.1, lambda_reg=0.0, k_reg=5).threshold
        inf
    """
    found = PredictionSets(best_temperature(logits, labels), math.inf, lambda_reg, k_reg)
    count = len(labels)
    rank = math.ceil((count + 1) * (1.0 - alpha) - 1e-9)
    if rank > count:
        return found
    own = found.scores(logits).gather(1, labels.long()[:, None])[:, 0]
    return PredictionSets(found.temperature, float(own.sort().values[rank - 1]), lambda_reg, k_reg)


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature within :data:`TEMPERATURES` with the least cross entropy; 1 without a sample.

    The cross entropy is convex in `1 / T`, so its derivative has one root, which is found by bisection.

    Example:
        >>> from fedlightning.callbacks.shared.conformal import best_temperature
        >>> logits = 3 * torch.tensor([[1.0, 0.0]] * 4).log_softmax(1)  # three of four are right
        >>> round(best_temperature(logits, torch.tensor([0, 0, 0, 1])), 3)
        2.731
    """
    if not len(labels):
        return 1.0
    logits = logits.double()
    own = logits.gather(1, labels.long()[:, None])[:, 0]

    def slope(inverse: float) -> float:
        expected = ((inverse * logits).softmax(1) * logits).sum(1)
        return float((expected - own).mean())

    low, high = (1.0 / bound for bound in reversed(TEMPERATURES))
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0.0 else (low, middle)
    return 1.0 / math.sqrt(low * high)
