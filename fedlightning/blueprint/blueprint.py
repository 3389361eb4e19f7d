"""What every model of a federation is built from: :class:`Blueprint`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden

from fedlightning.blueprint.copier import Copier
from fedlightning.blueprint.evaluator import StepLosses, make_evaluator
from fedlightning.blueprint.settings import LocalSettings
from fedlightning.compat.attached import detached
from fedlightning.errors import ConfigurationError
from fedlightning.hooks import CallbackList, FederatedCallback
from fedlightning.seeding import isolated
from fedlightning.tensors import State, module_state

BUILDERS = ("wrap_module", "on_build", "on_receive")
"""Events in which callbacks take part in building a client's module."""


@dataclass
class Blueprint:
    """The template, the callbacks and the settings of a federation, and the modules built from them. It holds no data,
    so a server that never sees data can have one.

    Attributes:
        template: The user's module; it is copied, never trained.
        callbacks: The federated callbacks.
        settings: How every client trains.
    """

    template: LightningModule
    callbacks: CallbackList
    settings: LocalSettings
    losses: StepLosses = field(init=False, repr=False, default_factory=StepLosses)
    _trainer: Trainer | None = field(init=False, default=None, repr=False)
    _copier: Copier | None = field(init=False, default=None, repr=False)
    _is_wrapped: bool = field(init=False, default=False)  # a client's module is more than a copy of the template
    _is_plain: bool = field(init=False, default=False)  # it is a copy, and no callback takes part in building it
    _entries: State = field(init=False, default_factory=dict, repr=False)  # the template's

    # -- device and precision ----------------------------------------------------------------------------------------
    @property
    def trainer(self) -> Trainer:
        """A quiet Trainer with the run's arguments for evaluation on one device, made on first access.

        It scores every model, and the run's device and precision are read from it.
        """
        if self._trainer is None:
            self._trainer = make_evaluator(self.settings.trainer_arguments, self.losses)
        return self._trainer

    @property
    def precision(self) -> Any:
        """Lightning's precision plugin (autocast contexts)."""
        return self.trainer.precision_plugin

    @property
    def device(self) -> torch.device:
        """Device on which scores and gradients outside a fit are computed."""
        return self.trainer.strategy.root_device

    @property
    def converts(self) -> bool:
        """Whether :meth:`convert` changes anything."""
        return isinstance(self.precision, DoublePrecision | HalfPrecision)

    def convert(self, module: LightningModule) -> LightningModule:
        """Convert a module to the run's "true" precision, as Lightning does for a fit; states keep it between visits."""
        if self.converts:
            self.precision.convert_module(module)
        return module

    def without_callbacks(self, ordinary: list[Callback]) -> Blueprint:
        """Return a blueprint of the same template and settings whose fits only have the given Lightning callbacks."""
        made = Blueprint(self.template, CallbackList([]), replace(self.settings, callbacks=ordinary))
        if getattr(self.precision, "scaler", None) is None:  # a gradient scaler's state must not move
            made._trainer, made.losses = self.trainer, self.losses
        return made

    # -- modules -----------------------------------------------------------------------------------------------------
    @property
    def copier(self) -> Copier:
        """Makes copies of the template."""
        if self._copier is None or self._copier.module is not self.template:  # a resumed run has its own template
            self._copier = Copier(self.template)
            claimed = {name for name in BUILDERS for callback in self.callbacks if callback.claims(name)}
            self._is_wrapped = "wrap_module" in claimed or is_overridden("configure_model", self.template)
            self._is_plain = self._copier.is_complete and not (self._is_wrapped or claimed or self.converts)
            self._entries = module_state(self.template)
        return self._copier

    def build(self, owner: str) -> LightningModule:
        """Build a fresh copy of the template, wrapped by every callback. Equal owners get equal bits."""
        copier = self.copier
        with isolated(self.settings.seed, "build") if self._is_wrapped else nullcontext():
            module: LightningModule = detached(copier.copy())
            if self._is_wrapped:
                module.configure_model()
                for callback in self.callbacks:
                    module = self._wrapped(module, callback, owner)
        return self.convert(module)

    def _wrapped(self, module: LightningModule, callback: FederatedCallback, owner: str) -> LightningModule:
        """Let a callback wrap a module; name those that had wrapped it before if that fails."""
        try:
            return callback.wrap_module(module, owner)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            wrapping = [other.key for other in self.callbacks if other.claims("wrap_module")]
            before = wrapping[: wrapping.index(callback.key)] if callback.key in wrapping else []
            after = f" after {' and '.join(before)}, which changed its layers" if before else ""
            way = f" Remove one of {', '.join(wrapping)}." if before else ""
            raise ConfigurationError(
                f"{callback.key} cannot wrap {type(self.template).__name__}{after}: {type(error).__name__}: "
                f"{' '.join(str(error).split()).rstrip('.')}.{way}"
            ) from error

    def build_around(self, entries: State) -> LightningModule:
        """Build a module around given entries in one go; for clients whose module no callback takes part in building."""
        return detached(self.copier.copy(entries))

    def plain_entries(self, merged: State) -> State | None:
        """Return all entries of a client's module that holds `merged`, not copied.

        Args:
            merged: What the client keeps and what it was sent.

        Returns:
            The entries, or `None` if a callback takes part in building the module: then it must be built.
        """
        copier = self.copier
        return self._entries | merged if self._is_plain and copier.holds(merged) else None
