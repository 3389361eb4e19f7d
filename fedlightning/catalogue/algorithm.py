"""One row of the catalogue: what a person needs to know about an algorithm."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlightning.hooks import FederatedCallback

OWN_MODEL = "each client's own model; LocalCheckpoint (there is no global model)"
"""What is deployed where every client keeps some of its model to itself."""


def beside_global(model: str) -> str:
    """What is deployed where a client has ``model`` for itself and there is a global one, ``w``, too."""
    return f"{model}; LocalCheckpoint (w is also a global model: GlobalCheckpoint)"


@dataclass(frozen=True)
class Option:
    """One argument of an algorithm: its name, type and default as text, and what it means."""

    name: str
    type: str
    default: str
    help: str


@dataclass(frozen=True)
class Algorithm:
    """One row of the catalogue.

    Attributes:
        name: how it is called, and the name of its class in ``fedlightning.callbacks``.
        family: ``"global"`` (one model for all), ``"personal"`` (a model per client) or ``"baseline"``.
        sentence: what it does; paper: who proposed it.
        down, up: what travels to and from a client; client_state, server_state: what stays from round to round.
        deployed: the model that a client uses in the end, and which checkpoints fit.
        weights: how clients are weighted in the mean.
        composes: what it can be combined with, and what not.
    """

    name: str
    family: str
    sentence: str
    paper: str
    down: str = "w"
    up: str = "w_i"
    client_state: str = "none"
    server_state: str = "none"
    deployed: str = "the global model; GlobalCheckpoint or LocalCheckpoint"
    weights: str = "samples (default), uniform or log"
    composes: str = "all that leaves the mean to the core"

    def variant(self, name: str, sentence: str, **changes: str) -> Algorithm:
        """The row of an algorithm that differs from this one in a few things only."""
        return replace(self, name=name, sentence=sentence, **changes)

    @property
    def class_path(self) -> str:
        """Where its class is."""
        return f"fedlightning.callbacks.{self.name}"

    @property
    def config(self) -> str:
        """Its YAML file, relative to the repository."""
        return f"configs/algorithms/{self.name.lower()}.yaml"

    def load(self) -> type[FederatedCallback]:
        """The class."""
        module, _, name = self.class_path.rpartition(".")
        found: type[FederatedCallback] = getattr(importlib.import_module(module), name)
        return found

    def options(self) -> list[Option]:
        """The arguments, with types and defaults from the signature and texts from the docstring."""
        cls = self.load()
        texts = _argument_texts(cls)
        return [
            Option(name, _type_name(parameter.annotation), _default(parameter.default), texts.get(name, ""))
            for name, parameter in inspect.signature(cls).parameters.items()
        ]


def _argument_texts(cls: type) -> dict[str, str]:
    from docstring_parser import parse

    texts: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        if not ancestor.__module__.startswith("fedlightning"):
            continue
        for parameter in parse(ancestor.__doc__ or "").params:
            for name in parameter.arg_name.split(","):  # "beta1, beta2: decay"
                texts[name.strip()] = " ".join((parameter.description or "").replace("``", "").split())
    return texts


def _type_name(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return "" if annotation is inspect.Parameter.empty else text.replace("Literal", "")


def _default(value: Any) -> str:
    return "required" if value is inspect.Parameter.empty else repr(value)
