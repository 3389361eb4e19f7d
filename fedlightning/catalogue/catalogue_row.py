"""One row of the catalogue: what a person needs to know about an algorithm."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedlightning.ranges import ranges_of

if TYPE_CHECKING:
    from fedlightning.contract import FederatedCallback

CALLBACKS = "fedlightning.callbacks"
"""The package that exports the algorithms of this repository."""
FAMILIES = {
    "global": "One model for all clients",
    "personal": "A model for each client",
    "baseline": "Baselines",
    "other": "Of other packages",
}
"""Families of algorithms and their headings; `"other"` where a package does not say."""
ROLE = re.compile(r":\w+:`~?(?:\w+\.)*(\w+)`")
"""A reference of the documentation to a class, of which a terminal shows the name."""
WHOLE = "the whole model"
"""What can leave a client, unless its method keeps some entries from ever leaving."""


@dataclass(frozen=True)
class Option:
    """One argument of an algorithm.

    Attributes:
        name: Its name.
        type: Its type, as text.
        default: Its default, as text; `"required"` if there is none.
        values: What it may be, in words; empty if that is not checked.
        help: What it means, from the docstring of the class.
    """

    name: str
    type: str
    default: str
    values: str
    help: str


@dataclass(frozen=True)
class Algorithm:
    """One row of the catalogue.

    Attributes:
        name: Name of the algorithm, which is the name of its class.
        family: A key of `FAMILIES`: `"global"`, `"personal"`, `"baseline"` or `"other"`.
        sentence: What it does.
        paper: Who proposed it.
        down: What travels from the server to a client.
        up: What travels from a client to the server.
        leaves: The entries of its model that can ever leave a client, in whatever round; extras are in `up`.
        client_state: What a client keeps from round to round.
        server_state: What the server keeps from round to round.
        of_clients: What of each single client the server keeps from round to round, which says something about that client
            alone; empty: nothing but numbers about who took part. With sites, it is what stays at the server's machine.
        deployed: The model that a client uses in the end, and which checkpoints fit.
        weights: How clients are weighted in the mean.
        composes: What it can be combined with, and what not.
        class_path: Import path of the class. Default: the name in `fedlightning.callbacks`; rows of other packages
            (entry points of the group `fedlightning.algorithms`) name their own.

    Example:
        >>> row = Algorithm("FedProx", "global", "FedAvg with a proximal term.", "Li et al., MLSys 2020")
        >>> row.class_path, row.config
        ('fedlightning.callbacks.FedProx', 'configs/algorithms/fedprox.yaml')
        >>> [option.name for option in row.options()]
        ['mu', 'weighting']
    """

    name: str
    family: str
    sentence: str
    paper: str
    down: str = "w"
    up: str = "w_i"
    leaves: str = WHOLE
    client_state: str = "none"
    server_state: str = "none"
    of_clients: str = ""
    deployed: str = "the global model; GlobalCheckpoint or LocalCheckpoint"
    weights: str = "samples (default), uniform or log"
    composes: str = "all that leaves the mean to the core"
    class_path: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_path", self.class_path or f"{CALLBACKS}.{self.name}")

    def variant(self, name: str, sentence: str, **changes: str) -> Algorithm:
        """Return the row of an algorithm that differs from this one in a few things only."""
        return replace(self, name=name, sentence=sentence, **{"class_path": "", **changes})

    @property
    def config(self) -> str:
        """Its YAML file, relative to the repository; empty for an algorithm of another package."""
        return f"configs/algorithms/{self.name.lower()}.yaml" if self.class_path.startswith(f"{CALLBACKS}.") else ""

    def load(self) -> type[FederatedCallback]:
        """Import the class and return it."""
        module, _, name = self.class_path.rpartition(".")
        cls: type[FederatedCallback] = getattr(importlib.import_module(module), name)
        return cls

    def options(self) -> list[Option]:
        """Return the arguments: names, types and defaults from the signature, texts from the docstring."""
        cls = self.load()
        texts, values = argument_texts(cls), ranges_of(cls)
        return [
            Option(
                name,
                _type_name(parameter.annotation),
                _default(parameter.default),
                values.get(name, ""),
                texts.get(name, ""),
            )
            for name, parameter in inspect.signature(cls).parameters.items()
        ]


def argument_texts(cls: type) -> dict[str, str]:
    """Return what a class's docstring says of each argument, without markup."""
    from docstring_parser import parse

    texts: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        for parameter in parse(ancestor.__doc__ or "").params:
            for name in parameter.arg_name.split(","):  # "beta1, beta2: decay"
                text = ROLE.sub(r"\1", parameter.description or "").replace("`", "")
                texts[name.strip()] = " ".join(text.split())
    return texts


def _type_name(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return "" if annotation is inspect.Parameter.empty else text.replace("Literal", "")


def _default(value: Any) -> str:
    return "required" if value is inspect.Parameter.empty else repr(value)
