"""Checkpoints that a run exports: native Lightning checkpoints, wrapped or not; writing and opening them."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO

from fedlightning.compat.attached import detached_copy
from fedlightning.compat.quiet import quiet
from fedlightning.tensors import load_state, module_state


class _Writer(CheckpointIO):
    """Writes Lightning's checkpoint with an entry of our own."""

    def __init__(self) -> None:
        self.own: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint | {"fedlightning": self.own}, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=bool(weights_only))
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


class Exporter:
    """Saves modules as Lightning saves them, so that ``MyModule.load_from_checkpoint`` opens the files.

    A wrapped module is another class than the user's (a dual extractor) or holds other entries (adapters put into
    it); it is pickled along under ``"fedlightning"``, and :func:`load` opens it.

    Args:
        template: The user's module, unwrapped.
    """

    def __init__(self, template: LightningModule) -> None:
        self._kind = type(template)
        complete = detached_copy(template)
        complete.configure_model()
        self._shapes = {name: value.shape for name, value in module_state(complete).items()}
        self._writer = _Writer()
        with quiet():
            self._trainer = Trainer(
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                plugins=[self._writer],
            )

    def save(self, path: Path, module: LightningModule, extra: dict[str, Any]) -> None:
        """Save a module.

        Args:
            path: The file, replaced atomically.
            module: The module, detached from any trainer.
            extra: Plain values to keep under `"fedlightning"`.
        """
        own = {"class": f"{self._kind.__module__}:{self._kind.__qualname__}", **extra}
        shapes = {name: value.shape for name, value in module_state(module).items()}
        if type(module) is not self._kind or shapes != self._shapes:
            try:
                own["wrapped"] = torch.frombuffer(bytearray(pickle.dumps(module)), dtype=torch.uint8)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                warnings.warn(
                    f"{path.name} holds the weights of a wrapped {self._kind.__name__} that cannot be pickled ({error}); "
                    "fedlightning.load needs the wrapped module to load them into. Use importable classes and functions.",
                    UserWarning,
                    stacklevel=2,
                )
        self._writer.own = own
        temporary = path.with_name(path.name + ".tmp")
        temporary.unlink(missing_ok=True)  # a link that a killed run left would be written through
        with quiet():
            self._trainer.strategy.connect(module)
            self._trainer.save_checkpoint(temporary, weights_only=True)
        module.trainer = None
        os.replace(temporary, path)


def link(path: Path, same: Path) -> None:
    """Make `path` a hard link to `same` (a copy where the file system has no links)."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(same, temporary)
    except OSError:
        shutil.copyfile(same, temporary)
    os.replace(temporary, path)


def load(path: str | Path, module: LightningModule | None = None, **hparams: Any) -> LightningModule:
    """Open a checkpoint that a run exported, wrapped or not, in eval mode.

    Open only files you trust: a wrapped module is unpickled.

    Args:
        path: `checkpoints/global.ckpt` or `checkpoints/clients/<id>.ckpt`.
        module: An instance to load into, where the class cannot be made from the saved hyper-parameters.
        hparams: Hyper-parameters that override the saved ones, as in `load_from_checkpoint`.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}. A run exports to <run>/checkpoints/ when it ends.")
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    own = checkpoint.get("fedlightning", {})
    if "wrapped" in own:
        loaded: LightningModule = pickle.loads(own["wrapped"].numpy().tobytes())
    elif module is not None:
        load_state(module, {k: v for k, v in checkpoint["state_dict"].items() if k in module_state(module)})
        loaded = module
    else:
        where, _, name = own["class"].partition(":")
        found: Any = importlib.import_module(where)
        for part in name.split("."):
            found = getattr(found, part)
        loaded = found.load_from_checkpoint(path, map_location="cpu", **hparams)
    return loaded.eval()
