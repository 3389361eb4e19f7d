"""Public data without clients: what a server has whose clients' data are at their sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.groups import content_hash
from fedlightning.datamodules.held_out import WithoutClients
from fedlightning.datamodules.public import has_positions
from fedlightning.datamodules.public_from_another import Another, another, is_data_set, loader_of
from fedlightning.ranges import PositiveInt, checked


class PublicDataModule(WithoutClients):
    """Public data and no clients: the `data` section of ``fedlightning serve`` for methods with public data.

    The server reads them there; each site has the same data set as `public` of its own data module, with the same batch size
    and labels. Who asks for clients' data is refused.

    Args:
        public: A map-style Dataset, or a LightningDataModule of which the training data are taken.
        batch_size: Samples of a batch of a plain Dataset; that of a data module is its own.
        seed: Seed of what a data module draws in its `setup`: that of the sites' data modules.
        public_labels: Whether batches keep their labels.
        collate_fn: Makes a batch of samples of a plain Dataset. `None`: as torch does.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules import PublicDataModule
        >>> data = PublicDataModule(TensorDataset(torch.arange(5.0)), batch_size=2)
        >>> data.setup()
        >>> [x.tolist() for [x] in data.public_dataloader()]
        [[0.0, 1.0], [2.0, 3.0], [4.0]]
        >>> data
        <PublicDataModule: 5 public samples>
    """

    @checked
    def __init__(
        self,
        public: Dataset[Any] | LightningDataModule,
        batch_size: PositiveInt = 32,
        seed: int = 0,
        public_labels: bool = True,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not is_data_set(public) or isinstance(public, str):
            raise ValueError(f"{name} got public={public!r:.60}; give a map-style Dataset or a LightningDataModule.")
        self.public, self.batch_size, self.seed = public, int(batch_size), int(seed)
        self.public_labels, self.collate_fn = bool(public_labels), collate_fn
        self._public_set: Another | None = None

    def __repr__(self) -> str:
        """Return the class, and how many samples there are once that is known."""
        size = "not set up" if self._public_set is None else f"{len(self._public_set.positions)} public samples"
        return f"<{type(self).__name__}: {size}>"

    def setup(self, stage: str | None = None) -> None:
        """Read the data at the first call (Lightning's hook)."""
        if self._public_set is None:
            options = {"batch_size": self.batch_size, "collate_fn": self.collate_fn}
            self._public_set = another(self, self.public, options, {}, self.seed)
            self._public_set.checked = False  # there are no clients here to compare with

    def public_dataloader(self) -> DataLoader[Any] | None:
        if self._public_set is None:
            return None
        public_set = self._public_set
        return loader_of(public_set.dataset, public_set.positions, public_set.options, self.seed, self.public_labels)

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} has public data and no clients: it is for a server whose clients are at sites "
            "(fedlightning serve). To train in one process, give the clients' data module, with public=... as its argument."
        )


def public_facts(data: FederatedDataModule) -> dict[str, Any] | None:
    """Return by what public data are compared between machines: number, batch size, a hash; `None` without any.

    The hash is `None` where the samples cannot be compared: no tensors, or others at every look.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from fedlightning.datamodules.public_only import PublicDataModule, public_facts
        >>> data = PublicDataModule(TensorDataset(torch.arange(5.0)), batch_size=2)
        >>> data.setup()
        >>> public_facts(data)
        {'samples': 5, 'batch_size': 2, 'content': '...'}
    """
    loader: Any = data.public_dataloader()
    if loader is None:
        return None
    if not has_positions(loader):
        return {"samples": None, "batch_size": getattr(loader, "batch_size", None), "content": None}
    return {"samples": len(loader.dataset), "batch_size": loader.batch_size, "content": public_content(loader)}


def public_content(loader: Any) -> str | None:
    """Return a hash of what a loader's dataset holds; `None` if it has none, or cannot be compared."""
    if not has_positions(loader):
        return None
    try:
        return content_hash(loader.dataset, loader.collate_fn)
    except Exception:  # of the user's dataset, which the run itself will show
        return None
