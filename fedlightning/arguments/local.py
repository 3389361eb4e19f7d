"""What runs inside clients (callbacks, loggers, their Trainers' arguments), checked as they are given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ProgressBar,
    StochasticWeightAveraging,
    WeightAveraging,
)

from fedlightning.client.data_summary import DataSummary
from fedlightning.contract import FederatedCallback
from fedlightning.errors import ConfigurationError, warn
from fedlightning.options import Vectorized
from fedlightning.options.lightning_arguments import FORWARDED
from fedlightning.ranges import is_boundless, may_be_infinite


def check_callbacks(arguments: Mapping[str, Any]) -> None:
    """Refuse what is not a callback, and callbacks that have no place inside clients; see also :func:`check_logs`."""
    items = [arguments["callbacks"]] if isinstance(arguments["callbacks"], Callback) else arguments["callbacks"] or []
    if isinstance(items, str | Mapping | type) or not isinstance(items, Iterable):
        raise ConfigurationError(
            f"callbacks={items!r} must be a list of callbacks, as in callbacks=[FedProx(mu=0.1)]. Pass instances, not "
            "classes or names."
        )
    for item in items:
        if not isinstance(item, Callback):
            raise ConfigurationError(
                f"callbacks holds {item!r}, which is not a callback. Pass instances of callbacks, not classes or names."
            )
        if isinstance(item, FederatedCallback):
            _check_numbers(item)
        if isinstance(item, BatchSizeFinder):
            raise ConfigurationError(
                f"{type(item).__name__} would search a batch size in every visit of every client. Set batch_size in the data."
            )
    check_logs(arguments, items)


def _check_numbers(callback: FederatedCallback) -> None:
    """Refuse NaN among a callback's arguments, and infinity where it does not say that it can be, annotated or not."""
    for name, value in callback.hyperparameters().items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if not is_boundless(number):
                continue
            if number != math.inf or not may_be_infinite(type(callback), name):
                raise ConfigurationError(f"{callback.key} has {name}={value}; it must be finite.")


def check_keeping(callbacks: Iterable[Callback], arguments: Mapping[str, Any], optimizer_state: str) -> None:
    """Refuse averages of weights that would go on from visit to visit; say what goes on or begins anew for nothing."""
    epochs = math.inf if arguments["local_steps"] is not None else arguments["local_epochs"] or 1
    for item in callbacks:
        late = {name: number for name, number in _epochs_of(item).items() if number - ("every" in name) >= epochs}
        if late and optimizer_state == "reset" and arguments["max_rounds"] > 1:
            name, number = next(iter(late.items()))
            warn(
                f"{type(item).__name__} has {name}={number}, and epochs begin at 0 in every visit of a client, which has "
                f"{epochs} (optimizer_state='reset'): that one never comes. Set optimizer_state='keep', with which epochs go "
                "on, or count those of a visit."
            )
        if isinstance(item, EarlyStopping):
            warn(
                f"{type(item).__name__} ends visits, and what it has seen of '{item.monitor}' goes on from visit to visit: "
                "once it has stopped a client, each later visit ends after one epoch, unless that is better than the best so "
                "far. FederatedEarlyStopping ends the federation."
            )
        if optimizer_state == "keep" and isinstance(item, StochasticWeightAveraging | WeightAveraging):
            raise ConfigurationError(
                f"{type(item).__name__} averages the weights of one fit, but optimizer_state='keep' makes one fit of all "
                "visits, between which the server's model replaces the weights. Use optimizer_state='reset', or leave it out."
            )


def _epochs_of(callback: Callback) -> dict[str, int]:
    """Return the last epoch that each option of a Lightning callback names."""
    epochs: dict[str, int] = {}
    for name, value in vars(callback).items():
        numbers = [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]
        if "epoch" in name and not name.startswith("_") and numbers:
            epochs[name] = max(numbers)
    return epochs


def ordinary_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return the Lightning callbacks that run inside clients: all but progress bars, of which a visit has none."""
    kept: list[Callback] = []
    for item in callbacks:
        if isinstance(item, ProgressBar):
            warn(f"{type(item).__name__} is left out: one display shows rounds and clients (enable_progress_bar).")
        elif not isinstance(item, FederatedCallback):
            kept.append(item)
    return kept


def check_logs(arguments: Mapping[str, Any], callbacks: Iterable[Callback]) -> None:
    """Refuse logs of clients that have nowhere to go; warn of callbacks that only log, without logs."""
    asked = arguments["log_clients"]
    if asked and not arguments["logger"]:
        raise ConfigurationError(
            f"log_clients={asked!r}, but logger={arguments['logger']!r}: there is no logger to write to. Use logger=True."
        )
    if asked and isinstance(arguments["engine"], Vectorized):
        raise ConfigurationError(
            f"log_clients={asked!r}, but engine='vectorized' trains clients as one stack, whose steps are not logged. Use "
            "engine='sequential' or 'processes'."
        )
    loud = [type(item).__name__ for item in callbacks if isinstance(item, LearningRateMonitor | DeviceStatsMonitor)]
    if loud and not asked:
        warn(f"{loud[0]} logs inside clients, and their logs are off. log_clients=True writes them to the loggers.")


def logged_clients(asked: bool | Iterable[str | int], data: DataSummary) -> bool | list[str]:
    """Return `log_clients` with the clients by name."""
    if isinstance(asked, bool):
        return asked
    names = [str(client) for client in asked]
    unknown = [name for name in names if name not in data.client_ids]
    if unknown:
        raise ConfigurationError(
            f"log_clients holds '{unknown[0]}', which is not a client. They are {list(data.client_ids)[:20]}."
        )
    return names


def local_trainer_arguments(arguments: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return the arguments of the clients' Lightning Trainers."""
    out = {name: arguments[name] for name in FORWARDED if arguments[name] is not None}
    out["check_val_every_n_epoch"] = arguments["check_val_every_n_epoch"]
    if arguments["check_val_every_n_epoch"] is None:
        out.pop("check_val_every_n_epoch")
    if arguments["fast_dev_run"]:
        out |= {f"limit_{split}_batches": 1 for split in ("train", "val", "test", "predict")}
    if folder is not None:
        out["default_root_dir"] = str(folder)
    return out
