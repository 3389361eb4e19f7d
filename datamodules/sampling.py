"""Batch order by address: which samples form which batch is a function of (seed, client, round, epoch) alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from fedlightning.seeding import address, generator


class AddressedSampler(Sampler[int]):
    """Yields the indices ``0..size-1`` in an order that depends on its address only.

    The order of epoch *e* of a visit is a permutation drawn from the address ``(seed, "batches", client, round + e //
    epochs_per_round, e % epochs_per_round)``. So ``R`` federated rounds of ``E`` epochs, and one plain
    ``lightning.Trainer.fit`` over ``R * E`` epochs with ``start(epochs_per_round=E)``, see the very same batches;
    neither the engine nor the order in which clients are visited can change them, and the global random state is
    neither read nor written.

    Hand :attr:`generator` to the ``DataLoader`` too: the seeds of worker processes then have an address as well.

    Args:
        size: number of samples; 0 gives an empty sampler.
        client: the client's id; ``"pooled"`` for the union of all clients.
        shuffle: ``False`` gives the identity order.
        seed: the seed until :meth:`start` names another one.
    """

    def __init__(self, size: int, client: str, shuffle: bool = True, seed: int = 0) -> None:
        if size < 0:
            raise ValueError(f"AddressedSampler got size={size}; a number of samples cannot be negative.")
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
            seed: the run's seed.
            round: the round of the visit's first epoch.
            epochs_per_round: after so many epochs the round in the address goes up by one.
            epoch_offset: the number that Lightning gives to the visit's first epoch (not 0 when a Trainer is re-used).
            rank: this process among ``world_size`` that share each batch of the client.
            world_size: with more than one, rank ``r`` gets ``order[r::world_size]``, padded by wrap-around to equal
                length: the ranks' k-th batches together are the k-th batch of one process with ``world_size`` times
                the batch size.

        Raises:
            ValueError: ``epochs_per_round`` or ``world_size`` below 1, or ``rank`` outside of ``0..world_size-1``.
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
        """Choose the epoch to iterate, counted as Lightning counts (it calls this before every training epoch)."""
        self.go_to(epoch)
        self.generator.manual_seed(address(self.seed, "workers", *self._address))

    def go_to(self, epoch: int) -> None:
        """The same for one who asks for :meth:`permutation` and starts no workers."""
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
        """The whole order of the current epoch, before ranks share it: int64, shape ``(size,)``."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=generator(self.seed, "batches", *self._address))

    def order(self) -> list[int]:
        """:meth:`permutation` as a list."""
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
