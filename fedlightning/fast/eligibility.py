"""Reasons against the fast loop, as sentences.

It refuses all that it cannot prove equal to Lightning's Trainer.

Hooks that a module and its callbacks override: the fast loop calls these and no others.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    LearningRateFinder,
    ProgressBar,
    Timer,
)
from lightning.pytorch.callbacks import StochasticWeightAveraging as SWA
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.parsing import is_picklable
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, IterableDataset

from fedlightning.client.data_summary import limited
from fedlightning.fast.log_sheet import LogSheet
from fedlightning.fast.trainer_view import FastTrainer
from fedlightning.options.lightning_arguments import FORWARDED

Hook = Callable[..., Any]
Answer = TypeVar("Answer")


def per_class(function: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """Cache a function of a class."""
    return cache(function)


CALLBACK_HOOKS = frozenset(
    name for name, value in vars(Callback).items() if not name.startswith("_") and inspect.isfunction(value)
)
MODULE_METHODS = frozenset(
    name for name in dir(LightningModule) if not name.startswith("__") and callable(getattr(LightningModule, name))
)


@per_class
def of_callback(kind: type) -> frozenset[str]:
    """Return the hooks that a class of callbacks overrides."""
    return frozenset(name for name in CALLBACK_HOOKS if getattr(kind, name) is not getattr(Callback, name))


@per_class
def of_module(kind: type) -> frozenset[str]:
    """Return the methods of `LightningModule` that a class overrides."""
    return frozenset(name for name in MODULE_METHODS if getattr(kind, name, None) is not getattr(LightningModule, name))


def _join_set(of_class: frozenset[str], owner: object, names: frozenset[str]) -> frozenset[str]:
    """Return the names of a class's methods with those that are set on the object."""
    return of_class if names.isdisjoint(vars(owner)) else of_class | (names & vars(owner).keys())


class Hooks:
    """Calls hooks in Lightning's order: callbacks as listed, then the module.

    Args:
        trainer: Stand-in for the Trainer, with its callbacks and its module.
        log_sheet: Is told which hook runs.
    """

    def __init__(self, trainer: FastTrainer, log_sheet: LogSheet) -> None:
        self._trainer, self._log_sheet = trainer, log_sheet
        module, callbacks = trainer.lightning_module, trainer.callbacks
        self._module, self._of_module = module, _join_set(of_module(type(module)), module, MODULE_METHODS)
        self._of_callbacks = [
            (callback, _join_set(of_callback(type(callback)), callback, CALLBACK_HOOKS)) for callback in callbacks
        ]
        self._of_anybody = self._of_module.union(*(hooks for _, hooks in self._of_callbacks))

    def overridden(self, name: str) -> bool:
        """Return True if the module has its own `name`."""
        return name in self._of_module

    def callbacks(self, name: str, only: Callable[[Callback], bool] = lambda callback: True) -> list[Hook]:
        """Return the hook `name` of each callback that overrides it, bound to trainer and module."""
        module = self._module
        return [
            partial(getattr(callback, name), self._trainer, module)
            for callback, hooks in self._of_callbacks
            if name in hooks and only(callback)
        ]

    def find(self, name: str) -> Hook | None:
        """Return one function that calls every override of `name`, or `None` if there is none.

        The function returns the result of the module's own hook.
        """
        if name not in self._of_anybody:
            return None
        return self._joined(name, [*self.callbacks(name), *self.own(name)])

    def own(self, name: str) -> list[Hook]:
        """Return the module's own `name`, if it has one."""
        return [getattr(self._module, name)] if self.overridden(name) else []

    def epoch_end(self) -> Hook | None:
        """Return `on_train_epoch_end`; callbacks that monitor come after the module, which may log what they read."""
        name = "on_train_epoch_end"
        first = self.callbacks(name, lambda callback: not isinstance(callback, EarlyStopping | Checkpoint))
        last = self.callbacks(name, lambda callback: isinstance(callback, EarlyStopping | Checkpoint))
        return self._joined(name, [*first, *self.own(name), *last])

    def run(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook that is called once in a fit."""
        hook = self.find(name)
        if hook is not None:
            hook(*args, **kwargs)

    def _joined(self, name: str, hooks: Sequence[Hook]) -> Hook | None:
        if not hooks:
            return None
        if len(hooks) == 1 and not self.overridden(name) and getattr(_owner(hooks[0]), "never_logs", False):
            return hooks[0]
        module_last = self.overridden(name)
        enter, names = self._log_sheet.enter, vars(self._module)

        def call(*args: Any, **kwargs: Any) -> Any:
            before = names["_current_fx_name"]
            enter(name)
            result = None
            for hook in hooks:
                result = hook(*args, **kwargs)
            enter(before)
            return result if module_last else None

        return call


def _owner(hook: Hook) -> Any:
    """Return the object whose method `hook` is."""
    return getattr(getattr(hook, "func", hook), "__self__", None)


KNOWN_ARGUMENTS = frozenset((*FORWARDED, "default_root_dir"))
PRECISIONS = (Precision, MixedPrecision, DoublePrecision, HalfPrecision)
STEER_THE_LOOP = (Checkpoint, ProgressBar, BatchSizeFinder, LearningRateFinder, SWA, Timer)
NOT_CALLED = ("log", "configure_callbacks", "configure_sharded_model", "toggle_optimizer", "manual_backward")
"""Methods of a LightningModule that the fast loop, or Lightning on its behalf, would bypass if overridden."""


def find_run_refusal(arguments: Mapping[str, Any], callbacks: Iterable[Callback], base: Trainer) -> str | None:
    """Return the reason why no visit of a run can use the fast loop, or `None` if there is none."""
    unknown = sorted(arguments.keys() - KNOWN_ARGUMENTS)
    if unknown:
        return f"it does not know the Trainer argument {unknown[0]}"
    strategy, devices = arguments.get("strategy", "auto"), arguments.get("devices", "auto")
    if strategy not in ("auto", "single_device") or arguments.get("num_nodes", 1) != 1:
        return f"it works on one device, and strategy is {strategy!r}"
    on_cpu = type(base.accelerator) is CPUAccelerator
    if not (devices in (1, "1") or (devices == "auto" and on_cpu)):
        return f"it works on one device, and devices is {devices!r}"
    if type(base.strategy) is not SingleDeviceStrategy or not (on_cpu or type(base.accelerator) is CUDAAccelerator):
        return f"it works on one CPU or CUDA device, not on {type(base.accelerator).__name__}"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "this process is one of several that train together"
    if type(base.precision_plugin) not in PRECISIONS:
        return f"it does not know the precision plugin {type(base.precision_plugin).__name__}"
    plugins = arguments.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list | tuple) else [plugins]:
        if type(plugin) not in PRECISIONS:
            return f"it does not know the plugin {type(plugin).__name__}"
    for name, neutral in (("overfit_batches", 0), ("reload_dataloaders_every_n_epochs", 0)):
        if arguments.get(name, neutral) != neutral:
            return f"{name}={arguments[name]!r} is for Lightning's own loop"
    if arguments.get("profiler") is not None:  # `base` has none
        return f"profiler={arguments['profiler']!r} measures Lightning's own loop"
    if arguments.get("check_val_every_n_epoch") is not None:
        return "check_val_every_n_epoch asks for validation inside local training"
    if len(getattr(base, "callbacks", [])) > 1 or os.environ.get("PL_SEED_WORKERS", "0") not in ("", "0"):
        return "the environment adds callbacks or worker seeds to every Trainer"
    for callback in callbacks:
        if isinstance(callback, STEER_THE_LOOP):
            return f"the callback {type(callback).__name__} steers Lightning's own loop"
    return None


def find_visit_refusal(module: LightningModule, loader: Any, limit: int | float | None) -> str | None:
    """Return the reason why a fit cannot use the fast loop, or `None` if there is none."""
    if set(vars(module)) & {"log", "log_dict", "training_step"}:
        return f"a method of {type(module).__name__} is set on the instance"
    return find_loader_refusal(loader, limit) or find_class_refusal(type(module)) or of_hyperparameters(module)


def find_loader_refusal(loader: Any, limit: int | float | None) -> str | None:
    """Return the reason why the fast loop cannot iterate a loader, or `None` if there is none."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return f"it needs a torch DataLoader over a map-style dataset, not {type(loader).__name__}"
    return "there is no batch" if num_batches(loader, limit) == 0 else None


@per_class
def find_class_refusal(kind: type[LightningModule]) -> str | None:
    """Return the reason why modules of a class cannot use the fast loop, or `None` if there is none."""
    for name in NOT_CALLED:
        if name in of_module(kind):
            return f"{kind.__name__} overrides {name}"
    for name in ("dataloader_iter", "optimizer_idx"):
        if is_param_in_hook_signature(kind.training_step, name, explicit=True):
            return f"{kind.__name__}.training_step takes {name}"
    return None


def of_hyperparameters(module: LightningModule) -> str | None:
    """Return a hyper-parameter that cannot be pickled, as a reason. Lightning drops such ones when a fit starts."""
    for name, value in module.hparams.items():
        if type(value) not in (int, float, str, bool, type(None)) and not is_picklable(value):
            return f"the hyper-parameter {name} of {type(module).__name__} cannot be pickled"
    return None


def num_batches(loader: DataLoader[Any], limit: int | float | None) -> int:
    """Return the batches of an epoch under a limit, in the form of `limit_train_batches`."""
    return limited(len(loader), limit)
