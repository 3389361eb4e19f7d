"""Hooks that a module and its callbacks override: the fast loop calls these and no others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from fedlightning.fast.log_sheet import LogCollector
from fedlightning.fast.trainer import FastTrainer

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


class Hooks:
    """Calls hooks in Lightning's order: callbacks as listed, then the module.

    Args:
        trainer: Stand-in for the Trainer, with its callbacks and its module.
        collector: Is told which hook runs.
    """

    def __init__(self, trainer: FastTrainer, collector: LogCollector) -> None:
        self._trainer, self._collector = trainer, collector
        module, callbacks = trainer.lightning_module, trainer.callbacks
        self._module, self._of_module = module, of_module(type(module)) | (vars(module).keys() & MODULE_METHODS)
        self._of_callbacks = [
            (callback, of_callback(type(callback)) | (vars(callback).keys() & CALLBACK_HOOKS)) for callback in callbacks
        ]
        self._of_anybody = self._of_module.union(*(own for _, own in self._of_callbacks))

    def overridden(self, name: str) -> bool:
        """Return True if the module has its own `name`."""
        return name in self._of_module

    def callbacks(self, name: str, only: Callable[[Callback], bool] = lambda callback: True) -> list[Hook]:
        """Return the hook `name` of each callback that overrides it, bound to trainer and module."""
        module = self._module
        return [
            partial(getattr(callback, name), self._trainer, module)
            for callback, own in self._of_callbacks
            if name in own and only(callback)
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
        enter, names = self._collector.enter, vars(self._module)

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
