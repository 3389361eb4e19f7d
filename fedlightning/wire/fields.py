"""What a field that is read must be: what its annotation says, exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from torch import Tensor

Check = Callable[[Any], bool]
Whole = Annotated[int, "from -2**63"]
"""An integer that may be below 0; any other `int` of a field is a count."""
LISTS: dict[Any, tuple[type, ...]] = {list: (list,), tuple: (tuple,), Collection: (tuple,), Sequence: (list, tuple)}
"""By the origin of an annotation, the classes of what it stands for."""


def _whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _number(value: Any) -> bool:
    return type(value) is float or _whole(value)  # longer integers are no floats, and end whoever adds them up


def check_of(hint: Any) -> Check:
    """Return what tells whether a value is what an annotation says: no subclass, and no number that a file cannot hold.

    Example:
        >>> check_of(dict[str, int | None])({"a": 1, "b": None}), check_of(tuple[int, ...])((1, -1))
        (True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint == Whole:
        return _whole
    if hint is Any:
        return lambda value: True
    if hint in (None, NoneType):
        return lambda value: value is None
    if hint is int:
        return lambda value: _whole(value) and value >= 0
    if hint is float:
        return _number
    if hint is Tensor:
        return lambda value: isinstance(value, Tensor)
    if origin is Literal:
        return lambda value: type(value) is str and value in inner
    if origin is None:
        return lambda value: type(value) is hint
    if origin in (dict, Mapping):
        name, entry = map(check_of, inner)
        return lambda value: isinstance(value, dict) and all(name(key) and entry(one) for key, one in value.items())
    checks = [check_of(one) for one in inner if one is not ...]
    if origin is UnionType:
        return lambda value: any(check(value) for check in checks)
    if origin is tuple and len(checks) == len(inner):
        return lambda value: (
            type(value) is tuple
            and len(value) == len(checks)
            and all(check(one) for check, one in zip(checks, value, strict=True))
        )
    return lambda value: type(value) in LISTS[origin] and all(map(checks[0], value))
