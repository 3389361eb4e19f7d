"""Batch order by address: which samples form which batch is a function of (seed, client, round, epoch) alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from fedlightning.ranges import NonNegativeInt, checked
from fedlightning.seeding import address, generator


class AddressedSampler(Sampler[int]):
    """A sampler of the indices `0 .. size - 1` in an order that depends on its address only.

    The order of epoch *e* of a visit is a permutation drawn from the address `(seed, "batches", client, round + e //
    epochs_per_round, e % epochs_per_round)`. `R` federated rounds of `E` epochs therefore see the very same batches as
    one plain `lightning.Trainer.fit` over `R * E` epochs with `start(epochs_per_round=E)`. Neither the engine nor the
    order in which clients are visited can change them, and the global random state is neither read nor written.

    Give `generator` to the `DataLoader` too: the seeds of worker processes then have an address as well.

    Args:
        size: Number of samples; 0 gives an empty sampler.
        client: Name of the client; `"pooled"` for the union of all clients.
        shuffle: `False` gives the order `0 .. size - 1`.
        seed: Seed until `start` sets another one.

    Raises:
        ValueError: If `size` is negative.

    Example:
        >>> from fedlightning.datamodules import AddressedSampler
        >>> one, other = AddressedSampler(100, client="a"), AddressedSampler(100, client="a")
        >>> one.start(seed=0, round=3)
        >>> other.start(seed=0, round=2, epochs_per_round=5)
        >>> other.set_epoch(5)  # five epochs after the start of round 2 begins round 3
        >>> list(one) == list(other)
        True
    """

    @checked
    def __init__(self, size: NonNegativeInt, client: str, shuffle: bool = True, seed: int = 0) -> None:
        self.size, self.client, self.shuffle = int(size), str(client), bool(shuffle)
        self.generator = torch.Generator()
        self.start(seed=seed, round=0)

    def start(
        self,
        *,
        seed: int,
        round: int,
        epochs_per_round: int = 1,
        epoch_offset: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Begin a client visit; the next iteration is its epoch 0.

        Args:
            seed: Seed of the run.
            round: Round of the visit's first epoch.
            epochs_per_round: Number of epochs after which the round in the address goes up by one.
            epoch_offset: Number that Lightning gives to the visit's first epoch (not 0 if a Trainer is used again).
            rank: This process among `world_size` that share each batch of the client.
            world_size: With more than one, rank `r` gets `order[r::world_size]`, padded by wrap-around to equal length:
                the ranks' k-th batches together are the k-th batch of one process with `world_size` times the batch
                size.

        Raises:
            ValueError: If `epochs_per_round` or `world_size` is below 1, or `rank` is outside `0 .. world_size - 1`.
        """
        if epochs_per_round < 1:
            raise ValueError(f"AddressedSampler.start got epochs_per_round={epochs_per_round}; use 1 or more.")
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"AddressedSampler.start got rank={rank}, world_size={world_size}; 0 <= rank < world_size."
            )
        self.seed, self.round = int(seed), int(round)
        self.epochs_per_round, self.epoch_offset = int(epochs_per_round), int(epoch_offset)
        self.rank, self.world_size = int(rank), int(world_size)
        self.set_epoch(self.epoch_offset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate, as Lightning counts it (Lightning calls this before every training epoch).

        Raises:
            ValueError: If the epoch is before the visit's first one.
        """
        self.go_to(epoch)
        self.generator.manual_seed(address(self.seed, "workers", *self._address))

    def go_to(self, epoch: int) -> None:
        """Set the epoch for `permutation` only: `generator`, which seeds workers, stays as it is.

        Raises:
            ValueError: If the epoch is before the visit's first one.
        """
        local = int(epoch) - self.epoch_offset
        if local < 0:
            raise ValueError(
                f"AddressedSampler of client {self.client!r} was set to epoch {epoch}, before the visit's first epoch "
                f"{self.epoch_offset}; call start(epoch_offset=...) with the Trainer's current_epoch."
            )
        self.epoch = int(epoch)
        rounds, epoch_in_round = divmod(local, self.epochs_per_round)
        self._address = (self.client, self.round + rounds, epoch_in_round)

    def permutation(self) -> torch.Tensor:
        """Return the whole order of the current epoch, before ranks share it: int64 of shape `(size,)`."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=generator(self.seed, "batches", *self._address))

    def order(self) -> list[int]:
        """Return `permutation` as a list."""
        order: list[int] = self.permutation().tolist()
        return order

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        if self.world_size > 1 and order:
            padded = len(self) * self.world_size
            order = (order * -(-padded // len(order)))[:padded]
        return iter(order[self.rank :: self.world_size])

    def __len__(self) -> int:
        return -(-self.size // self.world_size)
