"""Measures as tables ask for them: their kinds and keywords are checked before anything runs."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from fedlightning.config.errors import suggestion
from fedlightning.experiments.reproduce.fields import Fields
from fedlightning.experiments.reproduce.measures import KINDS, OVER, Spec


def check_measure(given: Any, name: str, at: Fields, runs: Any, measures: Mapping[str, Spec] | None = None) -> Spec:
    """Return a measure as it is written in YAML, with its kind and a name.

    Raises:
        InputError: If it has an unknown kind or key, lacks one, or names an unknown run.
    """
    if not isinstance(given, Mapping):
        known = [*(measures or {}), *KINDS]
        hint = suggestion(str(given), known) or f"There is {', '.join(measures or KINDS)}."
        raise at.error(f"has the measure {given!r:.60}, which is none. {hint}")
    kind = str(given.get("kind", "score"))
    options = {str(key): value for key, value in given.items() if key != "kind"}
    place = f"measure '{name}'" if name else "measure"
    if kind not in KINDS:
        hint = suggestion(kind, KINDS) or f"Kinds: {', '.join(KINDS)}."
        raise at.error(f"has the {place} of kind '{kind}', which is none. {hint}")
    expected = _keywords(kind)
    for key, value in options.items():
        if key not in expected:
            hint = suggestion(key, expected) or f"It may have {', '.join(expected)}."
            raise at.error(f"has the {place} ({kind}) with the key '{key}', which means nothing there. {hint}")
        if key == "of":
            inner = (measures or {}).get(str(value)) if isinstance(value, str) else None
            options[key] = inner or check_measure(value, "", at, runs, measures)
        elif not _fits(value, expected[key][0]):
            raise at.error(f"has the {place} with {key}: {value!r:.60}, which is no {_word(expected[key][0])}.")
    lacking = next((key for key, (_, needed) in expected.items() if needed and key not in options), None)
    if lacking is not None:
        raise at.error(f"has the {place} ({kind}) without '{lacking}'.")
    over = options.get("over", "mean")
    if over not in OVER and not str(over).startswith("client:"):
        raise at.error(f"has the {place} with over: {over}. Give {', '.join(OVER)} or client:NAME.")
    if "against" in options:
        at.known(options["against"], runs, place)
    return Spec(kind, name or _described(kind, options), options)


def _keywords(kind: str) -> dict[str, tuple[Any, bool]]:
    """Return keyword -> its annotation, and whether it must be given."""
    hints = get_type_hints(KINDS[kind])
    parameters = inspect.signature(KINDS[kind]).parameters.values()
    own = [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    return {one.name: (hints[one.name], one.default is one.empty) for one in own}


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if origin is list:
        return isinstance(value, list) and all(_fits(one, get_args(kind)[0]) for one in value)
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _word(kind: Any) -> str:
    words = {int: "whole number", float: "number", str: "text", types.NoneType: "null"}
    return " or ".join(words.get(one, "list of numbers") for one in (get_args(kind) or (kind,)))


def _described(kind: str, options: Mapping[str, Any]) -> str:
    said = [value.name if isinstance(value, Spec) else str(value) for value in options.values()]
    return " ".join([*([] if kind == "score" else [kind.replace("_", " ")]), *said])


def runs_of(spec: Spec) -> list[str]:
    """Return the further runs that a measure reads."""
    given = spec.options
    return ([given["against"]] if "against" in given else []) + (runs_of(given["of"]) if "of" in given else [])
