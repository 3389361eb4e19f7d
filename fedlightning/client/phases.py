"""Phases beyond the task: a loss of their own in place of `training_step`, and batches paired with targets.

Phases that train a part of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.client.client import Client
from fedlightning.client.probes import TRANSFERS
from fedlightning.contract import Phase
from fedlightning.datamodules.public import PairedBatch
from fedlightning.layers import expand
from fedlightning.tensors import module_state
from fedlightning.wrappers.mixing import Mixin, mixed, user_class


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
            entries_below = [name for name in entries if name.startswith(f"{path}.")]
            if path and entries_below and not any(name in chosen for name in entries_below):
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


class PairedBatchMixin(Mixin):
    """Lets the module's own batch transfer hooks see the plain batch of a pair; the targets follow it."""

    wraps = TRANSFERS

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the hook makes of the batch, with the targets on its device."""
        pair, *rest = args
        if not isinstance(pair, PairedBatch):
            return call(*args, **kwargs)
        targets = pair.targets
        if name == "transfer_batch_to_device":
            targets = targets.to(
                next((argument for argument in rest if isinstance(argument, torch.device)), None) or kwargs["device"]
            )
        return PairedBatch(call(pair.batch, *rest, **kwargs), targets)


class PhaseLossMixin(Mixin):
    """Takes the place of `training_step`: returns the loss of the phase, and the task's step is not called."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the phase on a batch."""
        phase_loss: _PhaseLoss = vars(self)["phase_loss"]
        loss = phase_loss.phase.loss(phase_loss.client, cast(LightningModule, self), batch, batch_idx)  # type: ignore[misc]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"the loss of phase '{phase_loss.phase.name}' is {what}; return a tensor with one number")
        return loss


class _PhaseLoss:
    """The client and the phase that runs. A copy of the module refers to the same."""

    def __init__(self, client: Client, phase: Phase) -> None:
        self.client, self.phase = client, phase

    def __deepcopy__(self, memo: Any) -> _PhaseLoss:
        return self


@contextmanager
def phase_loss(client: Client, phase: Phase) -> Iterator[None]:
    """Within the block, the client's module takes paired batches, and its training step returns the phase's loss.

    The module's class is swapped and put back, so its hooks, optimizers and names stay the same.
    """
    module: LightningModule = client.module
    if phase.loss is not None and not module.automatic_optimization:
        raise ValueError(
            f"phase '{phase.name}' minimises a loss of its own in place of training_step, but "
            f"{user_class(module).__name__} optimizes manually inside training_step. Use automatic optimization."
        )
    with mixed(module, PairedBatchMixin):
        if phase.loss is None:
            yield
            return
        with mixed(module, PhaseLossMixin, phase_loss=_PhaseLoss(client, phase)):
            yield
