"""Incentives to take part (participation rate, appeal, opt-outs, thresholds) beside the spread over clients."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from fedlightning.study import fairness_measures as measure
from fedlightning.study.columns import GLOBAL, PERSONAL
from fedlightning.study.data import StudyData, Table
from fedlightning.study.roles import NEEDED
from fedlightning.study.run_scores import SeedScore, mean_of
from fedlightning.study.score_tables import STATISTICS, statistic

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Levels eps of FLIU's rho_eps, for scores between 0 and 1."""

Scores = dict[str, float]
"""Client -> score."""


def fairness(study: StudyData, thresholds: Sequence[float] | None = None) -> Table:
    """Return how the score of each method is spread over clients, and how many clients gain."""
    if thresholds is None:
        thresholds = THRESHOLDS if study.higher_is_better else ()
    lines = []
    for method in study.methods:
        scores = list(study.deployed(method).values())
        line: dict[str, Any] = {"method": method, "mean": mean_of([score.mean for score in scores])}
        line |= {"weighted_mean": mean_of([score.weighted_mean for score in scores])}
        line |= {name: statistic(scores, name) for name in STATISTICS}
        middle = medians(scores)
        line["variance_of_medians"] = float(np.var(list(middle.values()))) if middle else None
        line |= incentives(study, method)
        for level in thresholds:
            for word, count in (("above", measure.above), ("below", measure.below)):
                line[f"{word}_{level:g}"] = mean_of([count(s.defined, level) if s.sound else None for s in scores])
        line |= {"clients": _count(scores), "n_seeds": len(scores), "seeds": len(study.seeds)}
        lines.append(line | {"comparable": study.comparable(method)})
    return lines


def incentives(study: StudyData, method: str) -> dict[str, Any]:
    """Return participation rate, appeal and opt-outs of one method, against comparable baselines.

    For a loss, a gain is a lower value.
    """
    measures: dict[str, Any] = dict.fromkeys(("ipr", "ipr_of_medians", "pma", "opt_outs"))
    measures["ipr_seeds"] = measures["pma_seeds"] = 0
    role = study.role(method)
    scores, silo, federated = study.deployed(method), study.siloed_scores(), study.federated_scores()
    if role not in NEEDED and set(NEEDED) <= set(study.baselines):
        names = [study.baselines[needed] for needed in NEEDED]
        seeds = [s for s in study.comparable_seeds(method, *names) if s in scores and s in silo and s in federated]
        each = [common(scores[s], silo[s], federated[s]) for s in seeds]
        measures["ipr"] = mean_of([_rate(study, groups) for groups in each])
        middle = [medians([group[s] for s in seeds]) for group in (scores, silo, federated)]
        shared = [client for client in middle[0] if all(client in group for group in middle)]
        if shared:
            measures["ipr_of_medians"] = _rate(study, [{c: group[c] for c in shared} for group in middle])
        measures["ipr_seeds"] = len(seeds)
    if role != "fedavg" and "fedavg" in study.baselines:
        gains = appeal_by_seed(study, method)
        measures["pma"] = mean_of([None if gain is None else sum(gain.values()) / len(gain) for gain in gains.values()])
        measures["opt_outs"] = mean_of(
            [None if g is None else 100.0 * sum(v < 0 for v in g.values()) / len(g) for g in gains.values()]
        )
        measures["pma_seeds"] = len(gains)
    return measures | global_appeal(study, method)


def appeal_by_seed(study: StudyData, method: str) -> dict[int, Scores | None]:
    """Return the PMA of each client by seed, positive if the method is better; `None` if a model diverged."""
    if "fedavg" not in study.baselines:
        return {}
    scores, federated = study.deployed(method), study.federated_scores()
    sign = 1.0 if study.higher_is_better else -1.0
    gains_by_seed: dict[int, Scores | None] = {}
    for seed in study.comparable_seeds(method, study.baselines["fedavg"]):
        if seed in scores and seed in federated:
            pair = common(scores[seed], federated[seed])
            gains = measure.personal_model_appeal(*pair) if pair else None
            gains_by_seed[seed] = None if gains is None else {client: sign * gain for client, gain in gains.items()}
    return gains_by_seed


def appeal(study: StudyData) -> Table:
    """Return the personal model appeal of each client: one line for each (method, client), without FedAvg itself.

    `pma` is the gain of the client over FedAvg's global model, averaged over `n_seeds` seeds (for a loss, the amount by
    which it is lower).
    """
    lines = []
    for method in study.methods:
        if study.role(method) == "fedavg":
            continue
        gains = appeal_by_seed(study, method)
        clients = dict.fromkeys(client for gains_of_clients in gains.values() for client in gains_of_clients or {})
        for client in clients:
            values = [
                None if gains_of_clients is None else gains_of_clients.get(client)
                for gains_of_clients in gains.values()
            ]
            lines.append({"method": method, "client": client, "pma": mean_of(values), "n_seeds": len(values)})
    return lines


def global_appeal(study: StudyData, method: str) -> dict[str, Any]:
    """Count the clients whose loss with the global model is strictly below that of their own siloed model (MaxFL's GMA).

    The paper takes training losses. A run usually has none of the global model, so without them (split `train`, stages G
    and L1) the validation losses of both latest models are taken, and `gma_loss` says so.
    """
    siloed = study.baselines.get("siloed")
    for split, word in (("train", "training"), ("val", "validation")):
        if siloed is None or method == siloed:
            break
        mine = study.find(method, "loss", split=split, model=GLOBAL, checkpoint="latest")
        siloed_losses = study.find(siloed, "loss", split=split, model=PERSONAL, checkpoint="latest", stage="L1")
        seeds = [seed for seed in study.comparable_seeds(method, siloed) if seed in mine and seed in siloed_losses]
        if seeds:
            pairs = [common(mine[seed], siloed_losses[seed]) for seed in seeds]
            counts = [measure.global_model_appeal(*pair) if pair else None for pair in pairs]
            return {"gma": mean_of(counts), "gma_loss": word}
    return {"gma": None, "gma_loss": None}


def medians(scores: Sequence[SeedScore]) -> Scores:
    """Return each client's median over seeds; empty if a model diverged."""
    if not scores or not all(score.sound for score in scores):
        return {}
    clients = [client for client in scores[0].defined if all(client in score.defined for score in scores)]
    return {client: median(score.defined[client] for score in scores) for client in clients}


def common(*groups: SeedScore) -> list[Scores] | None:
    """Return the scores of the clients that all groups have; `None` if a model diverged or there is no such client."""
    if not all(score.sound for score in groups):
        return None
    shared = [client for client in groups[0].defined if all(client in score.defined for score in groups)]
    return [{client: score.defined[client] for client in shared} for score in groups] if shared else None


def _rate(study: StudyData, groups: list[Scores] | None) -> float | None:
    """Return the participation rate for (method, siloed, FedAvg) scores."""
    if groups is None:
        return None
    personal, silo, federated = groups
    return measure.incentivised_participation_rate(personal, silo, federated, study.higher_is_better)


def _count(scores: Sequence[SeedScore]) -> int | None:
    return len(scores[0].per_client) if scores else None
