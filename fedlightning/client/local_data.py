"""The batches of a client side: how many samples they have, their addressed order, and the first ones for checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from fedlightning.contract.messages import Message
from fedlightning.datamodules.sampling import AddressedSampler, kept, readdress, samples_in, seed_in_workers
from fedlightning.datamodules.views import samples_at
from fedlightning.seeding import address, isolated

if TYPE_CHECKING:
    from fedlightning.client.runtime import LocalRunner

EPOCHS_OF_A_VISIT = 2**31
"""More than any visit has, so that its epochs never get the address of another round's."""


def count_used_samples(runner: LocalRunner, loader: DataLoader[Any] | None) -> int:
    """Return the samples that one epoch uses, after `drop_last` and `limit_train_batches`."""
    if loader is None or len(loader) == 0:
        return 0
    samples = samples_in(loader)
    size = loader.batch_size or math.ceil(samples / len(loader))
    batches = runner.settings.train_batches(len(loader))
    return min(samples, batches * size)


def start_sampler(
    runner: LocalRunner,
    loader: Any,
    message: Message,
    purpose: str = "",
    epoch_offset: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Address the order of the batches: a function of (seed, client, visit, epoch), wherever the visit runs."""
    seed_in_workers(loader)
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, AddressedSampler):
        seed = runner.settings.seed
        sampler.start(
            seed=address(seed, purpose) if purpose else seed,
            round=message.visit,
            epochs_per_round=EPOCHS_OF_A_VISIT,
            epoch_offset=epoch_offset,
            rank=rank,
            world_size=world_size,
        )
    else:
        readdress(loader, runner.settings.seed, purpose, "samplers", message.client, message.visit)


def knows_groups(runner: LocalRunner) -> bool:
    """Return whether the group (a patient) of every training sample is known."""
    return all(runner.data.sample_groups(client) is not None for client in runner.data.client_ids)


def train_loaders(runner: LocalRunner) -> Iterator[DataLoader[Any]]:
    """Yield the training loaders of the clients that have a batch, for checks at the start."""
    for client in runner.data.client_ids:
        loader = runner.data.at_round(0).client_dataloader(client, "train")
        if loader is not None and len(loader) > 0:
            yield loader


def take_first_batch(runner: LocalRunner) -> Any:
    """Return a training batch of the first client that has one, for checks at the start; else `None`."""
    for loader in train_loaders(runner):
        dataset, size = loader.dataset, loader.batch_size or 1
        if isinstance(dataset, IterableDataset) or loader.batch_sampler is None:
            with isolated(runner.settings.seed, "first batch"), kept(dataset):
                return runner.blueprint.precision.convert_input(next(iter(loader)))
        chosen = range(min(size, len(dataset)))  # type: ignore[arg-type]
        with kept(dataset):
            return runner.blueprint.precision.convert_input(loader.collate_fn(samples_at(dataset, chosen)))
    return None
