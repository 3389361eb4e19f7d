"""`Trainer.validate` and `Trainer.test` of one module on one loader and one device, and nothing else.

The hooks are called in the Trainer's order with the same arguments, so the module logs the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from fedlightning.compat.quiet import without_warnings
from fedlightning.compat.signatures import class_takes_index
from fedlightning.datamodules.resident import resident_batches
from fedlightning.visit.evaluation_names import names_of
from fedlightning.visit.fast import refusals as fast_refusals
from fedlightning.visit.fast.hooks import Hooks, of_module, per_class
from fedlightning.visit.fast.log import LogCollector
from fedlightning.visit.fast.trainer import FastTrainer

SPECIAL = frozenset(
    f"on_{name}_{what}" for name in ("validation", "test") for what in ("model_eval", "model_train")
) | {"configure_callbacks", "configure_sharded_model", "log"}
"""Methods of a LightningModule that are left to Lightning when a module overrides them."""


class Listener(Protocol):
    """Function that gets the output of every evaluation step."""

    def __call__(self, outputs: Any, batch: Any) -> None: ...


def refusal(module: LightningModule, loader: Any, base: Trainer, testing: bool) -> str | None:
    """Return the reason why the Trainer must score `module`, or `None` if there is none.

    Args:
        module: Module to score.
        loader: Its batches.
        base: A Trainer made with the run's arguments for evaluation on one device.
        testing: Whether `test_step` is run, not `validation_step`.
    """
    special = sorted(of_module(type(module)) & SPECIAL)
    if special:
        return f"{type(module).__name__} overrides {special[0]}"
    if set(vars(module)) & {"log", "log_dict", "validation_step", "test_step"}:
        return f"a method of {type(module).__name__} is set on the instance"
    if not takes_plain_batches(type(module)):
        return f"a step of {type(module).__name__} takes dataloader_iter or dataloader_idx"
    return (
        fast_refusals.of_run({"devices": 1}, [], base)
        or fast_refusals.of_loader(loader, names_of(testing).limit(base))
        or fast_refusals.of_hyperparameters(module)
    )


@per_class
def takes_plain_batches(kind: type[LightningModule]) -> bool:
    """Return True if the evaluation steps of a class take a batch and at most its index besides."""
    steps = [step for step in (kind.validation_step, kind.test_step) if callable(step)]
    special = ("dataloader_iter", "dataloader_idx")
    return not any(is_param_in_hook_signature(step, name, explicit=True) for step in steps for name in special)


def evaluate(
    module: LightningModule, loader: Any, base: Trainer, testing: bool, listen: Listener, inference_mode: bool = True
) -> dict[str, Tensor]:
    """Return what a module logs for the epoch when it is validated, or tested.

    Args:
        module: Module to score. It keeps its modes, and is on the device of `base` afterwards.
        loader: Its batches.
        base: A Trainer made with the run's arguments for evaluation on one device.
        testing: Whether `test_step` is run, not `validation_step`.
        listen: Function that gets the output of every step.
        inference_mode: As the Trainer's argument.

    Raises:
        NotInFastLoop: If the module does what only Lightning's Trainer can serve.
    """
    collector = LogCollector(module, training=False)
    names = names_of(testing)
    limits = {"max_epochs": base.max_epochs, "max_steps": base.max_steps}
    trainer = FastTrainer(base, module, [], base.precision_plugin, collector, names.stage, **limits)  # type: ignore[arg-type]
    count = fast_refusals.num_batches(loader, names.limit(base))
    vars(trainer).update({f"{names.short}_dataloaders": loader, f"num_{names.short}_batches": [count]})
    module.trainer = trainer  # type: ignore[assignment]
    hooks, precision = Hooks(trainer, collector), base.precision_plugin
    without_gradients: AbstractContextManager[Any] = torch.inference_mode() if inference_mode else torch.no_grad()
    collector.attach()
    try:
        with without_warnings():
            hooks.run("setup", stage=names.run)
            if hooks.overridden("configure_model"):
                with base.strategy.tensor_init_context(), precision.module_init_context():
                    module.configure_model()
            precision.convert_module(module)
            module.to(base.strategy.root_device)
            module.zero_grad()
            modes = {child: child.training for child in module.modules()}
            with without_gradients:
                logged = _epoch(trainer, hooks, collector, loader, count, listen)
            for child, mode in modes.items():
                child.training = mode
            collector.clear()
            hooks.run("teardown", stage=names.run)
    finally:
        collector.detach()
    return logged


def _epoch(
    trainer: FastTrainer, hooks: Hooks, collector: LogCollector, loader: Any, count: int, listen: Listener
) -> dict[str, Tensor]:
    module, precision, device = trainer.lightning_module, trainer.precision_plugin, trainer._base.strategy.root_device
    names = names_of(trainer.testing)
    step, context = getattr(module, names.step), names.context(precision)
    indexed = class_takes_index(type(module), names.step)
    batches = iter(resident_batches(loader, device) or loader)
    module.eval()
    hooks.run(f"on_{names.hook}_start")
    hooks.run(f"on_{names.hook}_epoch_start")
    batch_start, batch_end = hooks.find(f"on_{names.hook}_batch_start"), hooks.find(f"on_{names.hook}_batch_end")
    for index in range(count):
        batch = precision.convert_input(next(batches))
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.transfer_batch_to_device(batch, device, 0)
        batch = module.on_after_batch_transfer(batch, 0)
        collector.begin_batch(batch)
        if batch_start is not None:
            batch_start(batch, index)
        collector.enter(names.step)
        with context():
            outputs = step(batch, index) if indexed else step(batch)
        collector.enter(None)
        listen(outputs, batch)
        if batch_end is not None:
            batch_end(outputs, batch, index)
        collector.end_batch()
    collector.end_batches()
    logged = collector.epoch_values()
    hooks.run(f"on_{names.hook}_epoch_end")
    collector.end_epoch()
    logged.update(collector.epoch_values())
    hooks.run(f"on_{names.hook}_end")
    return logged
