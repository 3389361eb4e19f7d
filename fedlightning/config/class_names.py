"""Names in configurations: classes without their package, and options of the trainer."""

from __future__ import annotations

import inspect
from functools import cache

import fedlightning.callbacks
import fedlightning.datamodules
import fedlightning.models

# isort: split
from lightning.pytorch import Callback, LightningDataModule
from torch import nn

from fedlightning.catalogue import installed
from fedlightning.datamodules import Partitioner
from fedlightning.errors import warn
from fedlightning.trainer import FederatedTrainer


@cache
def class_names() -> dict[str, str]:
    """Return the classes that can be named without their package: short name -> full path.

    Algorithms of other packages are included, and imported, because jsonargparse finds only classes that are loaded.

    Example:
        >>> class_names()["FedProx"]
        'fedlightning.callbacks.FedProx'
    """
    paths = {}
    for package, kind in (
        (fedlightning.callbacks, Callback),
        (fedlightning.datamodules, LightningDataModule),
        (fedlightning.datamodules, Partitioner),
        (fedlightning.models, nn.Module),
    ):
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value) and issubclass(value, kind) and not inspect.isabstract(value):
                paths[name] = f"{package.__name__}.{name}"
    for row in installed():
        try:
            row.load()
        except Exception as error:  # whatever another package's import may raise
            warn(f"{row.name} cannot be used: {row.class_path} cannot be loaded ({type(error).__name__}: {error}).")
        else:
            paths.setdefault(row.name, row.class_path)
    return paths


def trainer_options() -> list[str]:
    """Return the trainer's arguments."""
    return list(inspect.signature(FederatedTrainer).parameters)


def option_names() -> list[str]:
    """Return all options of `fit`, for suggestions."""
    trainer = [f"--trainer.{name}" for name in trainer_options()]
    options = (
        "config",
        "resume",
        "test_after_fit",
        "allow_config_change",
        "allow_new_clients",
        "dry_run",
        "watch",
        "run",
        "checkpoint",
        "out",
        "print_config",
    )
    return [*(f"--{name}" for name in options), *trainer]
