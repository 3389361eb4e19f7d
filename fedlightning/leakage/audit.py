"""A bound of epsilon from below: canaries that are in the training data or not, and how often an attacker says which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import Dataset, Subset

from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.leakage.shadow_runs import loader_like, losses_of, pool_of, trained_again
from fedlightning.seeding import generator
from fedlightning.storage.files import read_json
from fedlightning.study.predicted import members_of
from fedlightning.trainer import FederatedTrainer

TOLD = "privacy.json"
OUTER = 2
"""One in so many canaries is guessed: those that stand out most, on both sides. Decided before anybody looks."""
LEAST = 8
"""Canaries that show something."""
USUAL, MOST = 100, 1000
"""Canaries that are taken if nobody says how many: more wrong labels would make another task of it."""
UNCOUNTED = 3.0
"""Epsilon that is looked for where a run accounts for nothing."""


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
        leak: The epsilon that was looked for: twice what the run accounts for, as of noise that is halved; or 3.
        power: Probability with which the bound is above what is accounted, if so much leaks and the attacker misses nothing.
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
    leak: float
    power: float


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return how probable so many right guesses are, at most, under ``(epsilon, delta)`` (theorem 5.2 of the paper)."""
    from scipy.stats import binom

    share = 1.0 / (1.0 + math.exp(-epsilon))
    steps = np.arange(1, right + 1 if delta else 1)
    most = float(np.max(np.cumsum(binom.pmf(right - steps, guesses, share)) / steps, initial=0.0))
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


def power_of(canaries: int, leak: float, accounted: float = 0.0, delta: float = 0.0, confidence: float = 0.95) -> float:
    """Return how probable it is that guesses refute what is accounted, if each is right as often as a leak allows.

    Args:
        canaries: Number of canaries.
        leak: Epsilon of what leaks: a guess is right with ``e^leak / (1 + e^leak)``.
        accounted: Epsilon that is to be refuted.
        delta: Delta of the guarantee.
        confidence: Of the bound.

    Example:
        >>> round(power_of(100, leak=2.0), 2), round(power_of(100, leak=2.0, accounted=1.0), 2)
        (1.0, 0.76)
    """
    from scipy.stats import binom

    guesses = guesses_of(canaries)
    if p_value(canaries, guesses, guesses, accounted, delta) > 1 - confidence:
        return 0.0  # even if all are right
    low, high = -1, guesses  # so many right guesses refute nothing, and so many do
    while high - low > 1:
        middle = (low + high) // 2
        refuted = p_value(canaries, guesses, middle, accounted, delta) <= 1 - confidence
        low, high = (low, middle) if refuted else (middle, high)
    return float(binom.sf(high - 1, guesses, 1.0 / (1.0 + math.exp(-leak))))


def canaries_for(power: float, most: int, leak: float, accounted: float, delta: float, confidence: float) -> int:
    """Return the least number of canaries from the usual one on that has a power, or that which has the largest.

    Args:
        power: What is wanted, as of :func:`power_of`.
        most: Canaries that are to be had.
        leak: Epsilon of what leaks.
        accounted: Epsilon that is to be refuted.
        delta: Delta of the guarantee.
        confidence: Of the bound.

    Raises:
        ValueError: If the power is not a probability between 0 and 1.
    """
    if not 0 < power < 1:
        raise ValueError(f"power={power:g} is not a probability between 0 and 1, with which canaries find a leak")
    counts = range(USUAL, min(most, MOST) + 1, 2 * OUTER) or [most]
    powers: list[float] = []
    for count in counts:
        powers.append(power_of(count, leak, accounted, delta, confidence))
        if powers[-1] >= power:
            return count
    return counts[powers.index(max(powers))]


def guesses_of(canaries: int) -> int:
    """Return how many of so many canaries are guessed, on both sides together."""
    return 2 * max(1, canaries // (2 * OUTER))


class Mislabelled(Dataset[Any]):
    """Samples ``(x, y, ...)`` with labels of their own.

    Args:
        samples: The samples. Not called `dataset`, by which `SampleDP` sees copies of a record: a canary that is a client is
            made of them.
        labels: A label for each.
    """

    def __init__(self, samples: Any, labels: Sequence[int]) -> None:
        self.samples, self.labels = samples, list(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        x, y, *others = self.samples[index]
        return (x, torch.as_tensor(self.labels[index]).to(torch.as_tensor(y).dtype), *others)


def canaries(
    trainer: FederatedTrainer,
    data: FederatedDataModule,
    count: int | None = None,
    unit: Literal["record", "client"] | None = None,
    confidence: float = 0.95,
    checkpoint: str = "latest",
    seed: int = 0,
    report: Callable[[str], None] = lambda text: None,
    power: float = 0.8,
) -> dict[str, Any]:
    """Train the run's configuration once more with canaries in it, and guess which were there.

    Canaries are test samples with wrong labels. A record joins the training data of the client whose test sample it is. A
    client has nothing but copies of one, as many as that client has samples, or none if it is not there. What is bounded is
    the epsilon of that audit run.

    Args:
        trainer: The trainer, fitted or restored.
        data: Its data; they have to be here.
        count: Number of canaries, at most; each needs test samples of its own. `None`: 100, or as many more as
            have the `power`.
        unit: `"record"` or `"client"`. `None`: what the run accounts for (`"record"` if it accounts for nothing).
        confidence: Of the bound.
        checkpoint: Models of the audit run to attack.
        seed: Of all draws; the audit run trains with the seed after it.
        report: Is told of the progress, and before the audit run of what it can find.
        power: Probability with which a leak of twice the accounted epsilon is to be found (of 3 where nothing is accounted).

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
    if len(order) < LEAST:
        raise ValueError(f"{len(order)} canaries are to be had from the test data, and fewer than {LEAST} show nothing")
    account = _accounts_for(trainer, unit)
    claimed, delta = float(account.get("epsilon") or 0.0), float(account.get("delta") or 0.0)
    leak = 2 * claimed or UNCOUNTED
    if count is None:
        order = order[: canaries_for(power, len(order), leak, claimed, delta, confidence)]
    chosen = [bred[place] for place in order]
    reached = power_of(len(chosen), leak, claimed, delta, confidence)
    report(_can_find(len(chosen), leak, claimed, delta, confidence, reached))
    is_member = torch.rand(len(chosen), generator=draw) < 0.5
    pools_of_clients = {client: pool_of(data, client, ("train",)) for client in clients}
    if unit == "record":
        for place, (client, canary) in enumerate(chosen):
            if is_member[place]:
                pools_of_clients[client].datasets.append(canary)
        pools = {client: type(pool)(pool.datasets) for client, pool in pools_of_clients.items()}
        train = {client: loader_like(data, client, pools[client]) for client in clients}
    else:
        train = {client: loader_like(data, client, pools_of_clients[client]) for client in clients}
        for place, (client, canary) in enumerate(chosen):
            members = canary if is_member[place] else Subset(canary, [])
            train[f"canary{place}"] = loader_like(data, client, members)
    report(f"audit run with {int(is_member.sum())} of {len(chosen)} canaries")
    before = _losses(trainer.module(None, checkpoint), data, chosen, seed)
    with TemporaryDirectory() as folder:
        again = trained_again(trainer, data, train, Path(folder), seed + 1)
        learnt = (-_losses(again.module(None, checkpoint), data, chosen, seed)).exp() - (-before).exp()
        accounted = _accounts_for(again, unit)
        again.close()
    ranked = learnt.argsort(stable=True, descending=True)
    guesses = guesses_of(len(chosen))
    each = guesses // 2
    right = int(is_member[ranked[:each]].sum()) + int((~is_member[ranked[-each:]]).sum())
    delta, spent = float(accounted.get("delta") or 0.0), accounted.get("epsilon")
    bound, most = (epsilon_bound(len(chosen), guesses, hits, delta, confidence) for hits in (right, guesses))
    spent = None if spent is None else float(spent)
    return asdict(Canaries(unit, len(chosen), guesses, right, confidence, delta, bound, most, spent, leak, reached))


def _can_find(count: int, leak: float, accounted: float, delta: float, confidence: float, power: float) -> str:
    """Return in words what an audit can find, before it runs."""
    most = epsilon_bound(count, guesses_of(count), guesses_of(count), delta, confidence)
    beside = f"the {accounted:.2f} that are accounted for" if accounted else "0"
    if most <= accounted:
        return f"{count} canaries show an epsilon of {most:.2f} at most, which refutes nothing of {beside}"
    return (
        f"{count} canaries show an epsilon of {most:.2f} at most; a leak of {leak:.2f} comes out above {beside} with "
        f"probability {power:.0%}, if the attacker misses nothing"
    )


def _accounts_for(trainer: FederatedTrainer, unit: str) -> dict[str, Any]:
    """Return what a run's accountant says of a unit; nothing if it counts another one, or there is none."""
    file = None if trainer.run is None else trainer.run.path / TOLD
    account = read_json(file) if file is not None and file.exists() else {}
    return account if str(account.get("unit", "")).startswith(unit) else {}


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
    losses = [losses_of(module, data, client, Subset(canary, [0]), seed, "canary").mean() for client, canary in chosen]
    return torch.stack(losses)
