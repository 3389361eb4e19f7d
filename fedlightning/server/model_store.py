"""The models that a server keeps, and their architectures.

What the server knows of an architecture, and which callbacks are right where models differ: :class:`Architecture`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule

from fedlightning.client.blueprint import Blueprint
from fedlightning.contract import FederatedCallback
from fedlightning.contract.messages import GLOBAL
from fedlightning.errors import ConfigurationError
from fedlightning.scores.metric_names import bounds_of
from fedlightning.tensors import EntryKind, State, clone, entry_kinds, module_state, tied_names
from fedlightning.wrappers import user_class

if TYPE_CHECKING:
    from fedlightning.server.server import Server


@dataclass(frozen=True)
class Architecture:
    """One architecture: its entries as the federation began.

    Attributes:
        name: Its name in :class:`~fedlightning.models.ClientModels`; empty where everybody has the same.
        module: A module as the federation began, for names and layers.
        kinds: Kind of every entry, fixed before anything is frozen.
        trainable: Names of the trainable parameters.
        shapes: Shape of every entry.
        tied: By entry, all names under which it is tied.
        metric_bounds: What metrics can be, by their names without the split.
    """

    name: str
    module: LightningModule
    kinds: dict[str, EntryKind] = field(init=False)
    trainable: list[str] = field(init=False)
    shapes: dict[str, torch.Size] = field(init=False)
    tied: dict[str, frozenset[str]] = field(init=False)
    metric_bounds: dict[str, tuple[float, float]] = field(init=False)

    def __post_init__(self) -> None:
        shapes = {name: value.shape for name, value in module_state(self.module).items()}
        kinds = entry_kinds(self.module)
        fields = {"kinds": kinds, "shapes": shapes, "tied": tied_names(self.module)}
        fields["trainable"] = [name for name, kind in kinds.items() if kind == "trainable"]
        for name, value in (fields | {"metric_bounds": bounds_of(self.module.modules())}).items():
            object.__setattr__(self, name, value)

    def first_difference(self, other: Architecture, names: tuple[str, ...]) -> str | None:
        """Return the first of some entries of `other` that is not here in the same kind and shape; `None` if all are."""
        for name in names:
            if (self.kinds.get(name), self.shapes.get(name)) != (other.kinds[name], other.shapes[name]):
                return name
        return None


def architectures_of(blueprint: Blueprint) -> dict[str, Architecture]:
    """Return what is known of every architecture of a federation, by name."""
    return {name: Architecture(name, blueprint.reference(name)) for name in blueprint.architectures}


def describe(server: Server) -> dict[str, dict[str, Any]]:
    """Describe the architectures: class of the module, parameters, and which clients have it."""
    clients = (*server.clients, *server.held_out)
    return {
        name: {
            "class": user_class(architecture.module).__name__,
            "parameters": sum(parameter.numel() for parameter in architecture.module.parameters()),
            "clients": [client for client in clients if server.architecture_of(client) is architecture],
        }
        for name, architecture in server.models.architectures.items()
    }


def refuse_mixed(server: Server) -> None:
    """Refuse callbacks that are not written for several models at the server, or for clients' models that differ."""
    owner = server.callbacks.role("model_of")
    several = owner is not None and any(server.model_of(client) != GLOBAL for client in server.clients)
    for callback in server.callbacks if several and not server.is_mixed else ():
        if owner not in (None, callback) and not _is_right(callback):
            assert owner is not None
            raise ConfigurationError(
                f"{callback.key} works on the one global model, and {owner.key} keeps several. Remove one of them."
            )
    if not server.is_mixed:
        return
    for callback in server.callbacks:
        if not _is_right(callback):
            raise ConfigurationError(
                f"{callback.key} works on models of one architecture, and ClientModels gives clients several "
                f"({', '.join(server.models.architectures)}). Use a method for models that differ "
                "(docs/explanation/different_models.md), or one "
                "architecture for all."
            )


def _is_right(callback: FederatedCallback) -> bool:
    """Return whether a callback is right where models differ, or only watches."""
    facts = callback.facts
    return facts.mixes_architectures or not facts.takes_part


def refuse_uncommon(server: Server) -> None:
    """Refuse entries that would travel and that not all models have. Callbacks' own checks come before, and know more."""
    if not server.is_mixed:
        return
    for client in (*server.clients, *server.held_out):
        model = server.model_of(client) if server.callbacks.role("model_of") is None else None
        architecture = server.architecture_of(client)
        if model is not None and architecture is not server.architecture(model):
            names = server.shared_names(model=model)
            refuse_unlike(model, server.architecture(model), names, client, architecture)
            refuse_other_choice(server, model, names, client)


def refuse_unlike(
    model: str, sent: Architecture, names: tuple[str, ...], client: str, architecture: Architecture
) -> None:
    """Refuse to send a client entries that its model does not have."""
    name = None if architecture is sent else architecture.first_difference(sent, names)
    if name is not None:
        have = tuple(architecture.shapes[name]) if name in architecture.shapes else "missing"
        raise ConfigurationError(
            f"'{name}' travels between clients of different architectures: it is {tuple(sent.shapes[name])} in "
            f"'{sent.name}', the architecture of the {model} model, and {have} in '{architecture.name}', "
            f"which client '{client}' has. "
            "Only a part that all models have under the same names and shapes can be shared: use a method that shares "
            "predictions, prototypes or a common part (docs/explanation/different_models.md), or one architecture for all."
        )


def refuse_other_choice(server: Server, model: str, names: tuple[str, ...], client: str) -> None:
    """Refuse to send entries that the callbacks choose in the server's architecture, and others in a client's.

    A rule such as "all but the last layer" names other entries in a deeper network: a layer that is a client's own would
    travel, or one that should travel would stay.
    """
    sent, architecture = server.architecture(model), server.architecture_of(client)
    chosen = server.shared_in(architecture.name)
    differing = (
        [name for name in (*names, *chosen) if (name in names) != (name in chosen)] if architecture is not sent else []
    )
    if differing:
        name = differing[0]
        yes, no = (sent.name, architecture.name) if name in names else (architecture.name, sent.name)
        raise ConfigurationError(
            f"'{name}' travels in '{yes}' and not in '{no}', and client '{client}' has '{architecture.name}' "
            f"while the {model} model has '{sent.name}': what travels must be the same part of all models. "
            "Name the layers that all have in common (LGFedAvg(shared=...)), use a method for models that differ "
            "(docs/explanation/different_models.md), or one "
            "architecture for all."
        )


class ModelStore(dict[str, State]):
    """The server's models: by key (`"global"`, and more where an algorithm keeps several) the full state, on the CPU.

    Args:
        blueprint: What models are built from.
        float_buffers: What happens to running statistics: `"average"`, `"local"` or `"server"`.

    Attributes:
        architectures: By name, what is known of each architecture; one, called ``""``, where all clients have the same.
        main: The architecture of the global model.
        architecture_names: By model key, the name of its architecture, where that is not the global model's.
        combining: Key of the model whose updates are being combined: for `reduce`, `on_reduced` and `server_step`.
        usual_names: By architecture, the names that travel where no callback chooses, as far as they are known.
    """

    def __init__(self, blueprint: Blueprint, float_buffers: str = "average") -> None:
        super().__init__()
        self.float_buffers = float_buffers
        self.architectures: dict[str, Architecture] = architectures_of(blueprint)
        self.main = self.architectures[blueprint.architecture_of("server")]
        base = blueprint.base(self.main.name)  # one memory for all: entries are replaced, never edited
        not_frozen = clone({name: value for name, value in module_state(self.main.module).items() if name not in base})
        self[GLOBAL] = {name: not_frozen.get(name, value) for name, value in module_state(self.main.module).items()}
        self.architecture_names: dict[str, str] = {}
        self.combining = GLOBAL
        self.usual_names: dict[str, tuple[str, ...]] = {}

    def copy(self) -> ModelStore:
        """Return a store of the same models, in which entries can be replaced."""
        other = copy.copy(self)
        other.update({key: dict(state) for key, state in self.items()})
        other.architecture_names = dict(self.architecture_names)
        return other

    def rebuild(self, blueprint: Blueprint) -> None:
        """Build the architectures anew: the blueprint has another template, that of a resumed run."""
        self.architectures = architectures_of(blueprint)
        self.main = self.architectures[self.main.name]

    def architecture(self, key: str = GLOBAL) -> Architecture:
        """Return the architecture of a model."""
        name = self.architecture_names.get(key)
        return self.main if name is None else self.architectures[name]

    def add(self, key: str, architecture: str | None = None, state: State | None = None) -> None:
        """Add a model, or replace one. It is saved with the run, and jobs may name it.

        Args:
            key: The model's key.
            architecture: Name of its architecture; `None`: the global model's.
            state: Its entries; `None`: those with which the federation began.

        Raises:
            ValueError: If there is no such architecture, or the state is of another.
        """
        name = self.main.name if architecture is None else architecture
        if name not in self.architectures:
            raise ValueError(
                f"There is no architecture '{name}' for model '{key}'. There are {list(self.architectures)}."
            )
        kind = self.architectures[name]
        entries = clone(module_state(kind.module)) if state is None else dict(state)
        differing = sorted({name: value.shape for name, value in entries.items()}.items() ^ kind.shapes.items())
        if differing:
            raise ValueError(f"Model '{key}' is no '{name}': '{differing[0][0]}' differs.")
        self[key] = entries
        self.architecture_names.pop(key, None)
        if kind is not self.main:
            self.architecture_names[key] = name
