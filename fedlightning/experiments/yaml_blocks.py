"""Dataclasses from blocks of a YAML file, with a sentence for everything that is misspelt, missing or of the wrong kind.

A dataclass says what a block holds: a field is a key, its annotation what the value may be, and one without a default must be
there. So a value is declared once, and checked as arguments of classes are (see :mod:`fedlightning.ranges`).
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from fedlightning.config.input_errors import InputError, suggestion
from fedlightning.config.value_checks import refuse_expansion, refuse_form
from fedlightning.ranges import Range, allows, described

T = TypeVar("T")
Number = Annotated[float, Range("(-inf, inf)")]
"""A finite number."""
Names = dict[str, Any]
"""Named values of any kind."""
_MISSING: Any = object()


class _NamedValues(yaml.SafeLoader):
    """YAML whose names are as they are written (`no`, `off` and `0.10` too), and in which `1e-3` is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":int"):  # whole numbers may be ids of classes
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


_NamedValues.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the named values of a YAML file.

    Raises:
        InputError: If there is no such file, it is not a YAML, it holds no named values, or one of them twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        refuse_form(text)
        content = yaml.load(text, _NamedValues)  # a SafeLoader
        refuse_expansion(content)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not a YAML that can be read: {' '.join(str(error).split())[:200]}.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no named values, so nothing can be read from it.")
    return content


class Block:
    """The named values of one block of a file. What is taken is checked; what is left at the end was misspelt.

    Args:
        values: The block.
        file: Name of the file, for messages.
        where: Place of the block, for messages.
    """

    def __init__(self, values: Mapping[Any, Any], file: str, where: str) -> None:
        self.values, self.file, self.where = {str(key): value for key, value in values.items()}, file, where
        self._keys_read: list[str] = []

    def error(self, text: str) -> InputError:
        """Return an error about this block."""
        return InputError(f"{self.file}: {self.where} {text}")

    def read(self, kind: Callable[..., T], **fields: Any) -> T:
        """Return an object of a dataclass from this block.

        Args:
            kind: The class.
            **made: Fields whose values are not those of the block.

        Raises:
            InputError: If a value does not suit its field, has none, or is missing.
        """
        return kind(**self.take_arguments(kind, fields), **fields)

    def take_arguments(self, kind: Callable[..., Any], without: Collection[str] = ()) -> dict[str, Any]:
        """Return the values of this block as keyword arguments of a function or class, and refuse others."""
        arguments = {}
        for name, (annotation, needed) in _read_keywords(kind).items():
            if name not in without and (needed or name in self.values):
                arguments[name] = self.take(name, annotation)
        self.finish([*_read_keywords(kind), *without])
        return arguments

    def take(self, key: str, annotation: Any = Any, default: Any = _MISSING) -> Any:
        """Return a value as its annotation says; it must be there unless it has a default."""
        self._keys_read.append(key)
        if key in self.values:
            return self._convert(key, self.values[key], annotation)
        if default is not _MISSING:
            return default
        near = next((name for name in self.values if name not in self._keys_read and suggestion(name, [key])), None)
        raise self.error(f"has no '{key}'." + (f" Is '{near}' misspelt?" if near is not None else ""))

    def take_blocks(self, key: str, short: str | None = None) -> Iterator[tuple[str, Block]]:
        """Return blocks by their names; a value that is not a block stands for its key `short`."""
        for name, value in self.take(key, Names, {}).items():
            whole = {short: value} if short is not None and not isinstance(value, Mapping) else value
            yield name, self._make_block(whole, f"{key.removesuffix('s')} '{name}'")

    def take_list(self, key: str) -> list[Block]:
        """Return the blocks of a list; one block is a list of one."""
        blocks = self.take(key, list[Any], [])
        many = len(blocks) > 1
        return [
            self._make_block(block, f"{key.removesuffix('s')} {number}" if many else key)
            for number, block in enumerate(blocks, 1)
        ]

    def check_name(self, name: str, names: Iterable[str], what: str) -> None:
        """Refuse a name that is not one of several."""
        listed = [str(other) for other in names]
        if name not in listed:
            hint = suggestion(name, listed) or f"There is {', '.join(sorted(listed)) or 'none'}."
            raise self.error(f"names '{name}' ({what}), which is not in this file. {hint}")

    def finish(self, more: Iterable[str] = ()) -> None:
        """Refuse what nobody has taken. `more`: further keys that there may be."""
        keys = list(dict.fromkeys([*self._keys_read, *more]))
        left = next((key for key in self.values if key not in keys), None)
        if left is not None:
            hint = suggestion(left, keys) or f"It may have {', '.join(sorted(keys))}."
            raise self.error(f"has the key '{left}', which means nothing here. {hint}")

    def _make_block(self, value: Any, where: str) -> Block:
        if not isinstance(value, Mapping):
            raise self.error(f"has {where}: {value!r:.60}. Give named values (NAME: VALUE).")
        return Block(value, self.file, where)

    def _convert(self, key: str, value: Any, annotation: Any) -> Any:
        """Return a value as its annotation says: one value is a list of one, and a number is a text too."""
        origin, inner = get_origin(annotation), get_args(annotation)
        if origin in (Union, types.UnionType) and inner[1:] == (types.NoneType,):
            return None if value is None else self._convert(key, value, inner[0])
        if origin is Annotated and get_origin(inner[0]) is list:
            value = self._convert(key, value, inner[0])
        elif origin is list:
            return [self._convert(key, item, inner[0]) for item in (value if isinstance(value, list) else [value])]
        elif origin is dict:
            items = self._make_block(value, key).values.items()
            return {name: self._convert(f"{key.removesuffix('s')} '{name}'", item, inner[1]) for name, item in items}
        elif is_dataclass(annotation):
            return self._make_block(value, key).read(annotation)  # type: ignore[arg-type]
        elif annotation is str and isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value).strip()
        if not allows(annotation, value):
            raise self.error(f"has {key}: {value!r:.60}. Give {described(annotation)}.")
        return float(value) if origin is Annotated and inner[0] is float else value


@cache
def _read_keywords(kind: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Return what a dataclass or function may be given by name: its annotation, and whether it must be given."""
    hints = get_type_hints(kind, include_extras=True)
    parameters = inspect.signature(kind).parameters.values()
    # of a measure: not the runs that it is of
    only = any(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
    return {
        parameter.name: (hints[parameter.name], parameter.default is parameter.empty)
        for parameter in parameters
        if not only or parameter.kind is parameter.KEYWORD_ONLY
    }
