"""Opening what a run exported: native Lightning checkpoints, wrapped or not."""

from __future__ import annotations

import importlib
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from fedlightning.client import detached_copy
from fedlightning.quiet import quiet
from fedlightning.tensors import load_state, module_state


def export(path: Path, module: LightningModule, template: LightningModule, extra: dict[str, Any]) -> None:
    """Save ``module`` as Lightning saves it, so that ``MyModule.load_from_checkpoint`` opens it.

    A wrapped module is another class than the user's (a dual extractor) or holds other entries (adapters put into
    it); it is pickled along under ``"fedlightning"``, and :func:`load` opens it.

    Args:
        path: the file, replaced atomically.
        module: detached from any trainer.
        template: the user's module, unwrapped.
        extra: plain values to keep under ``"fedlightning"``.
    """
    with quiet():
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.strategy.connect(module)
        temporary = path.with_name(path.name + ".tmp")
        trainer.save_checkpoint(temporary, weights_only=True)
    module.trainer = None
    kind = type(template)
    own = {"class": f"{kind.__module__}:{kind.__qualname__}", **extra}
    if type(module) is not kind or not _holds_the_same(module, template):
        try:
            own["wrapped"] = torch.frombuffer(bytearray(pickle.dumps(module)), dtype=torch.uint8)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            warnings.warn(
                f"{path.name} holds the weights of a wrapped {kind.__name__} that cannot be pickled ({error}); "
                "fedlightning.load needs the wrapped module to load them into. Use importable classes and functions.",
                UserWarning,
                stacklevel=2,
            )
    checkpoint = torch.load(temporary, map_location="cpu", weights_only=False)
    torch.save(checkpoint | {"fedlightning": own}, temporary)
    os.replace(temporary, path)


def _holds_the_same(module: LightningModule, template: LightningModule) -> bool:
    """Whether the user's class, made again, has a place for every entry of ``module``."""
    complete = detached_copy(template)
    complete.configure_model()
    mine, made = module_state(module), module_state(complete)
    return mine.keys() == made.keys() and all(value.shape == made[name].shape for name, value in mine.items())


def load(path: str | Path, module: LightningModule | None = None, **hparams: Any) -> LightningModule:
    """Open a checkpoint that a run exported, wrapped or not, in eval mode.

    Open only files you trust: a wrapped module is unpickled.

    Args:
        path: ``checkpoints/global.ckpt`` or ``checkpoints/clients/<id>.ckpt``.
        module: an instance to load into, where the class cannot be made from the saved hyper-parameters.
        hparams: hyper-parameters that override the saved ones, as in ``load_from_checkpoint``.

    Raises:
        FileNotFoundError: if there is no such file.
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
