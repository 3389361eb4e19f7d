"""Warm start: the model that a federation begins with, from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.compat.lightning_runs import detached_copy
from fedlightning.errors import ConfigurationError
from fedlightning.tensors import load_state, module_state


def warm_started(module: LightningModule, path: str | Path | None) -> LightningModule:
    """Return the module with the weights of a checkpoint; the module itself, which is not changed, where there is none.

    Only tensors and plain values are read from the file (`weights_only=True`): loading it runs no code.

    Example:
        >>> from fedlightning.models import Classifier, TinyNet
        >>> warm_started(Classifier(TinyNet(), num_classes=1), "none.ckpt")
        Traceback (most recent call last):
        fedlightning.errors.ConfigurationError: init_from='none.ckpt' is not a file. Give the path of a checkpoint.
    """
    if path is None:
        return module
    state, own = read_state(path), module_state(module)
    where = f"init_from={str(path)!r} does not fit {type(module).__name__}"
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    if missing or unexpected:
        parts = [f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has besides", unexpected)) if names]
        raise ConfigurationError(
            f"{where}: the file {' and '.join(parts)}. Save the state_dict of a module like this one, with its names."
        )
    for name, value in own.items():
        if state[name].shape != value.shape:
            raise ConfigurationError(
                f"{where}: '{name}' has the shape {tuple(state[name].shape)} in the file and {tuple(value.shape)} in the "
                "module. Build the module as it was built then, or leave init_from out."
            )
    started = detached_copy(module)
    load_state(started, state)
    return started


def read_privacy(path: str | Path) -> dict[str, Any]:
    """Return the epsilon and delta that an exported checkpoint says were spent on it; empty if it says none."""
    content: Any = torch.load(path, map_location="cpu", weights_only=True)
    own = content.get("fedlightning") if isinstance(content, Mapping) else None
    told = own.get("privacy") if isinstance(own, Mapping) else None
    spent = {name: told.get(name) for name in ("epsilon", "delta")} if isinstance(told, Mapping) else {}
    return spent if spent and all(isinstance(value, float) and value >= 0 for value in spent.values()) else {}


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint or of a file with a `state_dict`, on the CPU."""
    if not os.path.isfile(path):  # is_file() raises where a name is too long
        raise ConfigurationError(f"init_from={str(path)!r} is not a file. Give the path of a checkpoint.")
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds at damaged files
        raise ConfigurationError(
            f"init_from={str(path)!r} cannot be read as tensors and plain values, which is all that is loaded from it "
            f"(anything else could run code): {(str(error).splitlines() or ['it is empty'])[0][:120]} Save weights alone: "
            "torch.save(module.state_dict(), path)."
        ) from error
    state = content.get("state_dict", content) if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigurationError(
            f"init_from={str(path)!r} holds neither a Lightning checkpoint nor a state_dict. Save one with "
            "torch.save(module.state_dict(), path)."
        )
    return {name: value for name, value in state.items() if value.numel() or "fedlightning.load" not in name}


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + rest
