"""Clients that are kept out of training: who they are, and the data module of the others.

A data module of a process in which there are no clients: :class:`WithoutClients`.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from fedlightning.datamodules.federated_data import FederatedDataModule, sort_clients
from fedlightning.datamodules.indexed import IndexedFederatedDataModule
from fedlightning.datamodules.loaders import LoaderDataModule, union_loader, union_of
from fedlightning.datamodules.wrapped import WrappedDataModule
from fedlightning.seeding import generator


class WithoutClients(FederatedDataModule):
    """Stands where a data module of clients stands. Whoever asks it for a client's data is told why there are none."""

    @abstractmethod
    def _refuse(self) -> NoReturn:
        """Say why there are no clients here."""

    @property
    def client_ids(self) -> list[str]:
        self._refuse()

    def client_dataloader(self, client: str, split: str) -> Any:
        self._refuse()

    def pooled_dataloader(self, split: str) -> Any:
        self._refuse()

    def num_samples(self, client: str, split: str = "train") -> int:
        self._refuse()


def draw_held_out(clients: Iterable[str], how_many: int | float, seed: int) -> list[str]:
    """Draw the clients to keep out of training, uniformly; a smaller share is part of a larger one.

    Example:
        >>> draw_held_out(["a", "b", "c", "d", "e"], 0.4, seed=0)
        ['b', 'e']
        >>> draw_held_out(["a", "b", "c", "d", "e"], 1, seed=0)
        ['b']
    """
    return draw_clients(sort_clients(clients), how_many, seed, "held out")


def draw_clients(ordered: Sequence[str], how_many: int | float, seed: int, purpose: str) -> list[str]:
    """Draw some clients uniformly; a smaller share is part of a larger one.

    Example:
        >>> draw_clients(["a", "b", "c", "d", "e"], 2, 0, "evaluated"), draw_clients(["a", "b"], 7, 0, "evaluated")
        (['b', 'e'], ['a', 'b'])
    """
    share = isinstance(how_many, float)
    count = max(round(how_many * len(ordered)), 1) if share and how_many > 0 else int(how_many)
    places = torch.randperm(len(ordered), generator=generator(seed, purpose))[:count].tolist()
    return [ordered[place] for place in sorted(places)]


def exclude_clients(data: FederatedDataModule, clients: Collection[str]) -> FederatedDataModule:
    """Return the same data in which some clients are not among the clients, nor in any union of them.

    Public data that were taken from the clients (`public_fraction`) are those of the clients that are left.
    Asked by name, it still gives those clients' own loaders and numbers.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> sizes = {"a": 3, "b": 5, "c": 4}
        >>> data = LoaderDataModule({name: DataLoader(TensorDataset(torch.zeros(n, 2))) for name, n in sizes.items()})
        >>> others = exclude_clients(data, ["b"])
        >>> others.client_ids, len(others.pooled_dataloader("train").dataset), others.num_samples("b")
        (['a', 'c'], 7, 5)
    """
    if not clients:
        return data
    if isinstance(data, LoaderDataModule):
        return data.exclude(clients)
    out = set(clients)
    left = [client for client in data.client_ids if client not in out]
    if isinstance(data, IndexedFederatedDataModule):
        few = copy.copy(data)
        few._client_ids = left
        if few.client_ids == left:  # else a subclass has its own way of knowing them
            return few
        few._public = {client: data._public[client] for client in left if client in data._public}
        return ClientSubset(few, left)
    return ClientSubset(data, left)


class ClientSubset(WrappedDataModule):
    """Some clients of a data module that is set up.

    Args:
        data: The data module.
        clients: Ids of the clients that are left.
        changed: Makes another loader of each one, as for a trial: the pooled ones are those of all clients then.

    Attributes:
        whole: The data module.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        clients: Sequence[str],
        changed: Callable[[DataLoader[Any] | None], DataLoader[Any] | None] | None = None,
    ) -> None:
        super().__init__(data)
        self.left, self._changed = list(clients), changed

    @property
    def client_ids(self) -> list[str]:
        return list(self.left)

    def client_dataloader(self, client: str, split: str) -> DataLoader[Any] | None:
        loader = self.whole.client_dataloader(client, split)
        return loader if self._changed is None else self._changed(loader)

    def pooled_dataloader(self, split: str) -> DataLoader[Any] | None:
        """Return one loader over the union of these clients' datasets, with the first loader's batches.

        Where the data module has no union of everybody's data there is none of theirs.
        """
        pooled = self.whole.pooled_dataloader(split)
        if self._changed is not None:
            return self._changed(pooled)
        if pooled is None:
            return None
        client_loaders = [self.whole.client_dataloader(client, split) for client in sort_clients(self.left)]
        loaders = [loader for loader in client_loaders if loader is not None]
        return union_loader(union_of(loaders, split), loaders[0], split) if loaders else None

    def with_statistics(self, totals: Mapping[str, Any]) -> FederatedDataModule:
        return type(self)(self.whole.with_statistics(totals), self.left, self._changed)

    def sizes_of(self, clients: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        return self.whole.sizes_of(clients)

    @property
    def planted_groups(self) -> dict[str, int] | None:
        groups = self.whole.planted_groups
        return None if groups is None else {client: groups[client] for client in self.client_ids if client in groups}
