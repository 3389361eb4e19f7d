"""Methods that nothing would call: a hook's name misspelt, or one of an earlier release."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from functools import cached_property

REMOVED = {
    "chooses_by_scores": "Say it in facts, as in Facts(needs=[fedlightning.contract.capabilities.EVERY_SCORE]).",
    "client_weight": "Say it in weighting: a word, or a method weighting(self, server, update).",
    "infinite_arguments": 'Say it in the annotation of the argument, as in Range("(0, inf]").',
    "may_leave": "Say it in wire(module), as in Wire(entries=[...]).",
    "on_clients_join": "Say it in facts, as in Facts(newcomers=Newcomers(join=...)).",
    "place_newcomers": "Say it in facts, as in Facts(newcomers=Newcomers(place=...)).",
    "in_step": "Say it in facts, as in Facts(changes=[Change.IN_STEP]).",
    "leaves_out": "Say it in facts, as in Facts(changes=[Change.ABSENCE]).",
    "merges": "Say it in facts, as in Facts(changes=[Change.START]).",
    "needs_all": "Define reduce(self, server, updates), which is given all of them.",
    "needs_every_score": "Say it in facts, as in Facts(needs=[fedlightning.contract.capabilities.EVERY_SCORE]).",
    "no_newcomers": "Say it in facts, as in Facts(newcomers=Newcomers(no_model=...)).",
    "sends_less": "Say it in facts, as in Facts(changes=[Change.PARTS]).",
    "sends_private": "Say it in facts, as in Facts(changes=[Change.PRIVATE]).",
    "sends_smaller": "Say it in facts, as in Facts(changes=[Change.SMALLER]).",
}
"""Hooks and flags of earlier releases, and what to write."""
ALIKE, ALIKE_EVENT = 0.88, 0.8
"""Likeness (of difflib) from which a name is taken for a misspelt one: a letter or two; more where it begins as a hook."""
METHODS = (staticmethod, classmethod, property, cached_property)


def refuse_misspelt(kind: type, known: Collection[str], own: Collection[type]) -> None:
    """Refuse public methods that are no hooks but nearly have the name of one, and hooks that are gone.

    Args:
        kind: The class that is being defined.
        known: Names of all hooks, Lightning's and those of families too.
        own: The class and its bases outside the contract, whose methods are looked at.

    Raises:
        TypeError: With the name that was meant, or what to write.
    """
    hooks = [name for name in known if not name.startswith("_")]
    for name, value in ((name, value) for one in own for name, value in vars(one).items()):
        if name in known or name.startswith("_"):
            continue
        if name in REMOVED:
            raise TypeError(f"{kind.__name__} defines {name}, which nothing reads any more. {REMOVED[name]}")
        if not callable(value) and not isinstance(value, METHODS):
            continue
        alike = get_close_matches(name, hooks, n=1, cutoff=ALIKE_EVENT if name.startswith("on_") else ALIKE)
        if alike:
            raise TypeError(
                f"{kind.__name__} defines {name}, which nothing calls. Did you mean {alike[0]}? If it is a method of your "
                "own, give it another name, or begin it with an underscore."
            )
