"""The trainer's arguments, checked at the door: every refusal names the thing, the value, the rule and the way out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    LearningRateMonitor,
    ProgressBar,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.blueprint.module_check import check_module
from fedlightning.blueprint.trainer_arguments import FORWARDED, check_forwarded
from fedlightning.compat.pytorch_lightning import adapt
from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.errors import ConfigurationError, warn
from fedlightning.federation.failures import FailurePolicy
from fedlightning.hooks import POOLED, FederatedCallback
from fedlightning.run.manifest import is_file_name
from fedlightning.scoring.tasks import LOCAL

if TYPE_CHECKING:
    from fedlightning.run.folder import RunFolder

REPLACED = {
    "max_epochs": "max_rounds and local_epochs",
    "min_epochs": "local_epochs",
    "max_steps": "max_rounds and local_steps",
    "min_steps": "local_steps",
    "enable_checkpointing": "save_state (resume) and the callbacks LocalCheckpoint and GlobalCheckpoint (selection)",
}
CHOICES = {
    "optimizer_state": (None, "reset", "keep"),
    "float_buffers": ("average", "local", "server"),
    "local_loop": ("auto", "trainer", "fast"),
    "engine": ("sequential", "processes", "vectorized"),
    "on_client_error": ("skip", "retry", "stop"),
}
STAGES = ("G", "L1", "L2")


def check(given: Mapping[str, Any]) -> None:
    """Refuse arguments that contradict each other or are out of range.

    Raises:
        ConfigurationError: With a sentence.
    """
    adapt(given["callbacks"], given["logger"])
    for name, instead in REPLACED.items():
        if given[name] is not None:
            raise ConfigurationError(f"{name}={given[name]!r} has no meaning in a federation. Use {instead}.")
    check_place(given["name"], given["version"])
    if given["local_epochs"] is not None and given["local_steps"] is not None:
        raise ConfigurationError(
            f"local_epochs={given['local_epochs']} and local_steps={given['local_steps']} are both set. "
            "A visit is counted in epochs or in steps: remove one of them."
        )
    for name in ("max_rounds", "local_epochs", "local_steps"):
        value = given[name]
        if (value is not None or name == "max_rounds") and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            raise ConfigurationError(f"{name}={value!r} must be a whole number of at least 1.")
    for name in ("evaluate_every", "save_state"):
        if not isinstance(given[name], int) or isinstance(given[name], bool) or given[name] < 0:
            raise ConfigurationError(f"{name}={given[name]!r} must be a whole number; 0 switches it off.")
    _check_kinds(given)
    memory = given["client_memory_gb"]
    known_type = isinstance(memory, int | float) and not isinstance(memory, bool)
    if memory is not None and not (known_type and 0 <= memory < math.inf):
        raise ConfigurationError(
            f"client_memory_gb={memory!r} must be a number of gigabytes; 0 keeps all but one on disk."
        )
    share = given["participation"]
    known_type = isinstance(share, int | float) and not isinstance(share, bool)
    if not known_type or not share > 0 or (isinstance(share, float) and share > 1.0):
        raise ConfigurationError(
            f"participation={share!r} must be a share in (0, 1] (a float) or a number of clients (an int of at least 1)."
        )
    if known_type and isinstance(share, int) and share == 1:
        warn("participation=1 is one client a round. All clients are participation=1.0.")
    if (
        not isinstance(given["lr_decay"], int | float)
        or isinstance(given["lr_decay"], bool)
        or not 0.0 < given["lr_decay"] <= 10.0
    ):
        raise ConfigurationError(f"lr_decay={given['lr_decay']!r} must be a positive factor per round, such as 0.99.")
    for name, allowed in CHOICES.items():
        if not isinstance(given[name], str | None) or given[name] not in allowed:
            raise ConfigurationError(f"{name}={given[name]!r} is unknown. Choose one of {list(allowed)}.")
    check_engine(given)
    check_failures(given)
    for name, known in (
        ("stages", STAGES),
        ("evaluate_data", (LOCAL, POOLED)),
        ("test_data", (LOCAL, POOLED, "clients")),
    ):
        if isinstance(given[name], str) or not isinstance(given[name], Iterable | None):
            raise ConfigurationError(
                f"{name}={given[name]!r} must be a list, as in {name}=[{known[0]!r}]. Known: {list(known)}."
            )
        unknown = [value for value in given[name] or () if value not in known]
        if unknown:
            raise ConfigurationError(f"{name} holds {unknown[0]!r}. Known: {list(known)}.")
    check_forwarded(given)
    items = [given["callbacks"]] if isinstance(given["callbacks"], Callback) else given["callbacks"] or []
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
    check_logs(given, items)


def check_keeping(callbacks: Iterable[Callback], optimizer_state: str) -> None:
    """Refuse averages of weights that would go on from visit to visit: they bring a client's old weights back.

    Raises:
        ConfigurationError: Naming the callback.
    """
    for item in callbacks:
        if optimizer_state == "keep" and isinstance(item, StochasticWeightAveraging | WeightAveraging):
            raise ConfigurationError(
                f"{type(item).__name__} averages the weights of one fit, but optimizer_state='keep' makes one fit of all "
                "visits, between which the server's model replaces the weights. Use optimizer_state='reset', or leave it out."
            )


def ordinary_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return the Lightning callbacks that run inside clients: all but progress bars, of which a visit has none."""
    kept: list[Callback] = []
    for item in callbacks:
        if isinstance(item, ProgressBar):
            warn(f"{type(item).__name__} is left out: one display shows rounds and clients (enable_progress_bar).")
        elif not isinstance(item, FederatedCallback):
            kept.append(item)
    return kept


def check_logs(given: Mapping[str, Any], callbacks: Iterable[Callback]) -> None:
    """Refuse logs of clients that have nowhere to go; warn of callbacks that only log, without logs.

    Raises:
        ConfigurationError: With a sentence.
    """
    asked = given["log_clients"]
    if not isinstance(asked, bool | list | tuple):
        raise ConfigurationError(f"log_clients={asked!r} must be true, false or a list of clients.")
    if asked and not given["logger"]:
        raise ConfigurationError(
            f"log_clients={asked!r}, but logger={given['logger']!r}: there is no logger to write to. Use logger=True."
        )
    if asked and given["engine"] == "vectorized":
        raise ConfigurationError(
            f"log_clients={asked!r}, but engine='vectorized' trains clients as one stack, whose steps are not logged. Use "
            "engine='sequential' or 'processes'."
        )
    loud = [type(item).__name__ for item in callbacks if isinstance(item, LearningRateMonitor | DeviceStatsMonitor)]
    if loud and not asked:
        warn(f"{loud[0]} logs inside clients, and their logs are off. log_clients=True writes them to the loggers.")


def logged_clients(asked: bool | Iterable[str | int], data: FederatedDataModule) -> bool | list[str]:
    """Return `log_clients` with the clients by name.

    Raises:
        ConfigurationError: If there is no such client.
    """
    if isinstance(asked, bool):
        return asked
    names = [str(client) for client in asked]
    unknown = [name for name in names if name not in data.client_ids]
    if unknown:
        raise ConfigurationError(
            f"log_clients holds '{unknown[0]}', which is no client. They are {list(data.client_ids)[:20]}."
        )
    return names


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Refuse names, folders and switches that are of another kind.

    Raises:
        ConfigurationError: With a sentence.
    """
    if not isinstance(given["seed"], int) or isinstance(given["seed"], bool):
        raise ConfigurationError(f"seed={given['seed']!r} must be a whole number.")
    if not isinstance(given["default_root_dir"], str | Path):
        raise ConfigurationError(f"default_root_dir={given['default_root_dir']!r} must be the path of a folder.")
    for name in ("enable_progress_bar", "fast_dev_run", "sanity_check"):
        if not isinstance(given[name], bool | None):
            raise ConfigurationError(f"{name}={given[name]!r} must be True or False.")
    if not isinstance(given["logger"], bool | None | Logger | Iterable) or isinstance(given["logger"], str | Mapping):
        raise ConfigurationError(
            f"logger={given['logger']!r} is no logger. Pass True, False or instances such as CSVLogger('logs')."
        )


def _check_numbers(callback: FederatedCallback) -> None:
    """Refuse NaN among a callback's arguments, and infinity where it does not say that it can be.

    Raises:
        ConfigurationError: Naming the argument.
    """
    for name, value in callback.hyperparameters().items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(number, float) or math.isfinite(number):
                continue
            if math.isnan(number) or name not in callback.infinite_arguments:
                raise ConfigurationError(f"{callback.key} has {name}={value}; it must be finite.")


LONGEST = 255
"""Bytes of a folder's name that file systems take."""


def check_place(name: Any, version: Any) -> None:
    """Refuse a name or version that would put the run anywhere but below `default_root_dir`.

    Raises:
        ConfigurationError: With a sentence.
    """
    if not isinstance(name, str) or not all(is_file_name(part) for part in name.split("/")):
        raise ConfigurationError(
            f"name={name!r} must be the name of a folder below default_root_dir, such as 'fedprox' or 'study/fedprox'. To "
            "put runs somewhere else set default_root_dir."
        )
    if version is not None and not is_file_name(version):
        raise ConfigurationError(
            f"version={version!r} must be the name of one folder, such as 'seed_1', without separators."
        )
    for what, place in (("name", name), ("version", version or "")):
        if not place.isprintable() or any(len(part.encode()) > LONGEST for part in place.split("/")):
            raise ConfigurationError(
                f"{what}={place!r:.80} cannot name a folder: it is longer than {LONGEST} bytes or holds characters that "
                "cannot be printed, such as line breaks. Choose a shorter, plain one."
            )


def check_engine(given: Mapping[str, Any]) -> None:
    """Refuse options of another engine, and what worker processes cannot do.

    Raises:
        ConfigurationError: With a sentence.
    """
    workers, devices, strategy = given["workers"], given["devices"], given["strategy"]
    stack = given["clients_per_stack"]
    if stack is not None and (not isinstance(stack, int) or isinstance(stack, bool) or stack < 1):
        raise ConfigurationError(f"clients_per_stack={stack!r} must be a whole number of at least 1, or None.")
    if stack is not None and given["engine"] != "vectorized":
        raise ConfigurationError(
            f"clients_per_stack={stack} means nothing to engine={given['engine']!r}. Use engine='vectorized', or leave it "
            "out."
        )
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise ConfigurationError(f"workers={workers!r} must be a whole number of at least 1, or None for every core.")
    if given["engine"] != "processes":
        if workers is not None:
            raise ConfigurationError(
                f"workers={workers} means nothing to engine={given['engine']!r}. Use engine='processes', or leave it out."
            )
        return
    if given["num_nodes"] != 1:
        raise ConfigurationError(
            f"num_nodes={given['num_nodes']}, but the workers of engine='processes' are on one machine. Leave it out."
        )
    if devices not in (1, "1", "auto") and not (isinstance(devices, list) and len(devices) == 1):
        raise ConfigurationError(
            f"devices={devices!r} shares one client among devices; engine='processes' trains each client on one device, "
            "several clients at once. Use devices=1 and workers=..., or engine='sequential'."
        )
    if strategy != "auto":
        raise ConfigurationError(
            f"strategy={strategy!r} may share one client among processes; engine='processes' trains each client in one. "
            "Leave it out, or use engine='sequential'."
        )


def check_failures(given: Mapping[str, Any]) -> None:
    """Refuse options about failing clients that are out of range, or mean nothing.

    Raises:
        ConfigurationError: With a sentence.
    """
    retries, least, timeout = given["client_retries"], given["min_clients"], given["client_timeout"]
    if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 1):
        raise ConfigurationError(f"client_retries={retries!r} must be a whole number of at least 1, or None.")
    if retries is not None and given["on_client_error"] != "retry":
        raise ConfigurationError(
            f"client_retries={retries} means nothing to on_client_error={given['on_client_error']!r}. Use "
            "on_client_error='retry', or leave it out."
        )
    number = isinstance(least, int | float) and not isinstance(least, bool)
    if not number or not least > 0 or (isinstance(least, float) and least > 1.0):
        raise ConfigurationError(
            f"min_clients={least!r} must be a number of clients (an int of at least 1) or a share in (0, 1] (a float)."
        )
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (number and 0 < timeout < math.inf):
        raise ConfigurationError(f"client_timeout={timeout!r} must be a positive number of seconds, or None.")


def failure_policy(given: Mapping[str, Any]) -> FailurePolicy:
    """Return what becomes of clients that fail."""
    return FailurePolicy(
        on_error=given["on_client_error"],
        retries=given["client_retries"] or 1,
        min_clients=given["min_clients"],
        timeout=given["client_timeout"],
    )


def parse_time(value: str | timedelta | Mapping[str, int] | None) -> timedelta | None:
    """Return `max_time`, given in any of Lightning's three forms.

    Raises:
        ConfigurationError: For what is no time, or none that passes.
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        return _not_negative(value, value)
    if isinstance(value, Mapping):
        try:
            found = timedelta(**value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"max_time={dict(value)!r} is not a time ({error}). Use {{'hours': 1}}."
            ) from error
        return _not_negative(found, value)
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise ConfigurationError(f"max_time={value!r} is not of the form 'DD:HH:MM:SS'. One hour is '00:01:00:00'.")
    days, hours, minutes, seconds = map(int, parts)
    return _not_negative(timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds), value)


def _not_negative(time: timedelta, given: Any) -> timedelta:
    if time < timedelta(0) or given == {}:
        raise ConfigurationError(f"max_time={given!r} is no time. One hour is '00:01:00:00'.")
    return time


def local_trainer(given: Mapping[str, Any], run: RunFolder | None) -> dict[str, Any]:
    """Return the arguments of the clients' Lightning Trainers."""
    out = {name: given[name] for name in FORWARDED if given[name] is not None}
    out["check_val_every_n_epoch"] = given["check_val_every_n_epoch"]
    if given["check_val_every_n_epoch"] is None:
        out.pop("check_val_every_n_epoch")
    if given["fast_dev_run"]:
        out |= {f"limit_{split}_batches": 1 for split in ("train", "val", "test", "predict")}
    if run is not None:
        out["default_root_dir"] = str(run.path)
    return out


def check_model(model: Any) -> LightningModule:
    """Return a LightningModule instance, or refuse. One of `pytorch_lightning` is made one of `lightning.pytorch`.

    Raises:
        ConfigurationError: With a sentence.
    """
    adapt(model)
    if isinstance(model, LightningModule):
        check_module(model)
        return model
    if model is None:
        raise ConfigurationError("There is no model to train. Pass a LightningModule: fit(MyModule(), datamodule).")
    if isinstance(model, type) and issubclass(model, LightningModule):
        raise ConfigurationError(f"fit() got the class {model.__name__}, not an instance. Pass {model.__name__}(...).")
    raise ConfigurationError(
        f"fit() got a {type(model).__name__} as model. Pass a LightningModule: it says how to train and what to optimise."
    )


def check_prediction_data(found: Any, client: str | None) -> None:
    """Refuse to predict on what holds no batches.

    Args:
        found: What is to be predicted on; `None` if there are no test data.
        client: The client whose test data were asked for, if any.

    Raises:
        ConfigurationError: With a sentence.
    """
    way = "Pass a DataLoader: predict(DataLoader(dataset, batch_size=64), client='a')."
    if found is None:
        whose = "The federation has" if client is None else f"Client '{client}' has"
        raise ConfigurationError(f"{whose} no test data to predict on. {way}")
    if isinstance(found, LightningModule):
        raise ConfigurationError(
            f"predict() uses the models that fit() trained, and got a {type(found).__name__}. {way}"
        )
    batches = isinstance(found, LightningDataModule) or (
        hasattr(found, "__iter__") and not isinstance(found, str | bytes)
    )
    if not batches:
        raise ConfigurationError(f"predict() got a {type(found).__name__}, which gives no batches. {way}")


def federated_data(
    datamodule: LightningDataModule | None,
    train: Mapping[str, Any] | None,
    val: Mapping[str, Any] | None,
    test: Mapping[str, Any] | None,
) -> FederatedDataModule:
    """Return the data of a fit, from a federated data module or from loaders by client.

    Raises:
        ConfigurationError: If there is none, or one that does not know clients.
    """
    adapt(datamodule, getattr(datamodule, "datamodule", None))
    if datamodule is not None and train is not None:
        raise ConfigurationError("fit() got a datamodule and train_dataloaders. Pass one of them.")
    if datamodule is not None and (val is not None or test is not None):
        name = "val_dataloaders" if val is not None else "test_dataloaders"
        raise ConfigurationError(f"fit() got a datamodule and {name}. The datamodule has its own: leave {name} out.")
    if train is not None:
        for name, loaders in (("train", train), ("val", val), ("test", test)):
            _check_loaders(f"{name}_dataloaders", loaders)
            _check_ids(f"{name}_dataloaders", list(loaders or ()))
        try:
            return LoaderDataModule(train, val, test)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
    if datamodule is None:
        raise ConfigurationError(
            "fit() got no data. Pass datamodule=Partitioned(MyDataModule(), IIDPartitioner(10)), a federated data module, "
            "or train_dataloaders={client: loader}."
        )
    if not isinstance(datamodule, FederatedDataModule):
        raise ConfigurationError(
            f"{type(datamodule).__name__} does not know which client has which samples. "
            "Wrap it: Partitioned(datamodule, DirichletPartitioner(num_clients=10, alpha=0.5))."
        )
    return datamodule


def _check_loaders(owner: str, loaders: Any) -> None:
    """Refuse what is no mapping of clients to loaders, and what no client can iterate again and again.

    Raises:
        ConfigurationError: Naming the client.
    """
    if loaders is not None and not isinstance(loaders, Mapping):
        raise ConfigurationError(
            f"{owner} is a {type(loaders).__name__}. Pass one loader per client, by name: "
            f"{owner}={{'site 1': DataLoader(...)}}."
        )
    for client, loader in (loaders or {}).items():
        if isinstance(loader, Iterator) and not isinstance(loader, CombinedLoader):
            raise ConfigurationError(
                f"{owner}[{client!r}] is a {type(loader).__name__}, which ends after one epoch. Pass a DataLoader."
            )
        if loader is None or isinstance(loader, Tensor | Dataset | str):
            raise ConfigurationError(
                f"{owner}[{client!r}] is a {type(loader).__name__}, which has no batches. "
                "Pass DataLoader(dataset, batch_size=...)."
            )


def _check_ids(owner: str, ids: Iterable[Any]) -> None:
    """Refuse ids that are two clients with one name, and the name of the pooled client.

    Raises:
        ConfigurationError: Naming the id.
    """
    seen: dict[str, Any] = {}
    for client in ids:
        name = str(client)
        if (
            isinstance(client, bool)
            or not isinstance(client, str | Integral)
            or len(quote(name, safe="", errors="replace")) > 240
        ):
            raise ConfigurationError(
                f"{owner} has a client {client!r:.80}, which is no name of a client: it must be a whole number, or a text "
                "after which a file can be named: at most 240 letters of plain English, fewer of others."
            )
        if not _is_text(name):
            raise ConfigurationError(
                f"{owner} has a client {client!r}, which is no valid Unicode. Give it another name."
            )
        if name in seen:
            raise ConfigurationError(
                f"{owner} has the clients {seen[name]!r} and {client!r}, which are one name. Give every client a name of "
                "its own."
            )
        if name == POOLED:
            raise ConfigurationError(
                f"{owner} has a client '{POOLED}', which is the name of the union of all clients. Give it another name."
            )
        seen[name] = client


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_folder(folder: Path) -> None:
    """Refuse a folder in which Lightning would find a checkpoint of a requeued job and load it into every client.

    Raises:
        ConfigurationError: Naming the file.
    """
    found = sorted(folder.glob("hpc_ckpt_*.ckpt"))
    if found:
        raise ConfigurationError(
            f"{found[0]} is a checkpoint of a job that SLURM ended; Lightning would load it into every client's training. "
            "Remove it: the run's own state is in checkpoints/last."
        )


def check_clients(data: FederatedDataModule) -> None:
    """Refuse data whose clients cannot be told apart.

    Raises:
        ConfigurationError: Naming the client.
    """
    _check_ids(type(data).__name__, data.client_ids)


def loggers(value: Logger | Iterable[Logger] | bool | None, run: RunFolder | None) -> list[Logger]:
    """Return the run's Lightning loggers: CSV in the run's folder by default."""
    if isinstance(value, Logger):
        return [value]
    if isinstance(value, bool) or value is None:
        if not value or run is None:
            return []
        return [CSVLogger(run.path, name="", version="logs")]
    for item in value:
        if not isinstance(item, Logger):
            raise ConfigurationError(
                f"logger={value!r} is no logger. Pass True, False or instances such as CSVLogger('logs')."
            )
    return list(value)


def __getattr__(name: str) -> Any:
    """Find what has moved from here."""
    from fedlightning.compat.moved import moved_name

    return moved_name(__name__, name)
