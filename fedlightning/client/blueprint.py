"""The blueprint that every model of a federation is built from.

Models are copies of a template, by `copy.deepcopy` or another :class:`ModuleCopier`. :class:`ClientParts` is what attaches to
the client side of a federation from outside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from fedlightning.client.evaluator import StepLosses, make_evaluator
from fedlightning.client.requests import LocalSettings
from fedlightning.compat.lazy_clones import copy_module
from fedlightning.compat.lightning_runs import configure, detached
from fedlightning.contract import CallbackList, FederatedCallback
from fedlightning.errors import ConfigurationError
from fedlightning.models.client_models import ClientModels
from fedlightning.seeding import isolated
from fedlightning.tensors import State, entry_kinds, is_same, module_state, select, state_digest
from fedlightning.tensors.entries import keeps_vectors


class ModuleCopier(Protocol):
    """Makes deep copies of one module."""

    module: nn.Module

    @property
    def is_complete(self) -> bool:
        """Whether :meth:`copy` can replace every tensor of the module by name."""

    def holds(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether :meth:`copy` can replace the module's own entries by `state`."""

    def copy(self, state: Mapping[str, Tensor] | None = None) -> Any:
        """Return a new deep copy; with `state` instead of its own entries where :meth:`holds` says so."""


class DeepCopier:
    """Copies by `copy.deepcopy`.

    Args:
        module: The module.
    """

    is_complete = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def holds(self, state: Mapping[str, Tensor]) -> bool:
        """Return False: copies are of the whole module."""
        return False

    def copy(self, state: Mapping[str, Tensor] | None = None) -> Any:
        """Return a new deep copy."""
        return deep_copy(self.module)


def deep_copy(module: nn.Module) -> Any:
    """Return `copy.deepcopy(module)`; large parameters take no memory until somebody writes to them.

    Raises:
        ConfigurationError: Names the attribute that cannot be copied.
    """
    try:
        return copy_module(module)
    except Exception as error:
        raise _uncopyable(module, error) from error


def _uncopyable(module: nn.Module, error: Exception) -> Exception:
    """Return the refusal of a module with an attribute that cannot be copied; the error itself if it is none of them."""
    bare = vars(nn.Module())  # what every module has: its parts, which are looked at by themselves
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            try:
                None if name in bare else copy.deepcopy(value)
            except Exception as reason:
                kind = type(child).__name__
                return ConfigurationError(
                    f"{type(module).__name__} cannot be copied for each client: '{f'{path}.{name}'.lstrip('.')}' is a "
                    f"{type(value).__name__} ({' '.join(str(reason).split())}). Make it where it is first used, or give "
                    f"{kind} a __getstate__ that leaves it out and a __setstate__ that makes it anew."
                )
    return error


@dataclass(frozen=True)
class ClientParts:
    """What trains and scores clients faster, or guards them; a client without any gets the same models and scores.

    A blueprint carries them, so they are wherever its clients are. They are classes and functions, which a worker process can
    be sent.

    Attributes:
        fitters: Made from the blueprint, and asked before Lightning's Trainer to train
            (:class:`~fedlightning.client.fit.Fitter`), in this order.
        evaluators: The same for scores (:class:`~fedlightning.client.runtime.Evaluator`).
        loop_checks: Called with each loop of a Trainer that has ended: with the loop, the name of its step, the module, its
            batches, their number if it is known, and `fitting=False` for a loop that scores.
        leave_checks: Called with the blueprint, a client and its update as the last thing of a visit; what one refuses stays.
        copier: Makes the copies of a template (:class:`~fedlightning.client.blueprint.ModuleCopier`).
    """

    fitters: tuple[Callable[[Any], Any], ...] = ()
    evaluators: tuple[Callable[[Any], Any], ...] = ()
    loop_checks: tuple[Callable[..., None], ...] = ()
    leave_checks: tuple[Callable[[Any, Any, Any], None], ...] = ()
    copier: Callable[[nn.Module], ModuleCopier] = DeepCopier


BUILDERS = ("wrap_module", "on_build", "on_receive")
"""Events in which callbacks take part in building a client's module."""


class _Recipe:
    """How copies of one template are made.

    Attributes:
        copier: Makes copies of the template.
        is_wrapped: Whether a client's module is more than a copy of it.
        is_plain: Whether it is a copy, and no callback takes part in building it.
        entries: The template's entries.
        reference: The server's module, once it was asked for.
        base: Frozen parameters, as every module is built with them.
        began_with: Hash of those of the template's parameters that are, or become, frozen ones.
        seen: The base's tensors, each with torch's count of its edits.
    """

    def __init__(self, template: LightningModule, blueprint: Blueprint) -> None:
        self.copier: ModuleCopier = blueprint.parts.copier(template)
        claimed = {name for name in BUILDERS for callback in blueprint.callbacks if callback.claims(name)}
        self.is_wrapped = "wrap_module" in claimed or is_overridden("configure_model", template)
        self.is_plain = self.copier.is_complete and not (self.is_wrapped or claimed or blueprint.converts)
        self.is_plain = self.is_plain and not keeps_vectors(module_state(template))
        self.entries = module_state(template)
        self.reference: LightningModule | None = None
        self.base: State | None = None
        self.began_with = ""
        self.base_hash: str | None = None
        self.versions: list[tuple[Tensor, int]] = []


@dataclass
class Blueprint:
    """The template, the callbacks and the settings of a federation, and the modules built from them. It holds no data,
    so a server that never sees data can have one.

    Attributes:
        template: The user's module; it is copied, never trained. :class:`~fedlightning.models.ClientModels`: several.
        callbacks: The federated callbacks.
        settings: How every client trains.
        assigned: Name of each client's architecture, where there are several; the server has the default one.
        privacy: Epsilon and delta that were spent on the model that the federation begins with; empty: none is known.
        parts: What attaches to its clients.
        tools: What a process makes once for its models, by name; it is sent to nobody.
    """

    template: LightningModule
    callbacks: CallbackList
    settings: LocalSettings
    assigned: Mapping[str, str] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    parts: ClientParts = field(default_factory=ClientParts)
    tools: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    losses: StepLosses = field(init=False, repr=False, default_factory=StepLosses)
    _trainer: Trainer | None = field(init=False, default=None, repr=False)
    _recipes: dict[str, _Recipe] = field(init=False, default_factory=dict, repr=False)  # by architecture

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

    def without_callbacks(self, ordinary: list[Callback], **settings: Any) -> Blueprint:
        """Return a blueprint of the same template whose fits only have the given Lightning callbacks, and other settings."""
        settings_of_fits = replace(self.settings, callbacks=ordinary, **settings)
        blueprint = replace(self, callbacks=CallbackList([]), settings=settings_of_fits)
        if getattr(self.precision, "scaler", None) is None:  # a gradient scaler's state must not move
            blueprint._trainer = self.trainer
        return blueprint

    # -- architectures -----------------------------------------------------------------------------------------------
    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the architectures; ``("",)`` where everybody has the template's."""
        return tuple(self.template.models) if isinstance(self.template, ClientModels) else ("",)

    def architecture_of(self, owner: str) -> str:
        """Return the name of the architecture that a client's module has, or the server's global model."""
        default = self.template.default if isinstance(self.template, ClientModels) else ""
        return self.assigned.get(owner, default)

    def template_of(self, architecture: str) -> LightningModule:
        """Return the module of which clients with an architecture get copies."""
        return self.template.model(architecture) if isinstance(self.template, ClientModels) else self.template

    # -- modules -----------------------------------------------------------------------------------------------------
    def _find_recipe(self, architecture: str) -> _Recipe:
        template, recipe = self.template_of(architecture), self._recipes.get(architecture)
        if recipe is None or recipe.copier.module is not template:  # a resumed run has its own template
            recipe = self._recipes[architecture] = _Recipe(template, self)
        return recipe

    def build(self, owner: str, architecture: str | None = None) -> LightningModule:
        """Build a fresh copy of the template, wrapped by every callback. Equal owners get equal bits."""
        recipe = self._find_recipe(self.architecture_of(owner) if architecture is None else architecture)
        with isolated(self.settings.seed_of("initialisation"), "build") if recipe.is_wrapped else nullcontext():
            module: LightningModule = detached(recipe.copier.copy())
            if recipe.is_wrapped:
                self._configure(module)
                for callback in self.callbacks:
                    module = self._wrapped(module, callback, owner)
        return self.convert(module)

    def _configure(self, module: LightningModule) -> None:
        """Let a module make its layers; it sees a trainer with the run's arguments, and no data."""
        try:
            configure(module, lambda: self.trainer)
        except Exception as error:
            raise ConfigurationError(
                f"{type(module).__name__}.configure_model fails where models are made, before there are data or a fit: "
                f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}. Give what it needs to __init__."
            ) from error

    def reference(self, architecture: str) -> LightningModule:
        """Return the server's module of an architecture, built once, to look at; it is not to be changed."""
        recipe = self._find_recipe(architecture)
        if recipe.reference is None:
            recipe.reference = self.build("server", architecture)
            if recipe.is_plain:  # the same numbers need no memory of their own; frozen ones are the server's model too
                entries = {**dict(recipe.reference.named_parameters()), **dict(recipe.reference.named_buffers())}
                kinds = entry_kinds(recipe.reference)
                for name, value in recipe.entries.items():
                    if kinds[name] != "frozen":
                        entries[name].data = value
        return recipe.reference

    def base(self, architecture: str) -> State:
        """Return the frozen parameters of an architecture as every module is built with them.

        The server's model shares their memory: one that somebody has edited there in place is not a base any more.
        """
        recipe = self._find_recipe(architecture)
        if recipe.base is not None and any(value._version != version for value, version in recipe.versions):
            recipe.base = recipe.base_hash = recipe.reference = None
        if recipe.base is None:
            module = self.reference(architecture)
            frozen = [name for name, kind in entry_kinds(module).items() if kind == "frozen"]
            recipe.base = module_state(module, frozen)
            recipe.began_with = self._frozen_now(recipe)
            recipe.versions = [(value, value._version) for value in recipe.base.values()]
        return recipe.base

    def _frozen_now(self, recipe: _Recipe) -> str:
        """Return a hash of the template's parameters that are the base; of a wrapped module's any may be."""
        template = recipe.copier.module
        names = {name for name, _ in template.named_parameters(remove_duplicate=False)}
        if not recipe.base:
            return ""
        return state_digest(select(module_state(template), names if recipe.is_wrapped else names & recipe.base.keys()))

    def refuse_changed(self) -> None:
        """Refuse a template whose frozen parameters are others than at first: states are kept without them.

        Raises:
            ConfigurationError: If its user has trained or edited it since.
        """
        for recipe in self._recipes.values():
            if recipe.base is not None and recipe.began_with != self._frozen_now(recipe):
                raise ConfigurationError(
                    f"The parameters of {type(recipe.copier.module).__name__} have changed since the federation was given "
                    "it, and what is frozen in the models of its clients is taken from there. Train or edit a copy of it "
                    "(copy.deepcopy), or give a trainer the unchanged module and call restore."
                )

    def base_hash(self, architecture: str) -> str:
        """Return the hash of :meth:`base`, by which a state knows the frozen parameters that it does not hold."""
        base, recipe = self.base(architecture), self._find_recipe(architecture)
        if recipe.base_hash is None:
            recipe.base_hash = state_digest(base)
        return recipe.base_hash

    def without_base(self, state: State, architecture: str, but: Collection[str] = ()) -> State:
        """Return a state without the frozen parameters that are as every module is built, `but` some: nobody keeps these."""
        base = self.base(architecture)
        return {
            name: value
            for name, value in state.items()
            if name in but or not (name in base and is_same(value, base[name]))
        }

    def unlike_base(self, module: LightningModule, architecture: str) -> frozenset[str]:
        """Return the frozen parameters of a new module that callbacks have made other ones for its owner."""
        base = self.base(architecture)
        frozen = module_state(module, base) if base else {}
        return frozenset(name for name, value in frozen.items() if not is_same(value, base[name]))

    def _wrapped(self, module: LightningModule, callback: FederatedCallback, owner: str) -> LightningModule:
        """Let a callback wrap a module; name those that had wrapped it before if that fails."""
        try:
            return callback.wrap_module(module, owner)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            wrapping = [other.key for other in self.callbacks if other.claims("wrap_module")]
            before = wrapping[: wrapping.index(callback.key)] if callback.key in wrapping else []
            if isinstance(error, ValueError) and (not before or callback.key in str(error)):
                raise  # a sentence of its own
            after = f" after {' and '.join(before)}, which changed its layers" if before else ""
            way = f" Remove one of {', '.join(wrapping)}." if before else ""
            raise ConfigurationError(
                f"{callback.key} cannot wrap {type(self.template).__name__}{after}: {type(error).__name__}: "
                f"{' '.join(str(error).split()).rstrip('.')}.{way}"
            ) from error

    def build_around(self, entries: State, owner: str) -> LightningModule:
        """Build an owner's module around given entries in one go; where no callback takes part in building it."""
        return detached(self._find_recipe(self.architecture_of(owner)).copier.copy(entries))

    def plain_entries(self, merged: State, owner: str) -> State | None:
        """Return all entries of an owner's module that holds `merged`, not copied."""
        recipe = self._find_recipe(self.architecture_of(owner))
        return recipe.entries | merged if recipe.is_plain and recipe.copier.holds(merged) else None
