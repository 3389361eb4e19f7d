"""What a server and its sites must have in common: all of the configuration that changes what happens at a client."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn

import fedlightning
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.runtime import LocalRunner
from fedlightning.contract.families import Protection
from fedlightning.resume.config_changes import differences, of_blueprint
from fedlightning.sites.greeting import keyed
from fedlightning.storage.files import plain, read_json, readable_json, write_text_atomically, writing
from fedlightning.tensors import State

MACHINE = ("accelerator", "devices", "strategy", "num_nodes", "plugins", "profiler", "default_root_dir")
"""Arguments of a Trainer that are each machine's own."""
SETTINGS = (
    *("seed", "max_rounds", "local_epochs", "local_steps"),
    *("optimizer_state", "lr_decay", "local_loop", "float_buffers"),
)


def agreement(blueprint: Blueprint) -> dict[str, Any]:
    """Return what both sides must agree on, by a name that a person can read. It cannot see code."""
    settings = blueprint.settings
    found: dict[str, Any] = {"FedLightning": fedlightning.__version__}
    found |= {name: getattr(settings, name) for name in SETTINGS}
    found |= {name: value for name, value in settings.trainer_arguments.items() if name not in MACHINE}
    found |= of_blueprint(blueprint) | held_values(blueprint.template)
    agreed: dict[str, Any] = json.loads(json.dumps(plain(found)))
    return agreed


def refusal_of_changes(runner: LocalRunner, own: Mapping[str, Any], key: bytes, path: Path) -> str | None:
    """Return why callbacks that protect clients do not go on with a run after a change here, whatever its server says.

    Args:
        runner: Holds the callbacks and the data.
        own: What must not change, by a name that a person can read; how many rounds there are may.
        key: Key of the hash of the data.
        path: The run's file, which is written when it begins here.
    """
    protecting = [callback for callback in runner.callbacks if isinstance(callback, Protection)]
    if not protecting:
        return None
    told = runner.describe(details=("splits", "loaders"))
    data = {"hash of the training data": keyed(f"{told.splits['train']} {told.content}", key, "training data")}
    now = json.loads(json.dumps(plain({name: value for name, value in own.items() if name != "max_rounds"} | data)))
    if not path.exists():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, readable_json(now))
        return None
    changes = differences(read_json(path), now)
    try:
        for callback in protecting if changes else ():
            callback.check_changes(changes)
    except ValueError as error:
        return str(error)
    return None


def held_values(model: nn.Module) -> dict[str, Any]:
    """Return what modules hold that is neither sent with their state nor a plain option: weights of classes in a tensor or a
    list, buffers that are not persistent. Their like at the server and at a site changes what a step computes.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> model.class_weights = [1.0, 5.0]
        >>> held_values(model)
        {'model.class_weights (held)': [1.0, 5.0]}
    """
    found: dict[str, Any] = {}
    sent = set(model.state_dict(keep_vars=True))
    for path, module in model.named_modules():
        place = f"{path}." if path else ""
        held = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        held |= {name: value for name, value in module.named_buffers(recurse=False) if f"{place}{name}" not in sent}
        found |= {
            f"model.{place}{name} (held)": told for name, value in held.items() if (told := _told(value)) is not None
        }
    return found


def _told(value: Any) -> Any:
    """Return a value as it can be compared between machines; `None` if it cannot, or is compared as an option."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.from_numpy(np.ascontiguousarray(value)) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} {state_digest({'': value})[:16]}"
    if isinstance(value, list | tuple | dict) and value:
        try:
            return json.loads(json.dumps(value, allow_nan=True)) if _is_told(value) else None
        except (TypeError, ValueError):
            return None
    return None


def _is_told(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_told(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_told, value))
    return value is None or isinstance(value, str | bool | int | float)


def versions() -> dict[str, str]:
    """Return the versions of what computes: another one may round otherwise."""
    return {"torch": torch.__version__.partition("+")[0], "lightning": lightning.__version__}


def digest(*parts: Any) -> str:
    """Return a hash of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def state_digest(state: State) -> str:
    """Return a hash of named tensors."""
    found = hashlib.sha256()
    for name, value in state.items():
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()
