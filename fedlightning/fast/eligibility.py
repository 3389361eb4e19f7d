"""Reasons against the fast loop, as sentences.

It refuses all that it cannot prove equal to Lightning's Trainer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import BatchSizeFinder, Checkpoint, LearningRateFinder, ProgressBar, Timer
from lightning.pytorch.callbacks import StochasticWeightAveraging as SWA
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.parsing import is_picklable
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, IterableDataset

from fedlightning.client.settings import limited
from fedlightning.fast.hooks import of_module, per_class
from fedlightning.options.lightning_arguments import FORWARDED

KNOWN_ARGUMENTS = frozenset((*FORWARDED, "default_root_dir"))
PRECISIONS = (Precision, MixedPrecision, DoublePrecision, HalfPrecision)
STEER_THE_LOOP = (Checkpoint, ProgressBar, BatchSizeFinder, LearningRateFinder, SWA, Timer)
NOT_CALLED = ("log", "configure_callbacks", "configure_sharded_model", "toggle_optimizer", "manual_backward")
"""Methods of a LightningModule that the fast loop, or Lightning on its behalf, would bypass if overridden."""


def of_run(arguments: Mapping[str, Any], callbacks: Iterable[Callback], base: Trainer) -> str | None:
    """Return the reason why no visit of a run can use the fast loop, or `None` if there is none."""
    unknown = sorted(arguments.keys() - KNOWN_ARGUMENTS)
    if unknown:
        return f"it does not know the Trainer argument {unknown[0]}"
    strategy, devices = arguments.get("strategy", "auto"), arguments.get("devices", "auto")
    if strategy not in ("auto", "single_device") or arguments.get("num_nodes", 1) != 1:
        return f"it works on one device, and strategy is {strategy!r}"
    on_cpu = type(base.accelerator) is CPUAccelerator
    if not (devices in (1, "1") or (devices == "auto" and on_cpu)):
        return f"it works on one device, and devices is {devices!r}"
    if type(base.strategy) is not SingleDeviceStrategy or not (on_cpu or type(base.accelerator) is CUDAAccelerator):
        return f"it works on one CPU or CUDA device, not on {type(base.accelerator).__name__}"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "this process is one of several that train together"
    if type(base.precision_plugin) not in PRECISIONS:
        return f"it does not know the precision plugin {type(base.precision_plugin).__name__}"
    plugins = arguments.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list | tuple) else [plugins]:
        if type(plugin) not in PRECISIONS:
            return f"it does not know the plugin {type(plugin).__name__}"
    for name, neutral in (("overfit_batches", 0), ("reload_dataloaders_every_n_epochs", 0)):
        if arguments.get(name, neutral) != neutral:
            return f"{name}={arguments[name]!r} is for Lightning's own loop"
    if arguments.get("profiler") is not None:  # `base` has none
        return f"profiler={arguments['profiler']!r} measures Lightning's own loop"
    if arguments.get("check_val_every_n_epoch") is not None:
        return "check_val_every_n_epoch asks for validation inside local training"
    if len(getattr(base, "callbacks", [])) > 1 or os.environ.get("PL_SEED_WORKERS", "0") not in ("", "0"):
        return "the environment adds callbacks or worker seeds to every Trainer"
    for callback in callbacks:
        if isinstance(callback, STEER_THE_LOOP):
            return f"the callback {type(callback).__name__} steers Lightning's own loop"
    return None


def of_visit(module: LightningModule, loader: Any, limit: int | float | None, keeps: bool) -> str | None:
    """Return the reason why a fit cannot use the fast loop, or `None` if there is none."""
    if keeps:
        return "optimizer_state='keep' is restored by Lightning's own checkpoint"
    if set(vars(module)) & {"log", "log_dict", "training_step"}:
        return f"a method of {type(module).__name__} is set on the instance"
    return of_loader(loader, limit) or of_class(type(module)) or of_hyperparameters(module)


def of_loader(loader: Any, limit: int | float | None) -> str | None:
    """Return the reason why the fast loop cannot iterate a loader, or `None` if there is none."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return f"it needs a torch DataLoader over a map-style dataset, not {type(loader).__name__}"
    return "there is no batch" if num_batches(loader, limit) == 0 else None


@per_class
def of_class(kind: type[LightningModule]) -> str | None:
    """Return the reason why modules of a class cannot use the fast loop, or `None` if there is none."""
    for name in NOT_CALLED:
        if name in of_module(kind):
            return f"{kind.__name__} overrides {name}"
    for name in ("dataloader_iter", "optimizer_idx"):
        if is_param_in_hook_signature(kind.training_step, name, explicit=True):
            return f"{kind.__name__}.training_step takes {name}"
    return None


def of_hyperparameters(module: LightningModule) -> str | None:
    """Return a hyper-parameter that cannot be pickled, as a reason. Lightning drops such ones when a fit starts."""
    for name, value in module.hparams.items():
        if type(value) not in (int, float, str, bool, type(None)) and not is_picklable(value):
            return f"the hyper-parameter {name} of {type(module).__name__} cannot be pickled"
    return None


def num_batches(loader: DataLoader[Any], limit: int | float | None) -> int:
    """Return the batches of an epoch under a limit, in the form of `limit_train_batches`."""
    return limited(len(loader), limit)
