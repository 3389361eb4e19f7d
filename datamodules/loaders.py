"""A federated data module from loaders that already exist: one per client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader

from fedlightning.datamodules.base import SPLITS, FederatedDataModule, in_order
from fedlightning.datamodules.sampling import AddressedSampler


class LoaderDataModule(FederatedDataModule):
    """A data module over ready-made loaders; each client's batches come as its own loader gives them.

    Args:
        train: A loader per client id. Its keys are the clients.
        val: A loader per client id; clients may be missing.
        test: A loader per client id; clients may be missing.

    Raises:
        ValueError: If there is no client, or a validation or test loader of a client without a training loader.

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
        """Return the loader that was given, or `None`."""
        return self._loaders[split].get(client)

    def pooled_dataloader(self, split: str) -> DataLoader[Any] | None:
        """Return one loader over the union of the clients' datasets; `None` if there are none.

        It has the first loader's batch size and collate function.
        """
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
        """Return the length of the client's dataset."""
        loader = self._loaders[split].get(client)
        return 0 if loader is None else len(loader.dataset)
