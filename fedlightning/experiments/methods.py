"""Methods of a comparison: complete configurations with labels, and the baselines that are added to them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlightning.catalogue import find, installed, rows

Config = dict[str, Any]
"""Sections `trainer`, `model` and `data` of a complete configuration, as plain values."""

SEED_KEY = "trainer.seed"
_PLACE = ("name", "version", "default_root_dir", "enable_progress_bar")


@dataclass(frozen=True)
class Method:
    """What an experiment runs with every seed: a method of a comparison, a trial of a sweep, a run of a published table.

    Attributes:
        name: Label of the method, and name of its folder.
        configs: YAML files it was made from.
        config: Complete configuration; values that vary with the seed are 0 here.
        vary: Keys that are set to the seed.
        baseline: Whether `compare` added it as a baseline.
        clients: Clients in its data.
        optimizer_state: What becomes of its optimizers between visits, `None` where that makes no difference.
        no_model: Why a client that never trained has no model; `None`: it has one.
        left_out: Name of the method and the site that it is trained without, for leave-one-site-out; `None`: all train.
        cell: Row and column of a grid; `None`: it is of none.
    """

    name: str
    configs: list[str]
    config: Config = field(repr=False)
    vary: Sequence[str] = (SEED_KEY,)
    baseline: bool = False
    clients: Sequence[str] = ()
    optimizer_state: str | None = None
    no_model: str | None = None
    left_out: tuple[str, str] | None = None
    cell: tuple[str, str] | None = None

    @property
    def rounds(self) -> int:
        """Number of rounds of one run."""
        trainer = self.config["trainer"]
        return 1 if trainer.get("fast_dev_run") else int(trainer["max_rounds"])

    @property
    def budget(self) -> str:
        """Rounds and local steps or epochs of one run, in words."""
        trainer = self.config["trainer"]
        steps, epochs = trainer.get("local_steps"), trainer.get("local_epochs") or 1
        return f"{self.rounds} rounds x {f'{steps} local steps' if steps else f'{epochs} local epochs'}"

    def fingerprint(self, seed: int) -> str:
        """Return a hash of everything that decides the numbers of a run: configuration, keys that vary, and seed."""
        decides = [without_place(self.config), sorted(self.vary), seed]
        return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:16]


def list_callbacks(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the callbacks of a configuration; one may stand there without a list."""
    callbacks = config["trainer"].get("callbacks") or []
    return callbacks if isinstance(callbacks, list) else [callbacks]


def without_place(config: Mapping[str, Any]) -> Config:
    """Return a configuration without the options that say where files go and what is shown."""
    trainer = {key: value for key, value in config["trainer"].items() if key not in _PLACE}
    return {**config, "trainer": trainer}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two configurations, in words.

    Example:
        >>> differences({"trainer": {"max_rounds": 3}}, {"trainer": {"max_rounds": 5}})
        ['trainer.max_rounds is 5, was 3']
    """
    before, after = _flat(without_place(old)), _flat(without_place(new))
    return [
        f"{key} is {after.get(key, 'not there')}, was {before.get(key, 'not there')}"
        for key in {**before, **after}
        if before.get(key, _flat) != after.get(key, _flat)
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping) and value:
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        items = enumerate(value)
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


# -- labels ------------------------------------------------------------------------------------------------------------
def split_label(word: str) -> tuple[str | None, str]:
    """Split `NAME=path.yaml` into name and path. A path alone has no name.

    Example:
        >>> split_label("mild=configs/a.yaml"), split_label("configs/a.yaml")
        (('mild', 'configs/a.yaml'), (None, 'configs/a.yaml'))
    """
    name, sign, path = word.partition("=")
    if not sign or "/" in name or Path(word).exists():
        return None, word
    return name, path


def labels(names: Sequence[str | None], paths: Sequence[str], taken: Iterable[str] = ()) -> list[str]:
    """Return a unique label for every file: its given name, else the stem of the file.

    Two files with one stem get the names of their folders, too, and numbers if that is not enough. Labels that differ
    only in case count as equal, because some file systems do not tell them apart.

    Example:
        >>> labels([None, None, "mine"], ["a/fedavg.yaml", "b/fedavg.yaml", "c.yaml"])
        ['a-fedavg', 'b-fedavg', 'mine']
    """
    given_names = [name.lower() for name in names if name is not None]
    twice = next((name for name in given_names if given_names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"The name '{twice}' is given twice. Give every configuration a name of its own.")
    used = {*given_names, *(name.lower() for name in taken)}
    stems = [Path(path).stem.lower() for path in paths]
    file_labels = []
    for name, path, stem in zip(names, paths, stems, strict=True):
        if name is not None:
            file_labels.append(tidy(name))
            continue
        label = Path(path).stem
        if stems.count(stem) > 1 or stem in used:
            label = f"{Path(path).resolve().parent.name}-{label}"
        file_labels.append(unique(tidy(label), used))
        used.add(file_labels[-1].lower())
    return file_labels


def unique(label: str, used: Iterable[str]) -> str:
    """Return `label`, or the first of label_2, label_3 and so on that is not in `used` (lower case)."""
    number, candidate, taken = 2, label, set(used)
    while candidate.lower() in taken:
        candidate, number = f"{label}_{number}", number + 1
    return candidate


def tidy(label: str) -> str:
    """Return a label that is a valid name of a folder on every system."""
    return re.sub(r"[^\w.+-]+", "-", label).strip(".-") or "run"


# -- baselines ---------------------------------------------------------------------------------------------------------
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
    return {name for name in map(_name, list_callbacks(config)) if not _is_kept(name)} - {_DEFAULT}


def missing_baselines(configs: Sequence[Config], requested: Sequence[str] = AUTO) -> list[str]:
    """Return the requested baselines that are not among the configurations.

    Example:
        >>> mixed = {"model": {"class_path": "fedlightning.models.ClientModels"}, "trainer": {}}
        >>> missing_baselines([mixed]), missing_baselines([{"trainer": {}}])
        (['Local'], ['Local', 'Central', 'LocalAdaptation'])
    """
    if tuple(requested) == AUTO and any(_are_mixed(config) for config in configs):
        requested = AUTO[:1]
    present = [algorithms_of(config) for config in configs]
    names = [find(name).name for name in requested]
    return [name for name in names if {name} - {_DEFAULT} not in present]


def notes(configs: Sequence[Config]) -> list[str]:
    """Return remarks that a reader needs to compare these baselines with other methods."""
    return [_NOTES[name] for config in configs for name in sorted(algorithms_of(config)) if name in _NOTES]


def baseline_config(config: Config, name: str) -> Config:
    """Return `config` with its algorithms replaced by `name`. Checkpoints and ordinary callbacks stay."""
    row = find(name)
    without = _CANNOT_STAND_BESIDE.get(row.name, ())
    callbacks = [item for item in list_callbacks(config) if _is_kept(_name(item)) and _name(item) not in without]
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


def _is_kept(name: str) -> bool:
    """Return True for checkpoints, diagnostics and ordinary callbacks, False for algorithms, ours and users' own."""
    if "." not in name:
        return name not in {row.name for row in rows()}
    from importlib import import_module

    from fedlightning.callbacks import GlobalCheckpoint, LocalCheckpoint
    from fedlightning.contract import FederatedCallback

    module, _, attribute = name.rpartition(".")
    kind = getattr(import_module(module), attribute)
    return not issubclass(kind, FederatedCallback) or issubclass(kind, LocalCheckpoint | GlobalCheckpoint)
