"""Keep a second copy of a module in step with what the hooks of the first one do."""

from __future__ import annotations

import copy

from lightning.pytorch import LightningModule
from torch import Tensor, nn

SIMPLE = (bool, int, float, complex, str, bytes, type(None))
"""Types of attributes that are copied as they are."""

_INTERNALS = frozenset(vars(LightningModule())) | {"log", "log_dict", "loss_terms"}


def follow(module: LightningModule, twin: LightningModule) -> None:
    """Copy to `twin` what the hooks of `module` have set. Lightning calls the hooks of the root module only.

    Copied are the modes (train, eval) of all submodules and, of the root, numbers, strings, tensors without gradient,
    copies of plain collections, and every attribute that the twin does not have. Other attributes stay the twin's own:
    they may hold layers or metrics.

    Example:
        >>> from copy import deepcopy
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.follow import follow
        >>> module = Classifier(MLP(4, [3], 2), num_classes=2)
        >>> twin = deepcopy(module)
        >>> module.epochs_seen = 3
        >>> follow(module, twin)
        >>> twin.epochs_seen
        3
    """
    modes = {name: child.training for name, child in module.named_modules()}
    for name, child in twin.named_modules():
        child.training = modes.get(name, child.training)
    attributes = vars(twin)
    for name, value in vars(module).items():
        if name in _INTERNALS or callable(getattr(type(module), name, None)):
            continue  # under DDP Lightning leaves the module's own bound forward on the instance
        if isinstance(value, (list, dict, set)):
            items = value.values() if isinstance(value, dict) else value
            if not any(isinstance(item, nn.Module) for item in items):
                attributes[name] = copy.copy(value)
        elif isinstance(value, Tensor):
            if not value.requires_grad:
                attributes[name] = value
        elif isinstance(value, SIMPLE) or name not in attributes:
            attributes[name] = value
