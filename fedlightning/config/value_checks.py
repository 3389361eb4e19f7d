"""Values in a configuration that no argument means: `null` where a value is needed, NaN and infinity, endless aliases."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import yaml
from yaml import YAMLError

from fedlightning.config.input_errors import InputError
from fedlightning.ranges import may_be_infinite, ranges_of

MOST_VALUES = 100_000
"""Values that one configuration may hold, with its aliases written out."""
MOST_LEVELS = 64
"""Levels of mappings and lists in one another that one configuration may have."""
CHECKED = ("fedlightning", "torch", "lightning", "torchmetrics")
"""Packages whose classes have no argument that means something as NaN. Classes of users may have one."""
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
"""Type -> how a sentence calls it."""


_OF_YAML = re.compile(
    r"[-+]?(0[0-7]+|[1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*"
    r"|(?=.*_)((?=\.?[0-9])[0-9_]*\.?[0-9_]*(e[-+]?[0-9]+)?|0[xb][0-9a-f_]+))",
    re.IGNORECASE,
)
"""Numbers of YAML 1.1 that nobody else reads so: `010` is 8, `1:30` is 90, `1_0` is 10."""
_OF_A_SHELL = re.compile(r"\$\{[^}]*\}|\$\(|^\$[A-Z_][A-Z0-9_]*(?=/|$)|^~\w*(?=/)")
"""What a shell or another reader of YAML would replace, and nothing does here."""


def refuse_misread(words: Sequence[str], config: Any) -> None:
    """Refuse texts of a command line that became numbers and are not written as one, such as `1_0`."""
    for word, following in pairwise([*words, ""]):
        option, equals, text = word.partition("=")
        text = text if equals else following
        if option.startswith("--") and not is_plain(text):
            value = config
            for step in option.removeprefix("--").split("."):
                value = value[-1] if isinstance(value, list) and value else value  # the last of a list is meant
                value = getattr(getattr(value, "init_args", value), step, None) if step != "init_args" else value
            if isinstance(value, int | float) and not isinstance(value, bool):
                raise InputError(f"{option}: {text} is read as {value}. Write that, in plain digits.")


def is_plain(text: str) -> bool:
    """Return whether a text is not a number, or one in plain digits."""
    return _OF_YAML.fullmatch(text) is None and (text.isascii() or not text.replace(".", "").strip("+-").isdigit())


def refuse_form(text: str) -> None:
    """Refuse a YAML document that is nested too deeply or in itself, has a key twice, or a number that is another one.

    Example:
        >>> refuse_form("trainer: {seed: 1, seed: 2}")
        Traceback (most recent call last):
            ...
        yaml.error.YAMLError: the key 'seed' stands there twice, the second time in line 1
    """
    keys: list[set[str] | None] = []  # of each level; None for a list
    anchors: list[str | None] = []
    key_next: list[bool] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            keys.pop()
            anchors.pop()
            key_next.pop()
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.AliasEvent) and event.anchor in anchors:
                raise YAMLError(f"it holds itself by an alias (&{event.anchor:.60}, *{event.anchor:.60})")
            if isinstance(event, yaml.ScalarEvent) and event.style is None and not is_plain(event.value):
                place = f" in line {event.start_mark.line + 1}" if event.start_mark else ""
                raise YAMLError(
                    f"{event.value:.60}{place} is another number than it looks (YAML reads 010 as 8, 1:30 as 90): write a "
                    "number in plain digits, and a text in quotes"
                )
            names = keys[-1] if keys else None
            if names is not None:
                if key_next[-1] and isinstance(event, yaml.ScalarEvent) and event.value != "<<":
                    if event.value in names:
                        line = event.start_mark.line + 1 if event.start_mark else 0
                        raise YAMLError(
                            f"the key '{event.value:.60}' stands there twice, the second time in line {line}"
                        )
                    names.add(event.value)
                key_next[-1] = not key_next[-1]
            if isinstance(event, yaml.CollectionStartEvent):
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                keys.append(set() if is_mapping else None)
                anchors.append(event.anchor)
                key_next.append(is_mapping)
                if len(keys) > MOST_LEVELS:
                    raise YAMLError(f"it is nested in more than {MOST_LEVELS} levels")


def refuse_expansion(value: Any) -> None:
    """Refuse a YAML document that its aliases make huge ("billion laughs"), without writing it out.

    Example:
        >>> refuse_expansion({"a": [1, 2]})
        >>> lol = ["lol"]
        >>> for _ in range(6):
        ...     lol = [lol] * 10
        >>> refuse_expansion(lol)
        Traceback (most recent call last):
            ...
        yaml.error.YAMLError: with its aliases (&name, *name) written out it holds more than 100,000 values
    """
    sizes: dict[int, int] = {}

    def size(item: Any) -> int:
        if not isinstance(item, dict | list):
            return 1
        if id(item) not in sizes:
            sizes[id(item)] = 1 + sum(map(size, item.values() if isinstance(item, dict) else item))
        return sizes[id(item)]

    if size(value) > MOST_VALUES:
        raise YAMLError(f"with its aliases (&name, *name) written out it holds more than {MOST_VALUES:,} values")


def refuse_two_values(value: Any) -> None:
    """Refuse an argument in `init_args` and in `dict_kwargs` of a class: the first would be lost.

    Example:
        >>> refuse_two_values({"class_path": "FedProx", "init_args": {"mu": 0.1}, "dict_kwargs": {"mu": 0.9}})
        Traceback (most recent call last):
            ...
        yaml.error.YAMLError: FedProx has 'mu' in init_args and in dict_kwargs: leave it in init_args
    """
    if isinstance(value, dict):
        first, second = value.get("init_args"), value.get("dict_kwargs")
        both = [key for key in first if key in second] if isinstance(first, dict) and isinstance(second, dict) else []
        if both:
            raise YAMLError(
                f"{value.get('class_path')} has {both[0]!r} in init_args and in dict_kwargs: leave it in init_args"
            )
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        refuse_two_values(item)


def check_values(config: Mapping[str, Any], trainer: type) -> None:
    """Refuse `null` for an argument that needs a value, and NaN or infinity where an argument is a number.

    The types in signatures let both pass: jsonargparse takes `null` for any argument, and NaN is a float.
    """
    for section in ("trainer", "model", "data"):
        for path, owner, key, value in _arguments(
            config.get(section), section, trainer if section == "trainer" else None
        ):
            for place, leaf in _leaves(path, value):
                if isinstance(leaf, str) and (match := _OF_A_SHELL.search(leaf)):
                    raise InputError(
                        f"{place}: {leaf!r:.80} holds {match[0]}, which is not replaced here. Write it out."
                    )
            kind = class_of(owner) if isinstance(owner, str) else owner
            package = kind.__module__.partition(".")[0] if kind is not None else ""
            if value is None and package == "fedlightning":
                needed = _needed(kind, key)
                if needed:
                    raise InputError(
                        f"{path}: null is not a value for it; it must be {needed}. Leave it out for its default."
                    )
            if package in CHECKED:
                ours = package == "fedlightning" and not (kind is not None and may_be_infinite(kind, key))
                for place, leaf in _leaves(path, value):
                    is_infinite = leaf in (math.inf, -math.inf) and (ours or "optim" in kind.__module__)
                    if leaf != leaf or is_infinite:
                        raise InputError(f"{place}: {leaf} is not a number that it can work with; it must be finite.")


def _arguments(value: Any, path: str, owner: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield every argument of every class: its path, its class (or the path of that), its name and its value."""
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        yield from _arguments(value.get("init_args") or {}, path, value["class_path"])
        if "dict_kwargs" in value:
            yield from _arguments(value["dict_kwargs"], path, value["class_path"])
    elif isinstance(value, Mapping):
        for key, item in value.items():
            below = f"{path}.{key}"
            if owner is not None:
                yield below, owner, str(key), item
            yield from _arguments(item, below, None)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _arguments(item, f"{path}[{index}]", None)


def class_of(path: str) -> Any:
    """Return the class of an import path, or `None`."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def _needed(kind: Any, key: str) -> str:
    """Return what an argument must be, in words; empty if it may be `None`."""
    try:
        parameter = inspect.signature(kind).parameters.get(key)
    except (TypeError, ValueError):
        return ""
    if parameter is None or parameter.default is None or parameter.annotation is inspect.Parameter.empty:
        return ""
    declared = ranges_of(kind).get(key)
    if declared is not None:
        return "" if declared.endswith("None") else declared
    text = (
        parameter.annotation
        if isinstance(parameter.annotation, str)
        else inspect.formatannotation(parameter.annotation)
    )
    if any(word in text for word in ("None", "Optional", "Any")):
        return ""
    if text.startswith("Literal["):
        return f"one of {text[8:-1]}"
    if text.startswith("list["):
        return "a list"
    return " or ".join(WORDS.get(part.strip(), part.strip()) for part in text.split("|"))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an argument holds that is neither a list nor a mapping, with its path; classes have their own arguments."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    elif not isinstance(value, Mapping):
        yield path, value
    elif "class_path" not in value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
