"""The models that a server keeps, their architectures, and what of them travels: :class:`KeepsModels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule

from fedlightning.federation.architectures import Architecture, architectures_of
from fedlightning.federation.server_fit import TrainsAtServer
from fedlightning.hooks import CallbackList, FederatedCallback, ServerModels
from fedlightning.layers import expand
from fedlightning.messages import GLOBAL
from fedlightning.tensors import EntryKind, State, clone, load_state, module_state

if TYPE_CHECKING:
    from fedlightning.federation.server import Server


class KeepsModels(TrainsAtServer):
    """The part of a :class:`~fedlightning.federation.server.Server` that knows its models; attributes: see there."""

    callbacks: CallbackList
    clients: list[str]
    held_out: list[str]
    float_buffers: str
    models: dict[str, State]
    architectures: dict[str, Architecture]
    model_architectures: dict[str, str]
    checkpoints: dict[str, dict[str, Any]]
    combining: str
    _own: Architecture
    _choosers: list[FederatedCallback]
    _unchosen: dict[str, tuple[str, ...]]

    def rebuild(self) -> None:
        """Build the architectures anew: the blueprint has another template, that of a resumed run."""
        self.architectures = architectures_of(self.blueprint)
        self._own = self.architectures[self._own.name]

    def architecture(self, model: str = GLOBAL) -> Architecture:
        """Return the architecture of one of the server's models."""
        name = self.model_architectures.get(model)
        return self._own if name is None else self.architectures[name]

    def architecture_of(self, client: str) -> Architecture:
        """Return the architecture of a client's model."""
        return self.architectures[self.blueprint.architecture_of(client)]

    @property
    def is_mixed(self) -> bool:
        """Whether clients, or clients and the global model, have models of different architectures."""
        if not self.blueprint.assigned:
            return False
        names = {self.blueprint.architecture_of(client) for client in (*self.clients, *self.held_out)}
        return bool(names - {self._own.name})

    def add_model(self, key: str, architecture: str | None = None, state: State | None = None) -> None:
        """Add a model, or replace one. It is saved with the run, and jobs may name it."""
        name = self._own.name if architecture is None else architecture
        if name not in self.architectures:
            raise ValueError(
                f"There is no architecture '{name}' for model '{key}'. There are {list(self.architectures)}."
            )
        own = self.architectures[name]
        found = clone(module_state(own.module)) if state is None else dict(state)
        differing = sorted({name: value.shape for name, value in found.items()}.items() ^ own.shapes.items())
        if differing:
            raise ValueError(f"Model '{key}' is no '{name}': '{differing[0][0]}' differs.")
        self.models[key] = found
        self.model_architectures.pop(key, None)
        if own is not self._own:
            self.model_architectures[key] = name

    def model_of(self, client: str) -> str:
        """Return the key of the model that a client is sent: a callback's answer, or the global one."""
        owner = self.callbacks.answering(ServerModels, "model_of")
        return GLOBAL if owner is None else owner.model_of(cast("Server", self), client)

    def selected(self, name: str, client: str | None = None) -> dict[str, Any] | None:
        """Return a model of the server that a checkpoint callback has selected, with its score; `None` if there is none."""
        model = GLOBAL if client is None else self.model_of(client)
        found = (kept for kept in self.checkpoints.values() if (kept["name"], kept.get("of", GLOBAL)) == (name, model))
        return next(found, None)

    @property
    def module(self) -> LightningModule:
        """A module of the global model's architecture as the federation began, for names and layers."""
        return self._own.module

    @property
    def kinds(self) -> dict[str, EntryKind]:
        """Kind of every entry of the global model."""
        return self._own.kinds

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every entry of the global model."""
        return self._own.shapes

    @property
    def model(self) -> State:
        """The global model's state."""
        return self.models[GLOBAL]

    @property
    def trainable(self) -> list[str]:
        """Names of the trainable parameters: the only entries server optimizers and noise may touch.

        Those of the global model; while the updates of another model are combined, that model's.
        """
        return self.architecture(self.combining).trainable

    def module_with(self, state: State, model: str = GLOBAL) -> LightningModule:
        """Build a module that holds `state`."""
        module = self.blueprint.build("server", self.architecture(model).name)
        load_state(module, state)
        return module

    def shared_names(self, without: FederatedCallback | None = None, *, model: str = GLOBAL) -> tuple[str, ...]:
        """Return the names that travel this round: the callbacks' answers, intersected; every entry by default.

        An entry that is tied under several names travels only if all of its names do.
        """
        return self.shared_in(self.architecture(model).name, without)

    def shared_in(self, architecture: str, without: FederatedCallback | None = None) -> tuple[str, ...]:
        """Return the names that travel of a model of an architecture, whether or not the server has one."""
        own = self.architectures[architecture]
        if not self._choosers and own.name in self._unchosen:
            return self._unchosen[own.name]
        names = list(own.kinds)
        for callback in self._choosers:
            answer = None if callback is without else callback.shared_names(cast("Server", self), own.module)
            if answer is not None:
                chosen = set(expand(answer, own.kinds))
                names = [name for name in names if name in chosen]
        if self.float_buffers == "local":
            names = [name for name in names if own.kinds[name] in ("trainable", "frozen")]
        travelling = set(names)
        found = tuple(name for name in names if own.tied.get(name, travelling) <= travelling)
        self._unchosen[own.name] = found
        return found

    def returned_names(self, *, model: str = GLOBAL) -> tuple[str, ...]:
        """Return the shared names that an ordinary visit sends back; without buffers where those are the server's."""
        return self._without_server_buffers(self.shared_names(model=model), self.architecture(model))

    def _without_server_buffers(self, names: tuple[str, ...], own: Architecture) -> tuple[str, ...]:
        if self.float_buffers != "server":
            return names
        return tuple(name for name in names if own.kinds[name] in ("trainable", "frozen"))

    def global_module(self, client: str | None = None) -> LightningModule | None:
        """Return the model of stage G; by default there is one exactly when every entry of the model travels."""
        owner = self.callbacks.answering(ServerModels, "global_module")
        if owner is not None:
            return owner.global_module(cast("Server", self), client)
        if self.is_mixed and client is None:
            return None
        model = GLOBAL if client is None else self.model_of(client)
        if len(self.shared_names(model=model)) < len(self.architecture(model).kinds):
            return None
        if client is not None and self.architecture(model) is not self.architecture_of(client):
            return None
        return self.module_with(self.models[model], model)

    def global_with(self, state: State, model: str = GLOBAL) -> LightningModule:
        """Build the model of stage G with other entries, such as those of a selected checkpoint."""
        has_own = model == GLOBAL and self.callbacks.role("global_module") is not None
        module = self.global_module(None) if has_own else None
        if module is None:
            return self.module_with(state, model)
        load_state(module, state)
        return module
