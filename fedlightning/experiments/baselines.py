"""Baselines that `compare` adds: the data, model and trainer of the first method with another algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlightning.catalogue import find, installed, rows
from fedlightning.experiments.methods import Config, callbacks_of

AUTO = ("Local", "Central", "FedAvg", "LocalAdaptation")
"""Default baselines: nothing is shared, all data are in one place, one model for all, and that model fine-tuned."""

_CANNOT_STAND_BESIDE = {"Local": ("GlobalCheckpoint",)}  # it has no global model
_NOTES = {"Central": "a local step of Central is one step on the pooled data"}
_DEFAULT = "FedAvg"  # the algorithm of a run that names none, so naming it changes nothing


def algorithms_of(config: Config) -> set[str]:
    """Return the names of the algorithms among the callbacks, without FedAvg, which runs if there are none.

    Example:
        >>> algorithms_of({"trainer": {"callbacks": [{"class_path": "fedlightning.callbacks.FedProx"}]}})
        {'FedProx'}
    """
    return {name for name in map(_name, callbacks_of(config)) if not _kept(name)} - {_DEFAULT}


def missing_baselines(configs: Sequence[Config], requested: Sequence[str] = AUTO) -> list[str]:
    """Return the requested baselines that are not among the configurations.

    Example:
        >>> mixed = {"model": {"class_path": "fedlightning.models.ClientModels"}, "trainer": {}}
        >>> missing_baselines([mixed]), missing_baselines([{"trainer": {}}])
        (['Local'], ['Local', 'Central', 'LocalAdaptation'])
    """
    if tuple(requested) == AUTO and any(_are_mixed(config) for config in configs):
        requested = AUTO[:1]
    there = [algorithms_of(config) for config in configs]
    names = [find(name).name for name in requested]
    return [name for name in names if {name} - {_DEFAULT} not in there]


def notes(configs: Sequence[Config]) -> list[str]:
    """Return remarks that a reader needs to compare these baselines with other methods."""
    return [_NOTES[name] for config in configs for name in sorted(algorithms_of(config)) if name in _NOTES]


def baseline_config(config: Config, name: str) -> Config:
    """Return `config` with its algorithms replaced by `name`. Checkpoints and ordinary callbacks stay."""
    row = find(name)
    without = _CANNOT_STAND_BESIDE.get(row.name, ())
    callbacks = [item for item in callbacks_of(config) if _kept(_name(item)) and _name(item) not in without]
    trainer = {**config["trainer"], "callbacks": [*callbacks, {"class_path": row.class_path, "init_args": {}}]}
    return {**config, "trainer": trainer}


def _are_mixed(config: Config) -> bool:
    """Whether clients have models of their own."""
    return str((config.get("model") or {}).get("class_path", "")).rpartition(".")[2] == "ClientModels"


def _name(callback: dict[str, Any]) -> str:
    """Return the name of a class of this package or of the catalogue, or the full path of any other class."""
    path = str(callback["class_path"])
    listed = path.partition(".")[0] == "fedlightning" or path in {row.class_path for row in installed()}
    return path.rpartition(".")[2] if listed else path


def _kept(name: str) -> bool:
    """Return True for checkpoints, diagnostics and ordinary callbacks, False for algorithms, ours and users' own."""
    if "." not in name:
        return name not in {row.name for row in rows()}
    from importlib import import_module

    from fedlightning.callbacks import GlobalCheckpoint, LocalCheckpoint
    from fedlightning.contract import FederatedCallback

    module, _, attribute = name.rpartition(".")
    kind = getattr(import_module(module), attribute)
    return not issubclass(kind, FederatedCallback) or issubclass(kind, LocalCheckpoint | GlobalCheckpoint)
