"""The same configuration trained once more, on other samples: what shadow runs and audits are made of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset

from fedlightning.client.probes import sample_losses
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.trainer import FederatedTrainer


def with_samples(whole: FederatedDataModule, train: Mapping[str, Any]) -> LoaderDataModule:
    """Return the data of a run with other training samples.

    Args:
        whole: The run's data module.
        train: A training loader of each client; clients may be more than the run's.
    """
    val, test = (
        {
            client: loader
            for client in whole.client_ids
            if client in train and (loader := whole.client_dataloader(client, split))
        }
        for split in ("val", "test")
    )
    return LoaderDataModule(train, val, test, whole.public_dataloader())


def pool_of(data: FederatedDataModule, client: str, splits: Sequence[str] = ("train", "test")) -> ConcatDataset[Any]:
    """Return all samples of a client, split after split.

    Raises:
        ValueError: If a split has none, or samples without positions.
    """
    datasets: list[Any] = []
    for split in splits:
        loader: Any = data.client_dataloader(client, split)
        if loader is None or not hasattr(loader.dataset, "__getitem__") or not len(loader.dataset):
            raise ValueError(f"client '{client}' has no {split} samples with positions")
        datasets.append(loader.dataset)
    return ConcatDataset(datasets)


def losses_of(
    module: LightningModule, data: FederatedDataModule, client: str, samples: Any, seed: int, *address: str
) -> Tensor:
    """Return the loss of each of some samples, collated as a client's training data are."""
    original: Any = data.client_dataloader(client, "train")
    loader: DataLoader[Any] = DataLoader(samples, batch_size=64, collate_fn=original.collate_fn)
    return sample_losses(module, loader, Precision(), seed, *address)


def loader_like(data: FederatedDataModule, client: str, dataset: Any, positions: Sequence[int] | None = None) -> Any:
    """Return a training loader as the client's own, over other samples.

    Raises:
        ValueError: If the client's own makes its batches in a way that cannot be copied.
    """
    original = data.client_dataloader(client, "train")
    if original is None or original.batch_size is None:
        raise ValueError(f"the training loader of client '{client}' makes batches of its own")
    few = dataset if positions is None else Subset(dataset, list(positions))
    return DataLoader(
        few,
        batch_size=original.batch_size,
        shuffle=len(few) > 0,
        collate_fn=original.collate_fn,
        drop_last=original.drop_last,
    )


def trained_again(
    trainer: FederatedTrainer, data: FederatedDataModule, train: Mapping[str, Any], folder: Path, seed: int
) -> FederatedTrainer:
    """Train the run's model by its configuration on other samples, in a folder of its own.

    What such a run spends of a privacy budget is noted in no ledger: its models are not to be given away.

    Args:
        trainer: The trainer of the run.
        data: Its data.
        train: A training loader of each client.
        folder: Where it writes.
        seed: Of the training.
    """
    model = trainer.inputs[0]
    if model is None:
        raise ValueError("this run's model is not known here")
    callbacks = copy.deepcopy(trainer.arguments["callbacks"])
    for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        if getattr(callback, "ledger", None) is not None:
            callback.ledger = None
    changes: dict[str, Any] = {
        "default_root_dir": folder,
        "name": "again",
        "version": f"seed_{seed}",
        "logger": False,
        "seed": seed,
        "enable_progress_bar": False,
        "save_state": 0,
        "max_time": None,
        "log_clients": False,
        # a canary that is not there has no samples
        "failures": replace(trainer.arguments["failures"], on_error="skip", retries=1, min_clients=1),
    }
    shadow: Any = type(trainer)(**{**trainer.arguments, **changes, "callbacks": callbacks})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself has said what there is to say
        shadow.fit(copy.deepcopy(model), datamodule=with_samples(data, train))
    fitted: FederatedTrainer = shadow
    return fitted
