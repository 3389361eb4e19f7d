"""Who gains, who loses: spread over clients and incentives to take part (PLayer-FL, FLIU, PI-FL)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Scores = Mapping[str, float]
"""One score per client."""


@dataclass(frozen=True)
class Spread:
    """How a score is spread over clients. ``variance`` is the population variance (PLayer-FL, equation A.5): lower is
    fairer, but a uniformly bad model is fair too, so read it beside the mean and the worst client.
    """

    mean: float
    median: float
    std: float
    variance: float
    worst: float
    tenth_percentile: float
    best: float


def spread(scores: Scores, higher_is_better: bool = True) -> Spread:
    """Mean, median, deviation, variance, worst client, the 10th percentile from the bad end, best client.

    Raises:
        ValueError: for no client or a NaN.
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
    """FLIU's ``rho_eps``: how many clients score strictly above ``threshold``."""
    return int((_values(scores) > threshold).sum())


def below(scores: Scores, threshold: float) -> int:
    """How many clients score strictly below ``threshold`` (what FLIU's figures count)."""
    return int((_values(scores) < threshold).sum())


def incentivised_participation_rate(
    scores: Scores, local: Scores, federated: Scores, higher_is_better: bool = True
) -> float:
    """PLayer-FL's IPR (equation A.6), in percent: clients strictly better off than with both baselines.

    Args:
        scores: of the method; local: of each client's siloed model; federated: of FedAvg; on the same test sets.
        higher_is_better: False for losses.

    Raises:
        ValueError: if the three are not of the same clients.
    """
    _same_clients(scores, local, federated)
    sign = 1.0 if higher_is_better else -1.0
    better = [sign * scores[client] > max(sign * local[client], sign * federated[client]) for client in scores]
    return 100.0 * sum(better) / len(better)


def personal_model_appeal(scores: Scores, federated: Scores) -> dict[str, float]:
    """PI-FL's PMA (equation 14): each client's personal score minus what FedAvg gives it."""
    _same_clients(scores, federated)
    return {client: scores[client] - federated[client] for client in scores}


def opt_outs(scores: Scores, federated: Scores) -> float:
    """PI-FL's opt-outs (equation 15): share of clients whose personal model is strictly worse than FedAvg's."""
    appeal = personal_model_appeal(scores, federated)
    return sum(value < 0 for value in appeal.values()) / len(appeal)


def global_model_appeal(losses: Scores, requirements: Scores) -> int:
    """MaxFL's GMA: clients for whom the global model's training loss is strictly below their own requirement.

    Args:
        losses: of the global model on each client; requirements: training loss of each client's local model.
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
