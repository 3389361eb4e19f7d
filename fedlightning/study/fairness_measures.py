"""Measures of fairness: spread of a score over clients, and incentives to take part (PLayer-FL, FLIU, PI-FL, MaxFL)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Scores = Mapping[str, float]
"""Client -> score."""
ROUNDING = 1e-6
"""Differences below this share of the scores come from their rounding to float32, in means over seeds too."""


def drop_rounding(gap: float, *scores: float) -> float:
    """Return a difference of scores, 0 where only rounding tells them apart.

    Means over seeds of 17/19 and 19/19, and of twice 18/19, differ by 3e-8: nobody gains or loses by that.

    Example:
        >>> drop_rounding(0.9473684132 - 0.9473684430, 0.9473684430), drop_rounding(0.75 - 0.5, 0.75)
        (0.0, 0.25)
    """
    return 0.0 if abs(gap) <= ROUNDING * max(map(abs, scores)) else gap


@dataclass(frozen=True)
class Spread:
    """Statistics of a score over clients.

    Attributes:
        mean: Uniform mean over clients.
        median: Median client.
        std: Population standard deviation.
        variance: Population variance (PLayer-FL, equation A.5). Lower is fairer, but a uniformly bad model is fair too,
            so read it beside the mean and the worst client.
        worst: Score of the worst client.
        tenth_percentile: 10th percentile, counted from the bad end.
        best: Score of the best client.
    """

    mean: float
    median: float
    std: float
    variance: float
    worst: float
    tenth_percentile: float
    best: float


def spread(scores: Scores, higher_is_better: bool = True) -> Spread:
    """Return the statistics of a score over clients.

    Example:
        >>> found = spread({"a": 0.5, "b": 0.75, "c": 1.0})
        >>> found.mean, found.worst, found.best
        (0.75, 0.5, 1.0)
        >>> spread({"a": 0.5, "b": 0.75, "c": 1.0}, higher_is_better=False).worst
        1.0
    """
    x = _values(scores)
    bad, good = (x.min(), x.max()) if higher_is_better else (x.max(), x.min())
    return Spread(
        mean=float(x.mean()),
        median=float(np.median(x)),
        std=float(x.std()),
        variance=float(x.var()),
        worst=float(bad),
        tenth_percentile=float(np.percentile(x, 10 if higher_is_better else 90)),
        best=float(good),
    )


def above(scores: Scores, threshold: float) -> int:
    """Return how many clients score strictly above `threshold` (FLIU's `rho_eps`).

    Example:
        >>> above({"a": 0.5, "b": 0.75, "c": 1.0}, 0.75)
        1
    """
    return int((_values(scores) > threshold).sum())


def below(scores: Scores, threshold: float) -> int:
    """Return how many clients score strictly below `threshold` (FLIU's figures count these).

    Example:
        >>> below({"a": 0.5, "b": 0.75, "c": 1.0}, 0.8)
        2
    """
    return int((_values(scores) < threshold).sum())


def incentivised_participation_rate(
    scores: Scores, local: Scores, federated: Scores, higher_is_better: bool = True
) -> float:
    """Return the percentage of clients that are strictly better off than with both baselines (PLayer-FL, equation A.6).

    Example:
        >>> incentivised_participation_rate({"a": 0.9, "b": 0.7}, {"a": 0.8, "b": 0.6}, {"a": 0.7, "b": 0.7})
        50.0
    """
    _same_clients(scores, local, federated)
    sign = 1.0 if higher_is_better else -1.0
    others = {client: max(sign * local[client], sign * federated[client]) for client in scores}
    better = [drop_rounding(sign * scores[c] - other, scores[c], other) > 0 for c, other in others.items()]
    return 100.0 * sum(better) / len(better)


def personal_model_appeal(scores: Scores, federated: Scores) -> dict[str, float]:
    """Return each client's personal score minus its score with FedAvg (PI-FL's PMA, equation 14).

    Example:
        >>> personal_model_appeal({"a": 0.75, "b": 0.5}, {"a": 0.5, "b": 0.75})
        {'a': 0.25, 'b': -0.25}
    """
    _same_clients(scores, federated)
    return {client: scores[client] - federated[client] for client in scores}


def opt_outs(scores: Scores, federated: Scores) -> float:
    """Return the share of clients whose personal model is strictly worse than FedAvg's (PI-FL, equation 15).

    Example:
        >>> opt_outs({"a": 0.75, "b": 0.5}, {"a": 0.5, "b": 0.75})
        0.5
    """
    appeal = personal_model_appeal(scores, federated)
    return sum(value < 0 for value in appeal.values()) / len(appeal)


def global_model_appeal(losses: Scores, requirements: Scores) -> int:
    """Count the clients for which the global model's training loss is strictly below their own requirement (MaxFL's GMA).

    Example:
        >>> global_model_appeal({"a": 0.2, "b": 0.9}, {"a": 0.3, "b": 0.4})
        1
    """
    _same_clients(losses, requirements)
    return sum(losses[client] < requirements[client] for client in losses)


def _values(scores: Scores) -> np.ndarray:
    x = np.array(list(scores.values()), dtype=float)
    if x.size == 0:
        raise ValueError("There is no client to describe.")
    if not bool(np.isfinite(x).all()):
        names = [client for client, value in scores.items() if not np.isfinite(value)]
        raise ValueError(
            f"Client '{names[0]}' has no finite score. It is not averaged away: leave it out by name, or mend it."
        )
    return x


def _same_clients(*groups: Scores) -> None:
    for group in groups[1:]:
        differing = sorted(set(group) ^ set(groups[0]))
        if differing:
            raise ValueError(f"Client '{differing[0]}' is not in both runs. Compare runs on the same clients.")
    _values(groups[0])
