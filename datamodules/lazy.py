"""Clients whose samples are made, or read, when they are asked for: federations of a hundred thousand and more."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Annotated, Any, cast

from torch.utils.data import DataLoader, Dataset

from fedlightning.datamodules.federated_data import SPLITS, FederatedDataModule, check_split
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.datamodules.views import IndexView, collate_rows
from fedlightning.ranges import Range, checked
from fedlightning.seeding import generator

Sizes = int | Sequence[int]
"""Samples of every client: one number for all, or a number for each."""


class LazyClients(FederatedDataModule):
    """A federation of many clients, of which only those that are visited or scored are ever read.

    A client is a number, from 0; its id is that number as text. :meth:`client` returns its datasets, by split: give a
    function, or override the method in a subclass. It must return the same samples whenever it is asked (a file of the
    client's own, or random numbers that are seeded with the client's number), because a client is made anew at every visit;
    `keep` of them stay in memory. The sizes are told beforehand, so that nobody need be read to be counted.

    There is no union of the clients' data, for that would read all of them: scores on pooled data are left out, and a
    method that trains on them (`Central`) is refused.

    Args:
        num_clients: Number of clients.
        make: Returns the datasets of the client with a number: `{"train": ..., "val": ..., "test": ...}`, each map-style;
            `"val"` and `"test"` may be missing. `None`: a subclass overrides :meth:`client`.
        sizes: Samples of each split: one number for all clients, or a sequence with a number for each client (a list, an
            array, a memory map). A split that is missing here is one that no client has. `None`: a subclass overrides
            :meth:`size`.
        batch_size: Number of samples in a batch, in every split.
        seed: Seed of `held_out`, and of the batch order until the trainer starts a visit with its own seed.
        drop_last: Leave out the last incomplete training batch.
        collate_fn: Makes a batch of a list of samples. `None` is `default_collate`, with a fast path for tensors.
        num_workers: Worker processes of every loader; 0 loads in the training process.
        keep: Number of clients whose datasets stay in memory, those that were asked for last.
        name: Which data these are, as the fingerprint of a run tells them; two runs with the same name, sizes and seed are
            on the same data. Default: the name of the class or of the function; of a `functools.partial`, with its
            arguments.

    Raises:
        ValueError: If a number is out of range, or `sizes` has another number of clients.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules import LazyClients
        >>> def make(number):
        ...     drawn = torch.Generator().manual_seed(number)
        ...     return {"train": TensorDataset(torch.randn(20, 4, generator=drawn), torch.zeros(20).long())}
        >>> data = LazyClients(100_000, make, sizes={"train": 20}, batch_size=10)
        >>> data
        <LazyClients: 100000 clients>
        >>> len(data.client_dataloader("99999", "train")), data.num_samples("7"), data.client_dataloader("7", "val")
        (2, 20, None)
    """

    @checked
    def __init__(
        self,
        num_clients: Annotated[int, Range("[1, inf)", strict=True)],
        make: Callable[[int], Mapping[str, Dataset[Any]]] | None = None,
        sizes: Mapping[str, Sizes] | None = None,
        batch_size: Annotated[int, Range("[1, inf)", strict=True)] = 32,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: Annotated[int, Range("[0, inf)", strict=True)] = 0,
        keep: Annotated[int, Range("[1, inf)", strict=True)] = 16,
        name: str | None = None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        if make is None and type(self).client is LazyClients.client:
            raise ValueError(
                f"{kind} does not know its clients' data. Give make=..., a function of a client's number that returns its "
                "datasets by split, or override client() in a subclass."
            )
        if sizes is None and type(self).size is LazyClients.size:
            raise ValueError(
                f"{kind} does not know how many samples its clients hold, and would have to read all {num_clients} of "
                'them. Give sizes={"train": 20}, one number for all clients or one for each, or override size().'
            )
        self.num_clients, self.batch_size, self.seed = num_clients, batch_size, int(seed)
        self.drop_last, self.collate_fn, self.num_workers, self.keep = drop_last, collate_fn, num_workers, keep
        self._make, self._sizes = make, dict(sizes or {})
        self.name = name or (kind if make is None else _name(make))
        self._datasets_by_client: OrderedDict[int, Mapping[str, Dataset[Any]]] = OrderedDict()
        self._ids: list[str] | None = None
        for split, split_sizes in self._sizes.items():
            check_split(split)
            if not isinstance(split_sizes, int) and len(split_sizes) != num_clients:
                raise ValueError(
                    f"{kind} has {num_clients} clients and {len(split_sizes)} sizes of the {split} split. Give a size for "
                    "each client, or one number for all."
                )

    def __repr__(self) -> str:
        """Return the class and the number of clients; nobody is counted for it."""
        return f"<{type(self).__name__}: {self.num_clients} clients>"

    # -- what a subclass may override --------------------------------------------------------------------------------
    def client(self, number: int) -> Mapping[str, Dataset[Any]]:
        """Make the datasets of one client, by split, or read them. The same number always gives the same samples.

        Args:
            number: The client's number, from 0.
        """
        assert self._make is not None
        return self._make(number)

    def size(self, number: int, split: str) -> int:
        """Return how many samples a client holds in a split, without reading them.

        Args:
            number: The client's number, from 0.
            split: `"train"`, `"val"` or `"test"`.
        """
        sizes = self._sizes.get(split, 0)
        return sizes if isinstance(sizes, int) else int(sizes[number])

    # -- the contract of federated data ------------------------------------------------------------------------------
    @property
    def client_ids(self) -> list[str]:
        if self._ids is None:
            self._ids = [str(number) for number in range(self.num_clients)]
        return self._ids

    def num_samples(self, client: str, split: str = "train") -> int:
        check_split(split)
        return self.size(self._number(client), split)

    def sizes_of(self, clients: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        train, val, test = (self._sizes.get(split, 0) for split in SPLITS)
        if type(self).size is not LazyClients.size or not (
            isinstance(train, int) and isinstance(val, int) and isinstance(test, int)
        ):
            return super().sizes_of(clients)
        return dict.fromkeys(clients, (train, val, test))

    def client_dataloader(self, client: str, split: str) -> DataLoader[Any] | None:
        """Return one client's loader; the client is made, or read, if it is not in memory.

        Raises:
            ValueError: If the client has another number of samples than it was said to have.
        """
        number, size = self._number(client), self.num_samples(client, split)
        if not size and split != "train":
            return None
        dataset: Any = self._client(number).get(split, ())
        view, collate = IndexView(dataset, range(size)), self.collate_fn or collate_rows
        options: dict[str, Any] = {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "collate_fn": collate,
        }
        if split != "train":
            return DataLoader(view, generator=generator(self.seed, "workers", client, split), **options)
        sampler = AddressedSampler(size, str(client), seed=self.seed)
        return DataLoader(view, sampler=sampler, generator=sampler.generator, drop_last=self.drop_last, **options)

    def pooled_dataloader(self, split: str) -> None:
        """Return `None`: a union would read every client."""
        return None

    @property
    def partition_name(self) -> str:
        return f"{self.name}, clients made when asked for"

    @property
    def common_batches(self) -> Mapping[str, Any]:
        return {"batch_size": self.batch_size, "drop_last": self.drop_last, "shuffle": True}

    def fingerprint(self, split: str) -> str:
        """Return a short hash of the name of the data, the seed, the number of clients and their sizes; nobody is read."""
        check_split(split)
        digest = hashlib.sha256(json.dumps([self.name, self.seed, self.num_clients]).encode())
        sizes = self._sizes.get(split, 0) if type(self).size is LazyClients.size else None
        if isinstance(sizes, int):
            digest.update(f"{sizes}".encode())
        else:
            for number in range(self.num_clients):
                digest.update(b"%d," % self.size(number, split))
        return digest.hexdigest()[:12]

    def _number(self, client: str) -> int:
        number = int(client) if str(client).isdecimal() else -1
        if not 0 <= number < self.num_clients or str(number) != str(client):
            raise ValueError(f"There is no client {client!r}; the clients are '0' to '{self.num_clients - 1}'.")
        return number

    def _client(self, number: int) -> Mapping[str, Dataset[Any]]:
        if number in self._datasets_by_client:
            self._datasets_by_client.move_to_end(number)
            return self._datasets_by_client[number]
        datasets = self.client(number)
        if not isinstance(datasets, Mapping) or not set(datasets) <= set(SPLITS):
            what = sorted(datasets) if isinstance(datasets, Mapping) else f"a {type(datasets).__name__}"
            raise ValueError(
                f"Client '{number}' of {type(self).__name__} is {what}. Return its datasets by split, as in "
                "{'train': dataset, 'val': dataset, 'test': dataset}."
            )
        for split in SPLITS:  # all of them: a split of size 0 is never asked for
            count, declared = len(cast(Sized, datasets.get(split, ()))), self.size(number, split)
            if count != declared:
                raise ValueError(
                    f"Client '{number}' of {type(self).__name__} has {count} samples in its {split} split, and its size was "
                    f"given as {declared}. Sizes weight the clients, and say who is scored: give those that client() returns."
                )
        self._datasets_by_client[number] = datasets
        while len(self._datasets_by_client) > self.keep:
            self._datasets_by_client.popitem(last=False)
        return datasets

    def __getstate__(self) -> dict[str, Any]:
        # neither a Trainer nor what was made of clients is part of the data that go to another process
        return self.__dict__ | {"trainer": None, "_datasets_by_client": OrderedDict()}


def _name(make: Any) -> str:
    """Return the name of a function; of a partial one, with the arguments that it holds, which make other data."""
    if not isinstance(make, functools.partial):
        return str(getattr(make, "__qualname__", type(make).__qualname__))
    arguments = [*map(_word, make.args), *(f"{name}={_word(value)}" for name, value in sorted(make.keywords.items()))]
    return f"{_name(make.func)}({', '.join(arguments)})"


def _word(value: Any) -> str:
    """Return a value in few letters, the same ones in every process."""
    if not isinstance(value, bool | int | float | str | list | tuple | Path | None):
        return type(value).__qualname__
    text = repr(value)
    return text if len(text) < 50 else f"{text[:30]}... {hashlib.sha256(text.encode()).hexdigest()[:12]}"
