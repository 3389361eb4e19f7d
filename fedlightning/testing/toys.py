"""A small federation with every kind of state entry, for checks of algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.contract import POOLED, FederatedCallback
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.trainer import FederatedTrainer

FEATURES, CLASSES, WIDTH = 6, 3, 8
SIZES = (12, 7, 10, 15)
"""Training samples of the clients of toy data."""


class ToyModule(LightningModule):
    """A classifier of two layers and a head.

    Args:
        full: Add every kind of entry that algorithms may fail at: batch normalisation, a frozen parameter, a parameter
            tied under two names, and an integer buffer.
        lr: Learning rate of plain SGD.

    Shapes:
        x: `(batch, 6)`.
        logits: `(batch, 3)`.

    Example:
        >>> ToyModule()(torch.zeros(2, 6)).shape
        torch.Size([2, 3])
    """

    def __init__(self, full: bool = False, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH) if full else nn.Tanh(), nn.Tanh())
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.full = full
        if full:
            self.again = nn.Linear(WIDTH, WIDTH)
            self.again.weight = self.middle.weight
            self.scale = nn.Parameter(torch.full((1,), 0.7), requires_grad=False)
            self.register_buffer("code", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        features = torch.tanh(self.middle(self.body(x)))
        if self.full:
            features = self.scale * torch.tanh(self.again(features)) + features
        logits: Tensor = self.head(features)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross entropy."""
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD, which every algorithm accepts."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ToyData(FederatedDataModule):
    """Skewed random data of a few clients, in batches of 5.

    Args:
        sizes: Number of training samples of each client; each has 6 validation samples.
        identical: Give every client the same samples, in the same fixed order.
        nan: Name of a client whose features are NaN.
        listed: Order in which clients are listed. `None` uses the order of their names.
        names: Names of the clients. `None`: `site0`, `site1`, ...

    Example:
        >>> data = ToyData(sizes=(12, 7))
        >>> data.client_ids, data.num_samples("site1")
        (['site0', 'site1'], 7)
    """

    def __init__(
        self,
        sizes: Sequence[int] = SIZES,
        identical: bool = False,
        nan: str | None = None,
        listed: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.identical = identical
        self.batch_size = 5
        self.names = list(names or [f"site{index}" for index in range(len(sizes))])
        self.listed = list(listed or self.names)
        self.data: dict[tuple[str, str], TensorDataset] = {}
        for index, (name, size) in enumerate(zip(self.names, sizes, strict=True)):
            for offset, split in enumerate(("train", "val")):
                draw = torch.Generator().manual_seed(10 * (0 if identical else index) + offset)
                count = size if split == "train" else 6
                x = torch.randn(count, FEATURES, generator=draw) + 0.3 * (0 if identical else index)
                y = (x[:, 0] + 0.5 * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
                self.data[name, split] = TensorDataset(x * float("nan") if name == nan else x, y)

    @property
    def client_ids(self) -> list[str]:
        """Ids of the clients, in the order given."""
        return self.listed

    @property
    def num_classes(self) -> int:
        """Number of classes (3)."""
        return CLASSES

    def client_dataloader(self, client: str, split: str) -> DataLoader[Any] | None:
        """Return batches of 5 of a client's split."""
        dataset = self.data.get((client, split))
        return None if dataset is None else self._loader(dataset, client, split)

    def pooled_dataloader(self, split: str) -> DataLoader[Any] | None:
        """Return batches of 5 of the union of all clients' splits."""
        parts = [self.data[name, split] for name in self.names if (name, split) in self.data]
        if not parts:
            return None
        joined = TensorDataset(*(torch.cat([part.tensors[k] for part in parts]) for k in range(2)))
        return self._loader(joined, POOLED, split)

    def public_dataloader(self) -> DataLoader[Any]:
        """Return batches of 5 of ten public samples, which no client holds."""
        draw = torch.Generator().manual_seed(1000)
        x = torch.randn(10, FEATURES, generator=draw)
        y = (x[:, 0] + 0.5 * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size)

    def num_samples(self, client: str, split: str = "train") -> int:
        """Return the number of samples of a client's split."""
        return len(self.data[client, split]) if (client, split) in self.data else 0

    def class_counts(self, client: str, split: str = "train") -> list[int] | None:
        """Return the number of samples of each class, or `None` if there is no such split."""
        samples = self.data.get((client, split))
        return None if samples is None else torch.bincount(samples.tensors[1], minlength=CLASSES).tolist()

    def _loader(self, dataset: TensorDataset, client: str, split: str) -> DataLoader[Any]:
        sampler = AddressedSampler(len(dataset), client, shuffle=split == "train" and not self.identical)
        return DataLoader(dataset, batch_size=self.batch_size, sampler=sampler, generator=sampler.generator)


def federate(
    algorithm: FederatedCallback | None,
    data: FederatedDataModule,
    root: Path | None,
    *,
    full: bool = False,
    lr: float = 0.1,
    resume: bool | Literal["join"] = False,
    others: Sequence[Callback] = (),
    batch_size: int | None = None,
    **arguments: Any,
) -> FederatedTrainer:
    """Run a small federation of :class:`ToyModule` without output, and return its trainer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = ToyModule(full=full, lr=lr)
    if batch_size is not None and isinstance(data, ToyData):
        data.batch_size = batch_size
    callbacks: list[Callback] = [] if algorithm is None else [algorithm]
    defaults: dict[str, Any] = {"max_rounds": 3, "evaluation": 0, "save_state": 0, "local_steps": 3}
    trainer = FederatedTrainer(
        callbacks=[*callbacks, *others],
        default_root_dir=root or "unused",
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
        **defaults | arguments,
    )
    if root is None:  # to write the final models takes a quarter of a small run's time
        trainer.arguments = {**trainer.arguments, "default_root_dir": None}
    trainer.fit(module, data, resume="last" if resume else None, allow_new_clients=resume == "join")
    return trainer
