"""A federated data module from loaders that already exist: one per client."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch.utils.data import BatchSampler, ChainDataset, ConcatDataset, DataLoader, IterableDataset, RandomSampler

from fedlightning.datamodules.federated_data import SPLITS, FederatedDataModule, sort_clients
from fedlightning.datamodules.partitioned import loader_options
from fedlightning.datamodules.sampling import (
    AddressedSampler,
    CombinedBatches,
    gives_batches,
    going_on,
    note_samples,
    samples_in,
    unchanged,
)
from fedlightning.datamodules.views import worker_options
from fedlightning.errors import listed


class LoaderDataModule(FederatedDataModule):
    """A data module over ready-made loaders; each client's batches come as its own loader gives them.

    Any torch `DataLoader` will do, with any sampler or batch sampler. Samplers draw from torch's global generator, which
    has an address (seed, round, client, phase, epoch) in every visit, so the order is the same under every engine and in
    a resumed run. A generator of the loader's own would go on from visit to visit: a loader that shuffles by one gets
    an `AddressedSampler` instead, whose address the generator's seed is part of, and the torch generator of any other
    sampler is seeded by the visit's address. So are, in worker processes, generators that a dataset keeps; without workers
    they go on, and a warning names them. Workers persist within a visit. A Lightning `CombinedLoader` of training loaders
    gives a step dicts or lists of batches, as of labelled and unlabelled samples; all of them are the client's. Data in
    memory (`TensorDataset`, `ArrayDataset`, and `Subset` and `ConcatDataset` of them) are read a batch at a time.

    Args:
        train: A loader per client id. Its keys are the clients.
        val: A loader per client id; clients may be missing.
        test: A loader per client id; clients may be missing.
        public: A loader of public data, which are in nobody's training, validation or test data.

    Raises:
        ValueError: If there is no client, a validation or test loader of a client without a training loader, or
            something that is not a single loader with a known number of samples.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from fedlightning.datamodules import LoaderDataModule
        >>> loaders = {name: DataLoader(TensorDataset(torch.zeros(size, 2))) for name, size in (("a", 3), ("b", 5))}
        >>> data = LoaderDataModule(loaders)
        >>> data.client_ids, data.num_samples("b"), len(data.pooled_dataloader("train").dataset)
        (['a', 'b'], 5, 8)
    """

    def __init__(
        self,
        train: Mapping[str, Any],
        val: Mapping[str, Any] | None = None,
        test: Mapping[str, Any] | None = None,
        public: DataLoader[Any] | None = None,
    ) -> None:
        super().__init__()
        self._public = public
        self._loaders = {
            split: {
                str(client): _addressed(_checked(loader, str(client), split), str(client), split)
                for client, loader in (loaders or {}).items()
            }
            for split, loaders in zip(SPLITS, (train, val, test), strict=True)
        }
        self._clients = list(self._loaders["train"])
        self._unions: dict[str, Any] = {}
        _warn_of_generators(self._loaders["train"])
        if not self._loaders["train"]:
            raise ValueError("train_dataloaders is empty. Give one loader per client: {'a': loader_a, 'b': loader_b}.")
        for split in ("val", "test"):
            unknown = sorted(set(self._loaders[split]) - set(self._loaders["train"]))
            if unknown:
                raise ValueError(
                    f"{split}_dataloaders has client '{unknown[0]}', train_dataloaders has not. Use one set of ids."
                )

    @property
    def client_ids(self) -> list[str]:
        """The keys of the training loaders."""
        return list(self._clients)

    def client_dataloader(self, client: str, split: str) -> DataLoader[Any] | None:
        """Return the loader that was given, or `None`. One with persistent workers is made anew, with new workers."""
        loader = self._loaders[split].get(client)
        return _with_new_workers(loader) if type(loader) is DataLoader and loader.persistent_workers else loader

    def pooled_dataloader(self, split: str) -> DataLoader[Any] | None:
        """Return one loader over the union of the clients' datasets; `None` if there are none.

        It has the first loader's batch size and collate function.
        """
        loaders = [
            loader
            for client in sort_clients(self.client_ids)
            if (loader := self._loaders[split].get(client)) is not None
        ]
        if not loaders:
            return None
        if split not in self._unions:
            self._unions[split] = union_of(loaders, split)
        union = union_loader(self._unions[split], loaders[0], split)
        if gives_batches(union):
            note_samples(union, sum(map(samples_in, loaders)))
        return union

    def public_dataloader(self) -> DataLoader[Any] | None:
        return self._public

    def exclude(self, clients: Collection[str]) -> LoaderDataModule:
        """Return the same data without some clients; asked by name, it still gives those clients' loaders."""
        few = copy.copy(self)
        few._clients = [client for client in self._clients if client not in clients]
        few._unions = {}
        return few

    def num_samples(self, client: str, split: str = "train") -> int:
        """Return the length of the client's dataset; where that gives batches, the samples in them."""
        return samples_in(self._loaders[split].get(client))


def union_of(loaders: Sequence[DataLoader[Any]], split: str) -> Any:
    """Return the union of the datasets that loaders read."""
    datasets = [loader.dataset for loader in loaders]
    streams = [isinstance(dataset, IterableDataset) for dataset in datasets]
    if any(streams) and not all(streams):
        raise ValueError(
            f"Some of the clients' {split} loaders read an IterableDataset and others do not, so they have no "
            "union. Make all of them map-style datasets, or do without pooled data."
        )
    return ChainDataset(datasets) if any(streams) else ConcatDataset(datasets)


def union_loader(union: Any, first: DataLoader[Any], split: str) -> DataLoader[Any]:
    """Return a loader over a union of datasets."""
    size = None if gives_batches(first) else first.batch_size or 1
    if isinstance(union, IterableDataset):
        return DataLoader(union, batch_size=size, collate_fn=first.collate_fn)
    sampler = AddressedSampler(len(union), "pooled", shuffle=split == "train")
    return DataLoader(union, batch_size=size, sampler=sampler, collate_fn=first.collate_fn, generator=sampler.generator)


def _checked(loader: Any, client: str, split: str) -> Any:
    """Return a loader, or raise ValueError if it is not one whose samples can be counted."""
    if loader is None:  # the client has no samples there
        return None
    what = f"{split}_dataloaders[{client!r}]"
    if isinstance(loader, CombinedLoader) and split == "train" and loader.limits is None:
        return _combined(loader, client, what)
    if not isinstance(loader, DataLoader):
        several = isinstance(loader, CombinedLoader | Mapping | list | tuple)
        raise ValueError(
            f"{what} is a {type(loader).__name__}{' of several loaders' if several else ''}. "
            + (
                "A client's training batches may be dicts or lists of several: train_dataloaders={client: CombinedLoader("
                "{'labelled': loader, 'unlabelled': other}, 'max_size_cycle')}, without limits. For scores join the datasets "
                "(torch.utils.data.ConcatDataset), since they are those of one set."
                if several
                else "A client has one torch DataLoader for each split: DataLoader(dataset, batch_size=...)."
            )
        )
    try:
        len(loader.dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(
            f"{what} reads a {type(loader.dataset).__name__}, which does not say how many samples it has, and a client's "
            "samples are its weight. Give it __len__ (the samples of an epoch)."
        ) from error
    return loader


def _combined(loader: CombinedLoader, client: str, what: str) -> DataLoader[Any]:
    """Return a loader that gives the batches of a combined one, each a dict or a list."""
    batches = CombinedBatches(loader)
    modes = ("min_size", "max_size_cycle", "max_size")
    if batches.mode not in modes:
        raise ValueError(
            f"{what} is a CombinedLoader of mode {batches.mode!r}, with which a step gets the batch of one loader. Use "
            f"{listed(modes)}; or join the datasets (torch.utils.data.ConcatDataset)."
        )
    for member in loader.flattened:
        if isinstance(member, CombinedLoader):
            raise ValueError(f"{what} has a CombinedLoader in a CombinedLoader. Give all loaders in one.")
        _checked(member, client, "train")
        if member.persistent_workers:
            raise ValueError(
                f"{what} has a loader with persistent workers, whose random state would go on from visit to visit. Set "
                "persistent_workers=False."
            )
    return DataLoader(batches, batch_size=None, collate_fn=unchanged)


def _addressed(loader: Any, client: str, split: str) -> Any:
    """Return the loader, with an order by address if it shuffles by a generator of its own."""
    sampler = getattr(loader, "sampler", None)
    if type(loader) is not DataLoader or type(sampler) is not RandomSampler or sampler.generator is None:
        return loader
    try:
        options, _ = loader_options(loader, split, type(loader.dataset).__name__)
    except ValueError:  # with replacement, or batches of its own
        return loader
    options["collate_fn"] = loader.collate_fn
    size = len(sampler.data_source)
    order = AddressedSampler(size, f"{client}, generator {sampler.generator.initial_seed()}")
    return DataLoader(loader.dataset, sampler=order, generator=order.generator, **options)


def _with_new_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader without its workers, whose random state would go on from visit to visit."""
    batches: dict[str, Any]
    if type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None:
        batches = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "sampler": loader.sampler}
    else:
        batches = {"batch_sampler": loader.batch_sampler}
    if loader.batch_size is None and loader.batch_sampler is not None:
        batches = {"batch_sampler": loader.batch_sampler}
    if isinstance(loader.dataset, IterableDataset):
        batches.pop("sampler")
    fresh: DataLoader[Any] = DataLoader(
        loader.dataset,
        **batches,
        **worker_options(loader),
        collate_fn=loader.collate_fn,
        generator=loader.generator,
        persistent_workers=True,
    )
    if gives_batches(fresh):
        note_samples(fresh, samples_in(loader))
    return fresh


def _parts(loader: Any) -> list[Any]:
    """Return the loaders that a loader reads: itself, or those that are combined in it."""
    dataset = getattr(loader, "dataset", None)
    return dataset.loaders if isinstance(dataset, CombinedBatches) else [loader]


def _warn_of_generators(loaders: Mapping[str, Any]) -> None:
    """Warn once of generators that no address reaches."""
    several = [(client, part) for client, loader in loaders.items() for part in _parts(loader)]
    for client, loader in several:
        place = going_on(loader) if isinstance(loader, DataLoader) and not loader.num_workers else None
        if place is not None:
            rank_zero_warn(
                f"The training loader of client '{client}' draws from {place}, a random generator of its own, which goes on "
                "from visit to visit: a resumed run and other engines will draw other numbers. Draw from torch's or numpy's "
                "global generator, which every visit seeds.",
                category=UserWarning,
            )
            return
