"""Silence for the many short Lightning runs inside a federation: one place that knows what to mute.

It also says how a module stands to the trainer that it is attached to (which one, on which device, what its steps are called
with), and gives objects that are made from a configuration hyper-parameters of their own.

LightningCLI hands the configuration of `model` (or `data`) to `save_hyperparameters` by a context variable, for
whatever object calls it meanwhile. So it also reaches objects inside the one that the configuration describes: a data
module inside a wrapper, or a module that another one makes in its constructor, would silently take the values of the
outer one.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin, _given_hyperparameters_context
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from fedlightning.compat.lazy_clones import copy_module

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""What Lightning makes an object with when it reads the hyper-parameters back from a checkpoint."""
PLAIN = (bool, int, float, str)


class Maker:
    """A function that makes the objects of one section of a configuration, for `ArgumentParser.add_instantiator`.

    The section's own object gets its configuration as hyper-parameters, as from LightningCLI. Every other object has
    those that it would have in Python.

    Args:
        section: Function that returns the section as plain values, with `class_path` and `init_args`.
    """

    def __init__(self, section: Callable[[], Any]) -> None:
        self._section = section

    def __call__(
        self, class_type: type, *args: Any, applied_instantiation_links: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        section = self._section()
        if not isinstance(section, Mapping) or args or not describes(section, class_type, kwargs):
            return class_type(*args, **kwargs)
        values = {
            "_class_path": section["class_path"],
            **(section.get("init_args") or {}),
            **(section.get("dict_kwargs") or {}),
            "_instantiator": INSTANTIATOR,
        }
        if type(class_type).__call__ is not type.__call__:  # it makes its objects in another way
            with _given_hyperparameters_context(values, INSTANTIATOR):
                return class_type(**kwargs)
        instance: Any = class_type.__new__(class_type, **kwargs)  # type: ignore[call-overload]
        with only_for(instance, values):
            instance.__init__(**kwargs)
        return instance


@contextmanager
def only_for(instance: Any, values: dict[str, Any]) -> Iterator[None]:
    """Within the block, `save_hyperparameters` of one object takes the values given, that of others their own."""
    original = HyperparametersMixin.save_hyperparameters

    def save(self: Any, *args: Any, ignore: Any = None, frame: Any = None, logger: bool = True) -> None:
        if frame is None:
            current = inspect.currentframe()
            frame = None if current is None else current.f_back
        if self is not instance:
            original(self, *args, ignore=ignore, frame=frame, logger=logger)
            return
        with _given_hyperparameters_context(values, INSTANTIATOR):
            original(self, *args, ignore=ignore, frame=frame, logger=logger)

    HyperparametersMixin.save_hyperparameters = save  # type: ignore[method-assign]
    try:
        yield
    finally:
        HyperparametersMixin.save_hyperparameters = original  # type: ignore[method-assign]


def describes(section: Mapping[str, Any], class_type: type, arguments: Mapping[str, Any]) -> bool:
    """Return True if a section of a configuration is that of an object with these arguments.

    Example:
        >>> from fedlightning.compat.lightning_runs import describes
        >>> section = {"class_path": "collections.Counter", "init_args": {"size": 3}}
        >>> from collections import Counter, OrderedDict
        >>> describes(section, Counter, {"size": 3}), describes(section, Counter, {"size": 4})
        (True, False)
        >>> describes(section, OrderedDict, {"size": 3})
        False
    """
    if _imported(section.get("class_path")) is not class_type:
        return False
    for name, setting in (section.get("init_args") or {}).items():
        value = arguments.get(name)
        if type(setting) in PLAIN and type(value) in PLAIN and setting != value:
            return False
        if isinstance(setting, Mapping) and "class_path" in setting:
            inner = _imported(setting["class_path"])
            if isinstance(inner, type) and not callable(value) and type(value) is not inner:
                return False
    return True


def _imported(path: Any) -> Any:
    """Return the object of an import path, or `None`."""
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def trainer_of(module: LightningModule) -> Any:
    """The trainer that ``module`` is attached to, or ``None``. Nobody else reads this private attribute.

    The public property raises where there is none.
    """
    return vars(module).get("_trainer")


@contextmanager
def attached(module: LightningModule, trainer: Any) -> Iterator[None]:
    """A block in which ``trainer`` (or what stands in its place, or ``None``) is the module's trainer."""
    before = trainer_of(module)
    module.trainer = trainer
    try:
        yield
    finally:
        module.trainer = before


@contextmanager
def on_device(module: LightningModule, device: torch.device) -> Iterator[None]:
    """A block in which the module is on a device: a step may read ``self.device``."""
    home = module.device
    if home != device:
        module.to(device)
    try:
        yield
    finally:
        if home != device:
            module.to(home)


def detached(module: LightningModule) -> LightningModule:
    """The module itself, without a trainer from now on (to set it takes 5 us, so not where there is none)."""
    if trainer_of(module) is not None:
        module.trainer = None
    return module


def detached_copy(module: LightningModule) -> LightningModule:
    """A deep copy of a module without the trainer it may be attached to, which would be copied along."""
    with attached(module, None):
        return copy_module(module)


def configure(module: LightningModule, trainer: Callable[[], Any]) -> None:
    """Let a module make its layers, where it does so late; `trainer` gives the one that it sees, if it has none."""
    if is_overridden("configure_model", module):
        with attached(module, trainer_of(module) or trainer()):
            module.configure_model()


def to_device(module: LightningModule, device: torch.device) -> None:
    """Move a module, unless all that it holds is on the CPU and stays there: ``to`` walks over every metric's state."""
    cpu = torch.device("cpu")
    if device == cpu == module.device and all(
        value.device == cpu for value in itertools.chain(module.parameters(), module.buffers())
    ):
        return
    module.to(device)


def takes_index(step: Callable[..., Any]) -> bool:
    """Return True if a `training_step`, `validation_step` or `test_step` wants the batch's index beside the batch."""
    return bool(is_param_in_hook_signature(step, "batch_idx", min_args=2))


def class_takes_index(kind: Any, name: str) -> bool:
    """Return :func:`takes_index` of the method `name` of a class; looked up once per class."""
    return _looked_up(kind, name)


@cache
def _looked_up(kind: Any, name: str) -> bool:
    step = getattr(kind, name)
    return callable(step) and takes_index(step)


_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero", "lightning")
_HARMLESS = (
    ".*sync_dist=True.*",
    ".*have no `val_dataloader`.*",
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*GPU available but not used.*",
    ".*Trying to infer the `batch_size`.*",
    ".*You are trying to `self.log\\(\\)` but the `self.trainer` reference is not registered.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*no optimizer.*",
    ".*The number of training batches.*",
    ".*Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*",
    ".*The `srun` command is available.*",
    ".*Experiment logs directory .* exists.*",
    ".*in eval mode at the start of training.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",
)

_FILTER = ("ignore", re.compile("|".join(_HARMLESS), re.IGNORECASE), Warning, None, 0)


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block Lightning reports errors only, and warnings that every visit would repeat are dropped."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    # A change of level makes every logger of the program look up its own anew, so those that are quiet stay untouched.
    levels = {logger: logger.level for logger in loggers if logger.level != logging.ERROR}
    _set(dict.fromkeys(levels, logging.ERROR))
    try:
        with without_warnings():
            yield
    finally:
        _set(levels)


def _set(levels: dict[logging.Logger, int]) -> None:
    for logger, level in levels.items():
        logger.level = level
    for logger, level in list(levels.items())[-1:]:
        logger.setLevel(level)  # makes all loggers look up their levels anew: once is enough for several


@contextmanager
def without_warnings() -> Iterator[None]:
    """Within the block warnings that every visit would repeat are dropped. To change a logger's level costs far more."""
    with warnings.catch_warnings():
        warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]  # filterwarnings() would make it anew each time
        yield
