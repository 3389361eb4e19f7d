"""The baselines that `compare` adds: the first method's data, model and trainer with another algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlightning.catalogue import ALGORITHMS, find
from fedlightning.experiments.methods import Config

AUTO = ("Local", "Central", "FedAvg", "LocalAdaptation")
"""What nobody shares, what could be had if data could move, one model for all, and that model fine-tuned."""

_CANNOT_STAND_BESIDE = {"Local": ("GlobalCheckpoint",)}  # it has no global model
_NOTES = {"Central": "a local step of Central is one step on the pooled data"}
_DEFAULT = "FedAvg"  # what runs where no algorithm is named; naming it changes nothing


def algorithms_of(config: Config) -> set[str]:
    """Names of the algorithms among the callbacks; FedAvg is left out, for it is what runs without any."""
    return {name for name in map(_name, _callbacks(config)) if not _kept(name)} - {_DEFAULT}


def missing_baselines(configs: Sequence[Config], wanted: Sequence[str] = AUTO) -> list[str]:
    """Those of `wanted` that no configuration is already.

    Raises:
        ValueError: an algorithm that is not in the catalogue.
    """
    there = [algorithms_of(config) for config in configs]
    names = [find(name).name for name in wanted]
    return [name for name in names if {name} - {_DEFAULT} not in there]


def notes(configs: Sequence[Config]) -> list[str]:
    """What to bear in mind when these baselines are compared with others."""
    return [_NOTES[name] for config in configs for name in sorted(algorithms_of(config)) if name in _NOTES]


def baseline_config(config: Config, name: str) -> Config:
    """`config` with its algorithm callbacks replaced by `name`; checkpoints and ordinary callbacks stay."""
    row = find(name)
    without = _CANNOT_STAND_BESIDE.get(row.name, ())
    callbacks = [item for item in _callbacks(config) if _kept(_name(item)) and _name(item) not in without]
    trainer = {**config["trainer"], "callbacks": [*callbacks, {"class_path": row.class_path, "init_args": {}}]}
    return {**config, "trainer": trainer}


def _callbacks(config: Config) -> list[dict[str, Any]]:
    found = config["trainer"].get("callbacks") or []
    return found if isinstance(found, list) else [found]


def _name(callback: dict[str, Any]) -> str:
    """The class's own name where it is in the catalogue or in our package, else its full path."""
    module, _, name = str(callback["class_path"]).rpartition(".")
    return name if module.partition(".")[0] == "fedlightning" else f"{module}.{name}"


def _kept(name: str) -> bool:
    """Checkpoints, diagnostics and ordinary callbacks stay; the catalogue's algorithms and users' own do not."""
    if "." not in name:
        return name not in {row.name for row in ALGORITHMS}
    from importlib import import_module

    from fedlightning.callbacks import GlobalCheckpoint, LocalCheckpoint
    from fedlightning.hooks import FederatedCallback

    module, _, attribute = name.rpartition(".")
    kind = getattr(import_module(module), attribute)
    return not issubclass(kind, FederatedCallback) or issubclass(kind, LocalCheckpoint | GlobalCheckpoint)
