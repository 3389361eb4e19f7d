"""The `trainer` that a module and its callbacks see under the fast loop.

It offers the part of `lightning.pytorch.Trainer` that training code reads: counters, limits, optimizers, metrics,
flags. Anything else raises :class:`~fedlightning.fast.log_sheet.FastLoopRefused`, never a guess. Then `auto` repeats
the visit with Lightning's own Trainer, which is safe because a visit changes nothing before it has ended.
"""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

from fedlightning.client.trainer_context import TrainerContext
from fedlightning.fast.log_sheet import FastLoopRefused, LogSheet
from fedlightning.options.lightning_arguments import FORWARDED

AS_GIVEN = frozenset((
    *FORWARDED, "default_root_dir", "fast_dev_run", "global_rank", "is_global_zero", "local_rank", "log_dir", "logger",
    "loggers", "node_rank", "num_devices", "world_size", "barebones", "progress_bar_callback", "datamodule",
    "received_sigterm", "interrupted", "device_ids", "distributed_sampler_kwargs",
))  # fmt: skip
"""Attributes that are read from a Lightning Trainer made with the run's arguments and never run."""

SETTABLE = frozenset(
    ["should_stop", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "callbacks", "profiler"]
)
"""Attributes of a Trainer that a module or callback may set, with the same effect as there."""


class FixedStrategy(SingleDeviceStrategy):
    """Lightning's strategy for one device; it refuses other optimizers than those that the fast loop steps.

    Attributes:
        is_fixed: Whether the fit has its optimizers.
    """

    is_fixed = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_fixed and name in ("optimizers", "lr_scheduler_configs"):
            raise FastLoopRefused(f"trainer.strategy.{name} is set, and the fast loop goes on with what it has")
        super().__setattr__(name, value)


class FastTrainer:
    """Stand-in for a `lightning.pytorch.Trainer` in one fit or one evaluation of one module.

    Args:
        base: A Trainer made with the run's arguments: the source of the settings.
        module: The module.
        callbacks: Callbacks in Lightning's order.
        precision: Precision plugin of this fit.
        log_sheet: Collects what the module logs.
        stage: Training, validating or testing.
        loader: Training batches.
        num_batches: Training batches of an epoch.
        max_epochs: Limit of epochs; -1: none.
        max_steps: Limit of optimizer steps; -1: none.
    """

    def __init__(
        self,
        base: Trainer,
        module: LightningModule,
        callbacks: list[Callback],
        precision: Any,
        log_sheet: LogSheet,
        stage: RunningStage = RunningStage.TRAINING,
        loader: Any = None,
        num_batches: int = 0,
        max_epochs: int = 1,
        max_steps: int = -1,
    ) -> None:
        state = TrainerState(TrainerStatus.RUNNING, FUNCTION_OF[stage], stage)
        values: dict[str, Any] = {
            "_base": base, "_log_sheet": log_sheet, "_strategy": None, "_data": (loader, num_batches),
            "lightning_module": module, "model": module,
            "callbacks": callbacks, "precision_plugin": precision, "state": state, "optimizers": [],
            "lr_scheduler_configs": [], "current_epoch": 0, "global_step": 0, "is_last_batch": False,
            "should_stop": False, "train_dataloader": None, "val_dataloaders": None, "test_dataloaders": None,
            "num_training_batches": math.inf, "max_epochs": max_epochs, "max_steps": max_steps, "min_epochs": None,
            "min_steps": None, "sanity_checking": False, "predicting": False, "enable_validation": False,
            "checkpoint_callback": None, "checkpoint_callbacks": [], "ckpt_path": None, "num_val_batches": [],
            "limit_val_batches": 0 if stage is RunningStage.TRAINING else base.limit_val_batches,
            "num_sanity_val_steps": 0, "accumulate_grad_batches": base.accumulate_grad_batches,
            "gradient_clip_val": base.gradient_clip_val, "gradient_clip_algorithm": base.gradient_clip_algorithm,
        }  # fmt: skip
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name in AS_GIVEN:
            return getattr(self._base, name)
        if name.startswith("__") or not (name.startswith("_") or hasattr(Trainer, name) or hasattr(self._base, name)):
            raise AttributeError(f"'Trainer' object has no attribute '{name}'")
        raise FastLoopRefused(f"trainer.{name} is used, which the fast loop does not have")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SETTABLE and (name in self.__dict__ or hasattr(Trainer, name) or hasattr(self._base, name)):
            raise FastLoopRefused(f"trainer.{name} is set, which the fast loop does not have")
        self.__dict__[name] = value

    def show(self, inside: TrainerContext) -> None:
        """Show a client's folder, logger and data module."""
        folder = self._base.default_root_dir if inside.folder is None else inside.folder
        self.__dict__.update(
            default_root_dir=folder, log_dir=inside.folder, logger=inside.logger, loggers=[inside.logger],
            datamodule=inside.datamodule,
        )  # fmt: skip

    @property
    def strategy(self) -> FixedStrategy:
        """Lightning's strategy for one device, made on first access; most modules never need it."""
        if self._strategy is None:
            base = self._base.strategy
            strategy = FixedStrategy(base.root_device, base.accelerator, precision_plugin=self.precision_plugin)
            strategy.connect(self.lightning_module)
            strategy.optimizers, strategy.lr_scheduler_configs = self.optimizers, self.lr_scheduler_configs
            strategy.is_fixed = bool(self.optimizers)
            self.__dict__["_strategy"] = strategy
        return self._strategy

    def become(self, other: FastTrainer) -> None:
        """Forget everything and be as `other`; who refers to this object sees that."""
        self.__dict__.clear()
        self.__dict__.update(other.__dict__)

    def show_loader(self, short: str, loader: Any, count: int) -> None:
        """Show the batches of an evaluation."""
        self.__dict__.update({f"{short}_dataloaders": loader, f"num_{short}_batches": [count]})

    def set_up_data(self) -> None:
        """Show the training batches to the module: before the first epoch, or when it asks for their number."""
        self.__dict__["train_dataloader"], self.__dict__["num_training_batches"] = self._data

    def detach(self) -> None:
        """Let go of the module and of all that refers back to it, so that its memory is free at once."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
            optimizer.param_groups.clear()
        self.callbacks.clear()
        gone: dict[str, Any] = {
            "_strategy": None,
            "_log_sheet": None,
            "lightning_module": None,
            "model": None,
            "datamodule": None,
            "optimizers": [],
        }
        self.__dict__.update(gone, lr_scheduler_configs=[])

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole fit, as Lightning estimates them."""
        if self.max_epochs == -1:
            return math.inf if self.max_steps == -1 else self.max_steps
        self.set_up_data()
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * max(self.max_epochs, 1)
        return min(steps, self.max_steps) if self.max_steps != -1 else steps

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Metrics that callbacks may monitor."""
        return self._log_sheet.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Metrics that a logger gets."""
        return self._log_sheet.logged_metrics

    # Lightning's own, of what is above
    early_stopping_callbacks, early_stopping_callback = (
        Trainer.early_stopping_callbacks,
        Trainer.early_stopping_callback,
    )
    training, validating, testing, evaluating = (
        Trainer.training,
        Trainer.validating,
        Trainer.testing,
        Trainer.evaluating,
    )


FUNCTION_OF = {
    RunningStage.TRAINING: TrainerFn.FITTING,
    RunningStage.VALIDATING: TrainerFn.VALIDATING,
    RunningStage.TESTING: TrainerFn.TESTING,
}
