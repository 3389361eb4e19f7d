"""Ranges of arguments, declared beside them, and checked when a class is made: :class:`Range`, :func:`checked`."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

Init = TypeVar("Init", bound=Callable[..., None])
NUMBERS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Range:
    """The values that a number may have, as an interval; of a list or table it is the range of each element.

    An infinite value is in a range that is closed at infinity, `"(0, inf]"`, and NaN is in none.

    Args:
        interval: Such as `"[0, 1)"`: both ends, and which of them count.
        note: What the number is, or another way to what such a value would mean, as a sentence for the error message.

    Raises:
        ValueError: If the interval cannot be read.

    Example:
        >>> from typing import Annotated
        >>> share = Range("(0, 1]", "A share of the local data.")
        >>> 1.0 in share, 0.0 in share, float("inf") in Range("[0, inf]")
        (True, False, True)
        >>> Annotated[float, share].__metadata__[0].interval
        '(0, 1]'
    """

    interval: str
    note: str = ""

    def __post_init__(self) -> None:
        try:
            low, high = (float(end) for end in self.interval[1:-1].split(","))
        except ValueError:
            low, high = math.nan, math.nan
        if self.interval[:1] not in ("[", "(") or self.interval[-1:] not in ("]", ")") or not low <= high:
            raise ValueError(f"Range({self.interval!r}) is no interval. Write '[0, 1)', or '[0, inf)'.")

    def __contains__(self, value: float) -> bool:
        """Return True if a number is in the range."""
        low, high = (float(end) for end in self.interval[1:-1].split(","))
        above = low <= value if self.interval.startswith("[") else low < value
        below = value <= high if self.interval.endswith("]") else value < high
        return above and below


def checked(init: Init) -> Init:
    """Refuse arguments that their annotations rule out: numbers outside their :class:`Range`, words outside a `Literal`.

    Other annotations are not checked.

    Args:
        init: The `__init__` of a class, for which this is a decorator.

    Raises:
        ValueError: When an object is made; the sentence names class, argument, value and range.

    Example:
        >>> from typing import Annotated
        >>> class Noise:
        ...     @checked
        ...     def __init__(self, sigma: Annotated[float, Range("[0, inf)", "0 adds none.")] | None = None) -> None:
        ...         self.sigma = sigma
        >>> Noise(0.1).sigma, Noise().sigma
        (0.1, None)
        >>> Noise(-1)
        Traceback (most recent call last):
        ValueError: Noise got sigma=-1. Use a number in [0, inf), or None. 0 adds none.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checking(self: Any, *args: Any, **given: Any) -> None:
        try:
            arguments = signature.bind(self, *args, **given).arguments
        except TypeError:
            arguments = {}  # the call below says what is wrong
        for name, value in arguments.items():
            annotation = _annotations(init).get(name)
            if annotation is not None and not allows(annotation, value):
                notes = "".join(f" {note}" for note in dict.fromkeys(_notes(annotation)))
                raise ValueError(f"{type(self).__name__} got {name}={value!r}. Use {described(annotation)}.{notes}")
        init(self, *args, **given)

    return checking  # type: ignore[return-value]


def ranges_of(init: Callable[..., None]) -> dict[str, str]:
    """Return in words what the arguments of an `__init__` may be, of those that are checked.

    Example:
        >>> from fedlightning.callbacks import FedProx
        >>> ranges_of(FedProx.__init__)["mu"]
        'a number in [0, inf)'
    """
    return {name: described(annotation) for name, annotation in _annotations(inspect.unwrap(init)).items()}


def may_be_infinite(init: Callable[..., None], name: str) -> bool:
    """Return True if an argument has a range that is closed at infinity."""
    annotation = _annotations(inspect.unwrap(init)).get(name)
    return annotation is not None and any(math.inf in found for found in _ranges(annotation))


def allows(annotation: Any, value: Any) -> bool:
    """Return False if an annotation rules a value out. What has neither `Range` nor `Literal` in it rules nothing out."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(allows(one, value) and _is_such(one, value) for one in inner)
    if origin is Annotated:
        found = [one for one in annotation.__metadata__ if isinstance(one, Range)]
        if not found or not allows(inner[0], value):
            return not found
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        return all(float(value) in one for one in found) and not (inner[0] is int and not float(value).is_integer())
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if not _is_checked(annotation):
        return True
    if isinstance(value, str) or not hasattr(value, "__iter__") or isinstance(value, Mapping) != _is_table(origin):
        return False
    return all(allows(inner[-1], one) for one in (value.values() if isinstance(value, Mapping) else value))


def described(annotation: Any) -> str:
    """Return in words what an annotation allows."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        words = [described(one) for one in inner]
        return ", ".join(words[:-1]) + (f", or {words[-1]}" if words[1:] else words[-1])
    if origin is Annotated:
        intervals = [one.interval for one in annotation.__metadata__ if isinstance(one, Range)]
        return described(inner[0]) + (f" in {' and '.join(intervals)}" if intervals else "")
    if origin is Literal:
        words = [repr(one) for one in inner]
        return ", ".join(words[:-1]) + (f" or {words[-1]}" if words[1:] else words[-1])
    if annotation is type(None):
        return "None"
    if origin is not None and inner:
        return f"{'a table' if _is_table(origin) else 'a list'}, each {described(inner[-1])}"
    return NUMBERS.get(annotation, f"a {getattr(annotation, '__name__', annotation)}")


def _is_such(annotation: Any, value: Any) -> bool:
    """Return whether a value is of the kind of one member of a union, so that another member need not allow it."""
    origin = get_origin(annotation)
    if annotation is type(None):
        return value is None
    if _is_checked(annotation) or annotation is Any or not isinstance(origin or annotation, type):
        return True
    kind = origin or annotation
    return isinstance(value, (int, float)) if kind is float else isinstance(value, kind)


def _is_table(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_checked(annotation: Any) -> bool:
    return get_origin(annotation) is Literal or bool(_ranges(annotation)) or any(map(_is_checked, get_args(annotation)))


def _ranges(annotation: Any) -> list[Range]:
    own = [one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Range)]
    return own + [found for one in get_args(annotation) for found in _ranges(one)]


def _notes(annotation: Any) -> list[str]:
    return [found.note for found in _ranges(annotation) if found.note]


@functools.cache
def _annotations(init: Callable[..., None]) -> dict[str, Any]:
    """Return the annotations with something to check. Names that exist for type checkers only are left out."""
    names = vars(sys.modules[init.__module__])
    found = {}
    for name, annotation in inspect.get_annotations(init).items():
        try:
            value = (
                eval(annotation, names) if isinstance(annotation, str) else annotation
            )  # as typing.get_type_hints does
        except NameError:
            continue
        if name != "return" and _is_checked(value):
            found[name] = value
    return found
