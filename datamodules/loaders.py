"""A federated data module from loaders that already exist: one per client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader

from fedlightning.datamodules.base import SPLITS, FederatedDataModule, in_order
from fedlightning.datamodules.sampling import AddressedSampler


class LoaderDataModule(FederatedDataModule):
    """Wraps ready-made loaders; each client's batches come as its own loader gives them.

    Args:
        train: a loader per client id; it decides who the clients are.
        val, test: a loader per client id; clients may be missing.

    Raises:
        ValueError: if there is no client, or a validation or test loader of a client without a training loader.
    """

    def __init__(
        self, train: Mapping[str, Any], val: Mapping[str, Any] | None = None, test: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._loaders = {
            split: {str(client): loader for client, loader in (given or {}).items()}
            for split, given in zip(SPLITS, (train, val, test), strict=True)
        }
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
        return list(self._loaders["train"])

    def client_dataloader(self, client: str, split: str) -> DataLoader[Any] | None:
        """The loader that was given."""
        return self._loaders[split].get(client)

    def pooled_dataloader(self, split: str) -> DataLoader[Any] | None:
        """One loader over the union of the clients' datasets, with the first loader's batch size and collate function."""
        loaders = [
            self._loaders[split][client] for client in in_order(self.client_ids) if client in self._loaders[split]
        ]
        if not loaders:
            return None
        union: ConcatDataset[Any] = ConcatDataset([loader.dataset for loader in loaders])
        first = loaders[0]
        sampler = AddressedSampler(len(union), "pooled", shuffle=split == "train")
        return DataLoader(
            union,
            batch_size=first.batch_size or 1,
            sampler=sampler,
            collate_fn=first.collate_fn,
            generator=sampler.generator,
        )

    def num_samples(self, client: str, split: str = "train") -> int:
        """Length of the client's dataset."""
        loader = self._loaders[split].get(client)
        return 0 if loader is None else len(loader.dataset)
