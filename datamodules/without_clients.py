"""A data module of a process in which there are no clients: :class:`WithoutClients`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

from fedlightning.datamodules.base import FederatedDataModule


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
