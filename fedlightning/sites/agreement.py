"""What a server and its sites must have in common: all of the configuration that changes what happens at a client.

What a site tells of itself when it is greeted, before round 1: this table, and nothing else.

docs/how-to/deploy.md lists it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import lightning
import numpy as np
import torch
from torch import Tensor, nn

import fedlightning
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.data_summary import DataSummary, Detail
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract.families import Protection
from fedlightning.resume.config_changes import differences, of_blueprint
from fedlightning.storage.files import plain, read_json, readable_json, write_secret, write_text_atomically, writing
from fedlightning.tensors import state_digest

How = Literal["as it is", "keyed", "with public data", "never"]
LEAVES: Mapping[str, How] = {
    "name": "as it is",
    "clients": "as it is",
    "versions": "as it is",
    "time": "as it is",
    "other_code": "as it is",
    "client_ids": "as it is",
    "sizes": "as it is",
    "seed": "as it is",
    "planted_groups": "as it is",
    "loaders": "as it is",
    "batches": "as it is",
    "together": "as it is",
    "meaning": "as it is",
    "statistics": "as it is",
    "over_rounds": "as it is",
    "splits": "keyed",
    "content": "keyed",
    "public": "with public data",
    "public_print": "with public data",
    "public_content": "with public data",
    "module": "never",
    "partition_name": "never",
    "classes": "never",
    "class_names": "never",
    "pooled": "never",
}
"""How each field of the answer to a greeting, and of the description of the data in it, leaves a site. `"keyed"`: as a hash
with a key that only the site has, which tells whether something has changed and not what it is. `"with public data"`: where
the server has public data too, with which they are compared."""
DETAILS: tuple[Detail, ...] = tuple(detail for detail in get_args(Detail) if detail not in ("classes", "pooled"))
"""What of the data is looked up for a greeting."""
INSTEAD: Mapping[str, Callable[[DataSummary], Any]] = {
    "module": lambda summary: "data of sites",
    "partition_name": lambda summary: "at sites",
    "classes": lambda summary: dict.fromkeys(summary.sizes),
    "class_names": lambda summary: [],
    "pooled": lambda summary: (),
    "public": lambda summary: None,
    "public_print": lambda summary: None,
    "public_content": lambda summary: None,
}
CODE = "code"
"""Entry of `splits` that stands for the code of the data module."""


def leaving(summary: DataSummary, key: bytes, code: str, public: bool, withheld: Collection[str]) -> DataSummary:
    """Return what leaves of a description.

    Args:
        summary: The description.
        key: The site's key.
        code: Hash of the code of the data module.
        public: Whether the server has public data.
        withheld: Splits of which no hash tells whether their samples are those of an earlier run.
    """
    summary = replace(summary, splits={**summary.splits, CODE: code} if summary.splits else {})
    if withheld:
        summary = replace(summary, splits={**summary.splits, **dict.fromkeys(withheld, "")}, content=None)
    changed: dict[str, Any] = {}
    for name in (field.name for field in fields(summary)):
        value, how = getattr(summary, name), LEAVES[name]
        if how == "never" or (how == "with public data" and not public):
            changed[name] = INSTEAD[name](summary)
        elif how == "keyed" and isinstance(value, Mapping):
            changed[name] = {part: keyed(content, key, f"{name} {part}") for part, content in value.items()}
        elif how == "keyed" and value is not None:
            changed[name] = keyed(value, key, name)
    return replace(summary, **changed)


def keyed(value: Any, key: bytes, of: str) -> str:
    """Return a short hash that only who has the key can make.

    Example:
        >>> keyed("a", b"1", "x") == keyed("a", b"1", "x"), keyed("a", b"1", "x") == keyed("a", b"2", "x")
        (True, False)
    """
    return hmac.new(key, json.dumps([of, value]).encode(), "sha256").hexdigest()[:16]


def own_key(path: Path) -> bytes:
    """Return the key of a site, which only this user can read; it is made where there is none yet."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            write_secret(path, secrets.token_bytes(32))
        return path.read_bytes()


MACHINE = ("accelerator", "devices", "strategy", "num_nodes", "plugins", "profiler", "default_root_dir")
"""Arguments of a Trainer that are each machine's own."""
SETTINGS = (
    *("seed", "max_rounds", "local_epochs", "local_steps"),
    *("optimizer_state", "lr_decay", "local_loop", "float_buffers"),
)


def agreement(blueprint: Blueprint) -> dict[str, Any]:
    """Return what both sides must agree on, by a name that a person can read. It cannot see code."""
    settings = blueprint.settings
    agreed_values: dict[str, Any] = {"FedLightning": fedlightning.__version__}
    agreed_values |= {name: getattr(settings, name) for name in SETTINGS}
    agreed_values |= {f"seed.{source}": seed for source, seed in settings.other_seeds.items()}
    agreed_values |= {name: value for name, value in settings.trainer_arguments.items() if name not in MACHINE}
    agreed_values |= of_blueprint(blueprint) | held_values(blueprint.template)
    agreed: dict[str, Any] = json.loads(json.dumps(plain(agreed_values)))
    return agreed


def refusal_of_changes(runner: ClientRuntime, agreed: Mapping[str, Any], key: bytes, path: Path) -> str | None:
    """Return why callbacks that protect clients do not go on with a run after a change here, whatever its server says.

    Args:
        runner: Holds the callbacks and the data.
        agreed: What must not change, by a name that a person can read; how many rounds there are may.
        key: Key of the hash of the data.
        path: The run's file, which is written when it begins here.
    """
    protecting = [callback for callback in runner.callbacks if isinstance(callback, Protection)]
    if not protecting:
        return None
    summary = runner.describe(details=("splits", "loaders"))
    data = {"hash of the training data": keyed(f"{summary.splits['train']} {summary.content}", key, "training data")}
    now = json.loads(json.dumps(plain({name: value for name, value in agreed.items() if name != "max_rounds"} | data)))
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
    contents: dict[str, Any] = {}
    sent = set(model.state_dict(keep_vars=True))
    for path, module in model.named_modules():
        place = f"{path}." if path else ""
        attrs = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        attrs |= {name: value for name, value in module.named_buffers(recurse=False) if f"{place}{name}" not in sent}
        contents |= {
            f"model.{place}{name} (held)": text
            for name, value in attrs.items()
            if (text := _make_comparable(value)) is not None
        }
    return contents


def _make_comparable(value: Any) -> Any:
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
        return all(isinstance(key, str) and _is_told(entry) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_told, value))
    return value is None or isinstance(value, str | bool | int | float)


def versions() -> dict[str, str]:
    """Return the versions of what computes: another one may round otherwise."""
    return {"torch": torch.__version__.partition("+")[0], "lightning": lightning.__version__}


def digest(*parts: Any) -> str:
    """Return a hash of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
