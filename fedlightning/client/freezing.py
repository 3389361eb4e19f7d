"""Phases that train a part of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.layers import expand
from fedlightning.tensors import module_state


@contextmanager
def only_training(module: LightningModule, names: tuple[str, ...]) -> Iterator[None]:
    """Within the block, train only a part of a module.

    Frozen parameters get no gradient at all, since a stale one would move them through weight decay. Modules with no
    entry among `names` are put in eval mode, so that the running statistics of a frozen body stay. Optimizers are configured
    on the module as it is outside of the block: one that filters by `requires_grad` may find nothing within.
    """
    parameters = dict(module.named_parameters())
    entries = list(module_state(module))
    chosen = set(expand(names, entries))
    was_required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    modes = {child: child.training for child in module.modules()}
    configure = module.configure_optimizers

    def configure_optimizers() -> Any:
        within = {name: parameter.requires_grad for name, parameter in parameters.items()}
        _require(parameters, was_required)
        try:
            return configure()
        finally:
            _require(parameters, within)

    attribute = vars(module).get("configure_optimizers")
    vars(module)["configure_optimizers"] = configure_optimizers
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(was_required[name] and name in chosen)
            parameter.grad = None
        for path, child in module.named_modules():
            own = [name for name in entries if name.startswith(f"{path}.")]
            if path and own and not any(name in chosen for name in own):
                child.eval()
        yield
    finally:
        vars(module).pop("configure_optimizers")
        vars(module).update({} if attribute is None else {"configure_optimizers": attribute})
        _require(parameters, was_required)
        for parameter in parameters.values():
            parameter.grad = None
        for child, mode in modes.items():
            child.training = mode


def _require(parameters: Mapping[str, Tensor], required: Mapping[str, bool]) -> None:
    for name, parameter in parameters.items():
        parameter.requires_grad_(required[name])
