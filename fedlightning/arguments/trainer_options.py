"""The options of a trainer, read once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from lightning.pytorch import Callback

from fedlightning.arguments.local import check_keeping, ordinary_callbacks
from fedlightning.arguments.place_checks import check
from fedlightning.contract import CallbackList, FederatedCallback
from fedlightning.options import SHORT_FORMS
from fedlightning.ranges import to_python
from fedlightning.server.loop import Loop, Synchronous
from fedlightning.server.summary import optimizer_state_of


@dataclass(frozen=True)
class TrainerOptions:
    """The trainer's arguments, checked, and what follows from them.

    Attributes:
        arguments: The arguments by name; short forms are written out.
        callbacks: The federated callbacks.
        ordinary_callbacks: The Lightning callbacks that run inside clients.
        optimizer_state: What becomes of optimizers between visits.
        loop: The loop; every run has a copy.
        max_rounds: Rounds of the federation.
    """

    arguments: Mapping[str, Any]
    callbacks: CallbackList
    ordinary_callbacks: list[Callback]
    optimizer_state: Literal["reset", "keep"]
    loop: Loop
    max_rounds: int

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> TrainerOptions:
        """Check arguments and return the options.

        Raises:
            ConfigurationError: If two contradict each other, or one cannot work.
        """
        arguments = {name: to_python(value) for name, value in options.items()}
        arguments |= {name: read(arguments[name]) for name, read in SHORT_FORMS.items()}
        check(arguments)
        callbacks, loop = arguments["callbacks"], arguments["loop"]
        everything = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        federated = CallbackList([item for item in everything if isinstance(item, FederatedCallback)])
        ordinary = ordinary_callbacks(everything)
        optimizer_state = optimizer_state_of(federated.callbacks, arguments["optimizer_state"])
        check_keeping(ordinary, arguments, optimizer_state)
        max_rounds = 1 if arguments["fast_dev_run"] else arguments["max_rounds"]
        loop = loop if isinstance(loop, Loop) else Synchronous()
        return cls(arguments, federated, ordinary, optimizer_state, loop, max_rounds)

    def shown(self, trainer: type) -> dict[str, str]:
        """Return the arguments that differ from the trainer's defaults, and the callbacks, as text."""
        defaults = {name: parameter.default for name, parameter in inspect.signature(trainer).parameters.items()}
        defaults |= {name: read(defaults[name]) for name, read in SHORT_FORMS.items()}
        texts = {
            name: repr(value)
            for name, value in self.arguments.items()
            if name != "callbacks" and name in defaults and repr(value) != repr(defaults[name])
        }
        return texts | {"callbacks": repr(self.callbacks.callbacks + self.ordinary_callbacks)}

    def as_text(self, trainer: type, done: str) -> str:
        """Return what differs from the trainer's defaults, and how far it is, in a line."""
        texts = [f"{name}={value}" for name, value in self.shown(trainer).items()]
        return f"<{trainer.__name__}({', '.join(texts)}): {done}>"

    def as_table(self, trainer: type, done: str, more: Mapping[str, str]) -> str:
        """Return the same and some further lines as a table in HTML."""
        rows = self.shown(trainer) | dict(more)
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
        return f"<table><caption>{trainer.__name__}: {done}</caption>{cells}</table>"

    def copied(self, **changes: Any) -> TrainerOptions:
        """Return options with copies of the callbacks and some other arguments."""
        changed = {**self.arguments, **changes}
        return type(self).read(changed | {"callbacks": copy.deepcopy(changed["callbacks"])})
