"""Keep a copy of a module that trains beside it in step with what the module's own hooks do."""

from __future__ import annotations

import copy

from lightning.pytorch import LightningModule
from torch import Tensor, nn

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_INTERNALS = frozenset(vars(LightningModule())) | {"log", "log_dict", "loss_client", "loss_callbacks"}


def follow(module: LightningModule, twin: LightningModule) -> None:
    """Bring ``twin`` up to date with what ``module``'s hooks have set: Lightning calls hooks of the root module only.

    Taken over are the modes (train, eval) of all submodules and, of the root, numbers, strings, tensors without
    gradient, copies of plain collections, and whatever the twin does not have at all. Anything else stays the twin's
    own: it may hold layers or metrics.
    """
    modes = {name: child.training for name, child in module.named_modules()}
    for name, child in twin.named_modules():
        child.training = modes.get(name, child.training)
    own = vars(twin)
    for name, value in vars(module).items():
        if name in _INTERNALS or callable(getattr(type(module), name, None)):
            continue  # under DDP Lightning leaves the module's own bound forward on the instance
        if isinstance(value, (list, dict, set)):
            items = value.values() if isinstance(value, dict) else value
            if not any(isinstance(item, nn.Module) for item in items):
                own[name] = copy.copy(value)
        elif isinstance(value, Tensor):
            if not value.requires_grad:
                own[name] = value
        elif isinstance(value, _SIMPLE) or name not in own:
            own[name] = value
