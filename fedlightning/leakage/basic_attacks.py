"""Attacks that need no further training: membership by the loss, and whose a sample is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch.utils.data import DataLoader, Subset

from fedlightning.client.probes import NoLossError, sample_losses
from fedlightning.datamodules.federated_data import FederatedDataModule, sort_clients
from fedlightning.seeding import generator
from fedlightning.study.predicted import class_probabilities, members_of
from fedlightning.trainer import FederatedTrainer

FALSE_ALARMS = 100
"""One in so many non-members, at most, is taken for a member where the attack's hits are counted."""
NEIGHBOURS = 5
RESAMPLES = 1000


@dataclass(frozen=True)
class Membership:
    """Whether a model tells who was in its training data, by the loss of a sample (Yeom et al. 2018, arXiv:1709.01604).

    Attributes:
        model: `"global"`, or the client whose model it is.
        members: Training samples tried.
        others: Samples tried that nobody trained on.
        auc: Probability that a member has a lower loss than another sample; 0.5: nothing is given away.
        low: Lower end of its 95 % interval (bootstrap over samples).
        high: Upper end.
        hits: Share of members found where one in a hundred others, at most, is taken for one (Carlini et al. 2022,
            arXiv:2112.03570).
        chance: Share that chance finds so: 0.048 with 20 others, and 0.01 only with very many.
    """

    model: str
    members: int
    others: int
    auc: float
    low: float
    high: float
    hits: float
    chance: float


@dataclass(frozen=True)
class SiteInference:
    """Whether the global model's class probabilities tell whose a sample is.

    Attributes:
        samples: Test samples, of all clients.
        clients: Number of clients.
        accuracy: Share of samples whose client the nearest other samples' vote names.
        chance: Mean of the same over permutations of the clients within each class: what labels alone give away.
        p: Share of permutations that are as good, the real one among them.
    """

    samples: int
    clients: int
    accuracy: float
    chance: float
    p: float


def membership(model: str, members: np.ndarray, others: np.ndarray, seed: int = 0) -> Membership:
    """Return what losses tell of membership.

    Args:
        model: Whose.
        members: Losses of training samples, shape `(n,)`.
        others: Losses of other samples, shape `(m,)`.
        seed: Of the bootstrap.

    Raises:
        ValueError: If there are fewer than two of either.

    Example:
        >>> membership("global", np.array([0.1, 0.2, 0.3]), np.array([1.0, 2.0, 3.0])).auc
        1.0
    """
    members, others = members[np.isfinite(members)], others[np.isfinite(others)]
    if min(len(members), len(others)) < 2:
        raise ValueError(f"{len(members)} members and {len(others)} other samples of {model} are too few to compare.")
    draw = np.random.default_rng(seed)
    resampled = [_auc(draw.choice(members, len(members)), draw.choice(others, len(others))) for _ in range(RESAMPLES)]
    low, high = np.quantile(resampled, [0.025, 0.975])
    allowed = len(others) // FALSE_ALARMS
    threshold = np.sort(others)[allowed]  # below it lie so many of the others
    hits = float(np.mean(members < threshold))
    chance = (allowed + 1) / (len(others) + 1)  # that one more of the others lies below as many of them
    return Membership(model, len(members), len(others), _auc(members, others), float(low), float(high), hits, chance)


def _auc(members: np.ndarray, others: np.ndarray) -> float:
    """Return the probability that a member's loss is lower, ties counted half."""
    ranks = (
        np.searchsorted(np.sort(others), members, side="left"),
        np.searchsorted(np.sort(others), members, side="right"),
    )
    return float(1.0 - (ranks[0] + ranks[1]).mean() / (2 * len(others)))


def site_inference(
    probabilities: np.ndarray, clients: np.ndarray, labels: np.ndarray, permutations: int = 200, seed: int = 0
) -> SiteInference:
    """Return whether probabilities tell whose a sample is, by the vote of its nearest neighbours, itself left out.

    Args:
        probabilities: Shape `(n, classes)`.
        clients: Number of each sample's client, shape `(n,)`.
        labels: Class of each sample, shape `(n,)`; clients are permuted within classes.
        permutations: Permutations for `chance` and `p`.
        seed: Of the permutations.
    """
    from sklearn.neighbors import NearestNeighbors

    count = min(NEIGHBOURS, len(probabilities) - 1)
    near = NearestNeighbors(n_neighbors=count + 1).fit(probabilities).kneighbors(return_distance=False)[:, :count]

    def accuracy(owners: np.ndarray) -> float:
        votes = np.zeros((len(owners), int(owners.max()) + 1))
        np.add.at(votes, (np.arange(len(owners))[:, None], owners[near]), 1)
        return float(np.mean(votes.argmax(1) == owners))

    draw, drawn = np.random.default_rng(seed), []
    for _ in range(permutations):
        mixed = clients.copy()
        for label in np.unique(labels):
            mixed[labels == label] = draw.permutation(mixed[labels == label])
        drawn.append(accuracy(mixed))
    unpermuted = accuracy(clients)
    better = sum(permuted >= unpermuted - 1e-12 for permuted in drawn)
    return SiteInference(
        len(clients), len(np.unique(clients)), unpermuted, float(np.mean(drawn)), (1 + better) / (1 + permutations)
    )


def leakage(
    trainer: FederatedTrainer, data: FederatedDataModule, samples: int = 1000, checkpoint: str = "latest", seed: int = 0
) -> dict[str, Any]:
    """Attack the models of a run that was fitted or restored.

    Args:
        trainer: The trainer.
        data: Its data; they have to be here.
        samples: Samples to try, at most, of each model's training and other data.
        checkpoint: Models to attack: `"latest"`, `"best_local"` or `"best_global"`.
        seed: Of all draws.

    Returns:
        `membership`, a list of :class:`Membership` as dicts; `sites`, a :class:`SiteInference` as one, or `None`; `missing`,
        why there is no more.

    Raises:
        ValueError: If no model could be attacked.
    """
    missing: list[str] = []
    data = members_of(trainer, data)
    models: dict[str, list[str]] = {"global": list(data.client_ids)}
    models |= {client: [client] for client in sort_clients(data.client_ids)}
    rows, global_module = [], None
    for name, clients in models.items():
        try:
            module = trainer.module(None if name == "global" else name, checkpoint)
            if global_module is not None and _same(global_module, module):
                continue  # it deploys the global model
            global_module = module if name == "global" else global_module
            members = _losses(module, data, clients, "train", samples, seed)
            others = _losses(module, data, clients, "test", samples, seed)
            rows.append(asdict(membership(name, members, others, seed)))
        except (ValueError, NoLossError) as error:
            missing.append(f"{name}: {error}")
    sites = None
    try:
        sites = asdict(site_inference(*_probabilities(trainer, data, samples, checkpoint, seed), seed=seed))
    except ValueError as error:
        missing.append(f"sites: {error}")
    if not rows:
        raise ValueError(f"No model of this run could be attacked; {missing[0]}")
    return {"membership": rows, "sites": sites, "missing": missing}


def _same(first: LightningModule, second: LightningModule) -> bool:
    state, other = first.state_dict(), second.state_dict()
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def _few(data: FederatedDataModule, client: str, split: str, most: int, seed: int) -> DataLoader[Any] | None:
    """Return a loader of some samples of a client's split, drawn at random; without augmentation that a loader adds."""
    loader = data.client_dataloader(client, split)
    if loader is None or len(loader.dataset) == 0:  # type: ignore[arg-type]
        return None
    order = torch.randperm(len(loader.dataset), generator=generator(seed, client, split))[:most].tolist()  # type: ignore[arg-type]
    return DataLoader(Subset(loader.dataset, order), batch_size=64, collate_fn=loader.collate_fn)


def _losses(
    module: LightningModule, data: FederatedDataModule, clients: Sequence[str], split: str, most: int, seed: int
) -> np.ndarray:
    each = max(2, most // len(clients))
    loaders = [loader for client in clients if (loader := _few(data, client, split, each, seed)) is not None]
    if not loaders:
        raise ValueError(f"there are no {split} samples")
    losses = [sample_losses(module, loader, Precision(), seed, "leakage", split) for loader in loaders]
    return torch.cat(losses).numpy()


def _probabilities(
    trainer: FederatedTrainer, data: FederatedDataModule, most: int, checkpoint: str, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the global model's probabilities of test samples, whose they are, and their classes."""
    module = trainer.module(None, checkpoint)
    rows, clients, labels = [], [], []
    each = max(2, most // len(data.client_ids))
    for number, client in enumerate(data.client_ids):
        loader = _few(data, client, "test", each, seed)
        if loader is None:
            continue
        probabilities, targets = class_probabilities(module, loader)
        rows.append(probabilities)
        labels.append(targets)
        clients += [number] * len(probabilities)
    if len(set(clients)) < 2:
        raise ValueError("fewer than two clients have test samples")
    return np.concatenate(rows), np.array(clients), np.concatenate(labels)
