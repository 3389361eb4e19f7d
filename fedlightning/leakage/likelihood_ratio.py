"""Membership by likelihood ratio (LiRA, offline): what a sample's loss would be had the model not seen it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import Subset

from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.leakage.basic_attacks import membership
from fedlightning.leakage.shadow_runs import loader_like, losses_of, pool_of, trained_again
from fedlightning.seeding import generator
from fedlightning.study.predicted import members_of
from fedlightning.trainer import FederatedTrainer

ENOUGH = 64
"""Shadow runs without a sample from which its own variance is taken; below, one variance of all samples (the paper, 6.2)."""


@dataclass(frozen=True)
class LikelihoodRatio:
    """Whether the global model tells members, judged by models that have not seen them.

    Carlini, Chien, Nasr, Song, Terzis, Tramer, "Membership inference attacks from first principles", IEEE S&P 2022
    (arXiv:2112.03570), offline: shadow runs of the same configuration train on a random half of each client's training and
    test samples. Of each sample, ``log(p / (1 - p))`` with ``p = exp(-loss)`` is compared with the normal distribution that
    it has in the shadow runs that did not train on it.

    Attributes:
        shadows: Shadow runs.
        members: Training samples tried.
        others: Test samples tried.
        auc: Probability that a member stands out more than another sample.
        low: Lower end of its 95 % interval (bootstrap over samples).
        high: Upper end.
        hits: Share of members found where one in a hundred others, at most, is taken for one.
        chance: Share that chance finds so.
    """

    shadows: int
    members: int
    others: int
    auc: float
    low: float
    high: float
    hits: float
    chance: float


def confidence(losses: np.ndarray) -> np.ndarray:
    """Return ``log(p / (1 - p))`` with ``p = exp(-loss)``; of losses that can be negative, ``-loss``.

    Example:
        >>> confidence(-np.log(np.array([0.2, 0.9]))).round(3).tolist()
        [-1.386, 2.197]
    """
    if bool((losses < 0).any()):
        return -losses
    losses = np.clip(losses, 1e-12, None)
    with np.errstate(divide="ignore"):
        return -losses - np.log(-np.expm1(-losses))


def standing_out(confidences: np.ndarray, without: np.ndarray) -> np.ndarray:
    """Return by how many standard deviations each sample is above what it is in models that have not seen it.

    Args:
        confidences: Confidence of the attacked model, `(n,)`.
        without: That of shadow models, `(shadows, n)`; NaN where one has trained on the sample.

    Returns:
        `(n,)`; NaN for samples of which fewer than two shadow models know nothing.
    """
    counts = (~np.isnan(without)).sum(axis=0)
    enough = counts >= 2
    scores = np.full(len(confidences), np.nan)
    few = without[:, enough]
    mean, variance = np.nanmean(few, axis=0), np.nanvar(few, axis=0, ddof=1)
    shared = float(np.average(variance, weights=counts[enough] - 1)) if enough.any() else 1.0
    variance = np.where(counts[enough] >= ENOUGH, variance, shared)
    scores[enough] = (confidences[enough] - mean) / np.sqrt(np.clip(variance, 1e-12, None))
    return scores


def likelihood_ratio(
    trainer: FederatedTrainer,
    data: FederatedDataModule,
    shadows: int = 16,
    samples: int = 1000,
    checkpoint: str = "latest",
    seed: int = 0,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Attack the global model of a run by shadow runs, each of which costs what the run did.

    Args:
        trainer: The trainer, fitted or restored.
        data: Its data; they have to be here, and every client needs test samples.
        shadows: Number of shadow runs, 4 or more.
        samples: Samples to try, at most, of all training and of all test data.
        checkpoint: Models to attack, of the run and of its shadows.
        seed: Of all draws. Shadow runs train with the seeds after it.
        report: Is told of the progress.

    Returns:
        A :class:`LikelihoodRatio` as a dict.

    Raises:
        ValueError: If there are too few shadow runs, no global model, or samples that cannot be drawn.
    """
    if shadows < 4:
        raise ValueError(f"{shadows} shadow runs are too few: half of them know a sample. Give 4 or more.")
    data = members_of(trainer, data)
    clients = list(data.client_ids)
    pools = {client: pool_of(data, client) for client in clients}
    tried, member = _tried(data, clients, samples, seed)
    target = confidence(_losses(trainer.module(None, checkpoint), data, pools, tried, seed))
    without = np.full((shadows, len(target)), np.nan)
    for shadow in range(shadows):
        report(f"shadow run {shadow + 1} of {shadows}")
        draw = generator(seed, "shadow", shadow)
        halves = {
            client: torch.randperm(len(pool), generator=draw)[: (len(pool) + 1) // 2].tolist()
            for client, pool in pools.items()
        }
        train = {client: loader_like(data, client, pools[client], halves[client]) for client in clients}
        with TemporaryDirectory() as folder:
            again = trained_again(trainer, data, train, Path(folder), seed + 1 + shadow)
            confidences = confidence(_losses(again.module(None, checkpoint), data, pools, tried, seed))
            again.close()
        positions = [set(halves[client]) for client in clients]
        seen = [place in positions[index] for index, client in enumerate(clients) for place in tried[client]]
        without[shadow] = np.where(seen, np.nan, confidences)
    scores = standing_out(target, without)
    got = membership("global", -scores[member], -scores[~member], seed)
    kept = {name: value for name, value in asdict(got).items() if name != "model"}
    return asdict(LikelihoodRatio(shadows=shadows, **kept))


def _tried(
    data: FederatedDataModule, clients: list[str], samples: int, seed: int
) -> tuple[dict[str, list[int]], np.ndarray]:
    """Return the positions in each client's pool of the samples to try, and which of these are members."""
    each, tried, member = max(2, samples // len(clients)), {}, []
    for client in clients:
        sizes = [len(data.client_dataloader(client, split).dataset) for split in ("train", "test")]  # type: ignore[union-attr, arg-type]
        train, test = (
            torch.randperm(size, generator=generator(seed, client, split))[:each]
            for size, split in zip(sizes, ("train", "test"), strict=True)
        )
        tried[client] = [*train.tolist(), *(test + sizes[0]).tolist()]
        member += [True] * len(train) + [False] * len(test)
    return tried, np.array(member)


def _losses(
    module: LightningModule, data: FederatedDataModule, pools: dict[str, Any], tried: dict[str, list[int]], seed: int
) -> np.ndarray:
    losses = [
        losses_of(module, data, client, Subset(pools[client], positions), seed, "leakage", "ratio")
        for client, positions in tried.items()
    ]
    return torch.cat(losses).numpy()
