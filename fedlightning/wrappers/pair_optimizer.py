"""One optimizer for two modules that train together."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from fedlightning.wrappers.mixing import user_class


def one_optimizer(
    module: nn.Module, own: Any, shared: LightningModule, theirs: Any, projection: nn.Module | None
) -> Optimizer:
    """Return the module's optimizer with the groups of the second one's beside its own."""
    ours, second = (_only(one, configured) for one, configured in ((module, own), (shared, theirs)))
    if type(ours) is not type(second):
        raise ValueError(
            f"{user_class(module).__name__} uses {type(ours).__name__} and the shared {user_class(shared).__name__} "
            f"{type(second).__name__}, but both models take one step together. Give both the same kind of optimizer; "
            "learning rates and other options may differ."
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    first = ours.param_groups[0]
    for parameter in () if projection is None else projection.parameters():
        first["params"].append(parameter)
        if "param_names" in first:
            first["param_names"].append(names[id(parameter)])
    for group in second.param_groups:
        added = {name: value for name, value in group.items() if name != "param_names"}
        if "param_names" in first:
            added["params"] = [(names[id(parameter)], parameter) for parameter in group["params"]]
        ours.add_param_group(added)
    return ours


def _only(module: nn.Module, configured: Any) -> Optimizer:
    """Return the one optimizer in what `configure_optimizers` returned."""
    while isinstance(configured, list | tuple) and len(configured) == 1:
        configured = configured[0]
    if isinstance(configured, dict) and not configured.get("lr_scheduler"):
        configured = configured.get("optimizer")
    if isinstance(configured, tuple) and len(configured) == 2 and not configured[1]:
        return _only(module, configured[0])
    if not isinstance(configured, Optimizer):
        raise ValueError(
            f"configure_optimizers of {user_class(module).__name__} returns more than one optimizer, and two models that "
            "learn from each other take one step together. Return one optimizer without a schedule (lr_decay of the trainer "
            "lowers learning rates from round to round)."
        )
    return configured
