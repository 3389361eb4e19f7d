"""The list of all items that leave clients, which is known before round 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "sizes",
    "classes",
    "entries",
    "extra",
    "means",
    "counts",
    "undeclared",
    "logged",
    "scores",
    "tests",
    "texts",
    "models",
    "own models",
]
"""`"sizes"` of the data, and `"classes"` of training samples and which they are: told before round 1; `"entries"` of the
model; an `"extra"` of a callback, or `"means"` by class; `"counts"` of samples and steps; what callbacks make of an update
`"undeclared"`; values that the module `"logged"` in training; `"scores"` on validation data; `"tests"` on test data;
`"texts"` of failures; `"models"` of clients in the run's folder, or `"own models"` where they have parts that train beside
the steps of the module, whose gradients no noise covers."""
Cover = Literal["noised", "withheld", "in the clear"]
"""How an item is covered: noise is added to it, it does not leave, or it leaves as it is."""


@dataclass(frozen=True)
class OutgoingItem:
    """One item of what leaves clients.

    Attributes:
        kind: What it is.
        what: The same in words.
        when: When it leaves, in words.
        owner: Key of the callback that declares an extra; empty: the core sends it.

    Example:
        >>> str(OutgoingItem("counts", "numbers of samples", "in each visit"))
        'numbers of samples (in each visit)'
    """

    kind: Kind
    what: str = ""
    when: str = ""
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.when})"


@dataclass(frozen=True)
class Promise:
    """What somebody cannot learn, because a callback sees to it. A run's `summary.json` and reports have all of them.

    Attributes:
        who: Who cannot learn it.
        cannot_learn: What.
        provided: What this rests on.
        left: What they learn all the same.
    """

    who: str
    cannot_learn: str
    provided: str
    left: str
