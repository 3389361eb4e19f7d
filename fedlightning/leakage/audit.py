"""A bound of epsilon from below: canaries that are in the training data or not, and how often an attacker says which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import Dataset, Subset

from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.leakage.shadow_runs import loader_like, losses_of, pool_of, trained_again
from fedlightning.seeding import generator
from fedlightning.storage.files import read_json
from fedlightning.study.predicted import members_of
from fedlightning.trainer import FederatedTrainer

TOLD = "privacy.json"
OUTER = 2
"""One in so many canaries is guessed: those that stand out most, on both sides. Decided before anybody looks."""


@dataclass(frozen=True)
class Canaries:
    """How much privacy an audit run did not give, by the guesses of an attacker.

    Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023 (arXiv:2305.08846): each of
    `canaries` records or clients with wrong labels is put into the training data by a coin of its own. Guessed are those
    of which the probability of the wrong label, ``exp(-loss)``, stands out most beside that in the run itself, which had no
    canaries: the highest quarter is taken to have been there, the lowest not. Under ``(epsilon, 0)`` the number of right
    guesses is at most binomial with ``e^epsilon / (1 + e^epsilon)``: the bound is that of Clopper and Pearson for their
    share, as an epsilon; `delta` is paid for as in their theorem 5.2.

    Attributes:
        unit: What a canary is: `"record"` or `"client"`.
        canaries: Number of canaries, each a trial.
        guesses: Number of guesses.
        right: Right ones.
        confidence: Of the bound.
        delta: Delta of the guarantee that is tried.
        epsilon: The bound: what the audit run gave away, at least.
        most: The largest bound that so many guesses could have given.
        accounted: What the audit run's own accountant says of this unit; `None`: nothing.
    """

    unit: str
    canaries: int
    guesses: int
    right: int
    confidence: float
    delta: float
    epsilon: float
    most: float
    accounted: float | None


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return how probable so many right guesses are, at most, under ``(epsilon, delta)`` (theorem 5.2 of the paper)."""
    from scipy.stats import binom

    share = 1.0 / (1.0 + math.exp(-epsilon))
    below, most = 0.0, 0.0
    for step in range(1, right + 1) if delta else ():
        below += float(binom.pmf(right - step, guesses, share))
        most = max(most, below / step)
    return min(1.0, float(binom.sf(right - 1, guesses, share)) + 2 * canaries * delta * most)


def epsilon_bound(canaries: int, guesses: int, right: int, delta: float = 0.0, confidence: float = 0.95) -> float:
    """Return the largest epsilon that so many right guesses refute with a confidence; 0 if they refute none.

    Example:
        >>> epsilon_bound(100, 100, 50), round(epsilon_bound(100, 100, 100), 2)
        (0.0, 3.49)
    """
    low, high = 0.0, 60.0
    if p_value(canaries, guesses, right, low, delta) > 1 - confidence:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        refuted = p_value(canaries, guesses, right, middle, delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low


class Mislabelled(Dataset[Any]):
    """Samples ``(x, y, ...)`` with labels of their own.

    Args:
        dataset: The samples.
        labels: A label for each.
    """

    def __init__(self, dataset: Any, labels: Sequence[int]) -> None:
        self.dataset, self.labels = dataset, list(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        x, y, *others = self.dataset[index]
        return (x, torch.as_tensor(self.labels[index]).to(torch.as_tensor(y).dtype), *others)


def canaries(
    trainer: FederatedTrainer,
    data: FederatedDataModule,
    count: int = 100,
    unit: Literal["record", "client"] | None = None,
    confidence: float = 0.95,
    checkpoint: str = "latest",
    seed: int = 0,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train the run's configuration once more with canaries in it, and guess which were there.

    Canaries are test samples with wrong labels. A record joins the training data of the client whose test sample it is. A
    client has nothing but copies of one, as many as that client has samples, or none if it is not there. What is bounded is
    the epsilon of that audit run.

    Args:
        trainer: The trainer, fitted or restored.
        data: Its data; they have to be here.
        count: Number of canaries, at most; each needs test samples of its own.
        unit: `"record"` or `"client"`. `None`: what the run accounts for (`"record"` if it accounts for nothing).
        confidence: Of the bound.
        checkpoint: Models of the audit run to attack.
        seed: Of all draws; the audit run trains with the seed after it.
        report: Is told of the progress.

    Returns:
        :class:`Canaries` as a dict.

    Raises:
        ValueError: If there are fewer than 8 canaries to be had, or batches are no ``(x, y)`` with classes.
    """
    data = members_of(trainer, data)
    unit = unit or ("client" if _accounts_for(trainer, "client") else "record")
    clients, draw = list(data.client_ids), generator(seed, "canaries")
    bred = [
        (client, dataset)
        for client in clients
        for dataset in _bred(data, client, 1 if unit == "record" else data.num_samples(client), draw)
    ]
    order = torch.randperm(len(bred), generator=draw)[:count].tolist()
    chosen = [bred[place] for place in order]
    if len(chosen) < 8:
        raise ValueError(f"{len(chosen)} canaries are to be had from the test data, and fewer than 8 show nothing")
    there = torch.rand(len(chosen), generator=draw) < 0.5
    own = {client: pool_of(data, client, ("train",)) for client in clients}
    if unit == "record":
        for place, (client, canary) in enumerate(chosen):
            if there[place]:
                own[client].datasets.append(canary)
        pools = {client: type(pool)(pool.datasets) for client, pool in own.items()}
        train = {client: loader_like(data, client, pools[client]) for client in clients}
    else:
        train = {client: loader_like(data, client, own[client]) for client in clients}
        for place, (client, canary) in enumerate(chosen):
            held = canary if there[place] else Subset(canary, [])
            train[f"canary{place}"] = loader_like(data, client, held)
    report(f"audit run with {int(there.sum())} of {len(chosen)} canaries")
    before = _losses(trainer.module(None, checkpoint), data, chosen, seed)
    with TemporaryDirectory() as folder:
        again = trained_again(trainer, data, train, Path(folder), seed + 1)
        learnt = (-_losses(again.module(None, checkpoint), data, chosen, seed)).exp() - (-before).exp()
        accounted = _accounts_for(again, unit)
        again.close()
    ranked = learnt.argsort(stable=True, descending=True)
    each = max(1, len(chosen) // (2 * OUTER))
    guesses, right = 2 * each, int(there[ranked[:each]].sum()) + int((~there[ranked[-each:]]).sum())
    delta, spent = float(accounted.get("delta") or 0.0), accounted.get("epsilon")
    bound, most = (epsilon_bound(len(chosen), guesses, hits, delta, confidence) for hits in (right, guesses))
    spent = None if spent is None else float(spent)
    return asdict(Canaries(unit, len(chosen), guesses, right, confidence, delta, bound, most, spent))


def _accounts_for(trainer: FederatedTrainer, unit: str) -> dict[str, Any]:
    """Return what a run's accountant says of a unit; nothing if it counts another one, or there is none."""
    file = None if trainer.run is None else trainer.run.path / TOLD
    told = read_json(file) if file is not None and file.exists() else {}
    return told if str(told.get("unit", "")).startswith(unit) else {}


def _bred(data: FederatedDataModule, client: str, size: int, draw: torch.Generator) -> list[Mislabelled]:
    """Return canaries out of a client's test samples: one of them so many times, with a label that is wrong."""
    loader = data.client_dataloader(client, "test")
    if loader is None or not len(loader.dataset) or not size:  # type: ignore[arg-type]
        return []
    dataset: Any = loader.dataset
    sample, classes = dataset[0], data.num_classes or _classes(data)
    if not isinstance(sample, tuple | list) or len(sample) < 2 or classes < 2:
        raise ValueError("canaries need samples (x, y, ...) with classes")
    moved = torch.randint(1, classes, (len(dataset),), generator=draw).tolist()
    return [
        Mislabelled(Subset(dataset, [place] * size), [(int(dataset[place][1]) + by) % classes] * size)
        for place, by in enumerate(moved)
    ]


def _classes(data: FederatedDataModule) -> int:
    """Return the number of classes in the clients' training data, where nobody has said it."""
    most = 0
    for client in data.client_ids:
        for batch in data.client_dataloader(client, "train") or ():
            labels = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
            if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dim() != 1:
                raise ValueError("canaries need samples (x, y, ...) with classes")
            most = max(most, int(labels.max()) + 1)
    return most


def _losses(module: LightningModule, data: FederatedDataModule, chosen: Sequence[Any], seed: int) -> torch.Tensor:
    """Return the loss of each canary."""
    found = [losses_of(module, data, client, Subset(canary, [0]), seed, "canary").mean() for client, canary in chosen]
    return torch.stack(found)
