"""What a request to a site may say, tasks apart: a rule for each part, by which the site goes before it looks further."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from fedlightning.sites.runs import is_run
from fedlightning.sites.task_window import MOST
from fedlightning.wire.fields import check_of

TEXT = 256
"""Characters of a name in a request, such as a tag or a model's key."""
NAMES = 2**20
"""Names in a list, such as all clients of a federation."""

Rule = Callable[[Any, Any], str | None]
"""Of what a site knows of itself and a value: why that is not allowed, as the end of a sentence; `None`: it is."""


def when(fits: Callable[[Any, Any], bool], words: str | Callable[[Any], str]) -> Rule:
    """Return the rule that a value fits, and the words for one that does not."""
    return lambda here, value: None if fits(here, value) else words if isinstance(words, str) else words(here)


def count(most: Callable[[Any], int], what: str) -> Rule:
    """Return the rule of a count that is not larger than the site's own configuration gives."""
    return when(
        lambda here, value: type(value) is int and 0 <= value <= most(here),
        lambda here: f"it is {what} from 0 to {most(here)} here",
    )


def one_of(*words: Any) -> Rule:
    """Return the rule of a value that is one of a few."""
    return when(lambda here, value: value in words, f"it is one of {', '.join(map(repr, words))}")


def all_in(words: Callable[[Any], Collection[str]], what: str) -> Rule:
    """Return the rule of names that are known, each once."""
    return when(
        lambda here, value: len(value) <= NAMES and len(set(value)) == len(value) and set(value) <= set(words(here)),
        what,
    )


def is_text(value: Any) -> bool:
    """Return whether a value is a text of ordinary length."""
    return type(value) is str and len(value) <= TEXT


def is_small(value: Any) -> bool:
    """Return whether texts in a value are of ordinary length, and its lists and dicts too."""
    if isinstance(value, dict):
        return len(value) <= NAMES and all(is_small(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return len(value) <= NAMES and all(map(is_small, value))
    return not isinstance(value, str) or len(value) <= TEXT


def small(kind: Any, what: str) -> Rule:
    """Return the rule of a value that is what an annotation says, and small."""
    check = check_of(kind)
    return when(lambda here, value: check(value) and is_small(value), what)


A_TEXT = small(str, f"it is a text of at most {TEXT} characters")
TEXTS = small(Sequence[str], f"it is a list of at most {NAMES} names of at most {TEXT} characters")
YES_OR_NO = small(bool, "it is yes or no")


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isalnum() and len(value) <= TEXT


ENVELOPES: dict[str, dict[str, Rule]] = {
    "hello": {
        "run": when(
            lambda here, value: is_run(value),
            "the name of a run is 32 of the digits 0-9 and a-f",
        ),
        "agreement": when(lambda here, value: isinstance(value, dict), "it says how the server is configured"),
        "assigned": small(dict[str, str], "it says who has which model"),
        "stage": one_of("fit", "test"),
        "left_out": TEXTS,
        "public": when(
            lambda here, value: (
                value is None or (isinstance(value, dict) and set(value) == {"samples", "batch_size", "content"})
            ),
            "it says which public data the server has",
        ),
        "export": YES_OR_NO,
        "template": when(lambda here, value: isinstance(value, dict), "it holds the weights that the run begins with"),
        "statistics": small(
            dict[str, dict[str, float] | list[float]] | None, "it says what the data have agreed on before round 1"
        ),
        "code": small(dict[str, dict[str, str]], "it says which files the code of the server has"),
    },
    "turned away": {"why": when(lambda here, value: type(value) is str, "it is a sentence")},
    "tasks": {
        "tasks": when(
            lambda here, value: isinstance(value, list) and len(value) <= MOST, f"it is a list of at most {MOST}"
        ),
        "budget": when(
            lambda here, value: isinstance(value, int | float) and 0 <= value < math.inf, "it is a number of seconds"
        ),
    },
    "describe": {"leave_out": TEXTS},
    "measure": {},
    "ping": {},
    "task": {
        "task": lambda here, value: None,  # the site looks at its kind, and RULES at the rest
        "number": when(lambda here, value: _is_word(value), "it is a name of letters and digits"),
        "version": when(
            lambda here, value: value == "" or _is_word(value), "such are no names of a run or of a version"
        ),
        "keep": when(
            lambda here, value: (
                value is None or (isinstance(value, list) and len(value) <= MOST and all(map(_is_word, value)))
            ),
            "it names the versions of a record that stay",
        ),
    },
}
"""By what is asked for, what a request holds beside `do` and `session`, all of it; `"task"`: a part of `"tasks"`."""


def fault_of_request(do: str, asked: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a request, tasks apart, as a sentence; `None` if nothing is."""
    rules = ENVELOPES[do]
    unknown = next((name for name in asked if name not in (*rules, "do", "session")), None)
    if unknown is not None:
        return f"'{unknown!s:.40}' is not part of it"
    return first_fault({name: (rule, asked.get(name)) for name, rule in rules.items()}, None, do)


def first_fault(found: Mapping[str, tuple[Rule, Any]], here: Any, what: str) -> str | None:
    """Return the sentence of the first of some values, by name and with their rules, that is not allowed."""
    for name, (rule, value) in found.items():
        try:
            reason = rule(here, value)
        except (TypeError, ValueError, AttributeError):  # of a kind that the rule does not foresee
            reason = "it is of another kind"
        if reason is not None:
            if is_dataclass(value):
                return reason  # of a part of it
            said = f" is {value!r:.60}" if isinstance(value, int | float | str) else ""
            return f"{name} of its {what}{said}: {reason}"
    return None
