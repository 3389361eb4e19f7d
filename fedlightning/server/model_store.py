"""The models that a server keeps, and their architectures: :class:`ModelStore`."""

from __future__ import annotations

import copy

from fedlightning.client.blueprint import Blueprint
from fedlightning.contract.messages import GLOBAL
from fedlightning.server.architectures import Architecture, architectures_of
from fedlightning.tensors import State, clone, module_state


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
        self[GLOBAL] = clone(module_state(self.main.module))
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
