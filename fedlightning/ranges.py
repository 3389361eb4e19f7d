"""Ranges of arguments, declared beside them, and checked when an object is made: :class:`Range`, :func:`checked`."""

from __future__ import annotations

import functools
import inspect
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from fedlightning.errors import ConfigurationError

Kind = TypeVar("Kind", bound=type)
Init = TypeVar("Init", bound=Callable[..., None])
PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}
"""Kinds of plain values, in words."""


HOLDS = (Union, types.UnionType, list, tuple, set, dict, Sequence, Mapping)
"""Annotations of which the inner ones are about a value, or its elements."""


@dataclass(frozen=True)
class Range:
    """The values that a number may have, as an interval; of a list or table it is the range of each element.

    An infinite value is in a range that is closed at infinity, `"(0, inf]"`, and NaN is in none.

    Args:
        interval: Such as `"[0, 1)"`: both ends, and which of them count.
        note: What the number is, or another way to what such a value would mean, as a sentence for the error message.
        strict: Whether `3.0` is refused where the number is an `int`.

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
    strict: bool = False

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


PositiveInt = Annotated[int, Range("[1, inf)")]
NonNegativeInt = Annotated[int, Range("[0, inf)")]
PositiveFloat = Annotated[float, Range("(0, inf)")]
NonNegativeFloat = Annotated[float, Range("[0, inf)")]
Share = Annotated[float, Range("[0, 1]")]
PositiveShare = Annotated[float, Range("(0, 1]")]
ShareBelowOne = Annotated[float, Range("[0, 1)")]
CountOrShare = Annotated[int, Range("[0, inf)", strict=True)] | Share
"""A whole number is a number of things, and 1.0 all of them."""


def checked(init: Init) -> Init:
    """Refuse arguments that their annotations rule out: numbers outside their :class:`Range`, words outside a `Literal`.

    Plain values of another kind are refused as well, as in a YAML file: `"0.1"` for a number, 1 for a bool, one text for a
    list. Whether an object is of a class is not checked.

    Args:
        init: The `__init__` of a class, for which this is a decorator.

    Raises:
        ConfigurationError: When an object is made; the sentence names class, argument, value and range.

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
            ...
        fedlightning.errors.ConfigurationError: Noise got sigma=-1. Use a number in [0, inf), or None. 0 adds none.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **given: Any) -> None:  # a constructor in tracebacks, too
        try:
            arguments = signature.bind(self, *args, **given).arguments
        except TypeError:
            arguments = {}  # the call below says what is wrong
        check_arguments(self, init, arguments)
        init(self, *args, **given)

    return __init__  # type: ignore[return-value]


def check_on_creation(kind: Kind) -> Kind:
    """Make the `__init__` that a class itself defines a :func:`checked` one: a decorator, also of dataclasses.

    A base class calls it in `__init_subclass__` for all of its family.
    """
    if "__init__" in vars(kind):
        kind.__init__ = checked(kind.__init__)  # type: ignore[misc]
    return kind


def check_arguments(owner: object, init: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of an `__init__` that its annotations rule out.

    For classes whose `__init__` calls `save_hyperparameters`, which reads the frames of the constructors: a decorator would
    stand between them.

    Args:
        owner: The object being made.
        init: The `__init__`.
        arguments: The values by name; other names do not matter, so that `locals()` will do.

    Raises:
        ConfigurationError: If a value is ruled out; the sentence names class, argument, value and range.
    """
    for name, annotation in _annotations(inspect.unwrap(init), plain=True).items():
        if name in arguments and not allows(annotation, arguments[name]):
            if arguments[name] is inspect.signature(init).parameters[name].default:  # as in `name: str = None`
                continue
            annotation = _annotations_of(type(owner)).get(name, annotation)  # a base may say more than its kind
            notes = "".join(f" {note}" for note in dict.fromkeys(_notes(annotation)))
            raise ConfigurationError(
                f"{type(owner).__name__} got {name}={arguments[name]!r}. Use {described(annotation)}.{notes}"
            )


def ranges_of(kind: type) -> dict[str, str]:
    """Return in words what the arguments of a class may be, of those that it or a base of it checks.

    Example:
        >>> from fedlightning.callbacks import FedProx
        >>> ranges_of(FedProx)["mu"]
        'a number in [0, inf)'
    """
    checked_ones = _annotations_of(kind)
    return {name: described(checked_ones[name]) for name in inspect.signature(kind).parameters if name in checked_ones}


def may_be_infinite(kind: type, name: str) -> bool:
    """Return True if an argument of a class has a range that is closed at infinity."""
    annotation = _annotations_of(kind).get(name)
    return annotation is not None and any(math.inf in found for found in _ranges(annotation))


def allows(annotation: Any, value: Any) -> bool:
    """Return False if an annotation rules a value out. What has neither `Range` nor `Literal` in it rules nothing out."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(allows(one, value) and _is_such(one, value) for one in inner)
    if origin is Annotated:
        found = [one for one in annotation.__metadata__ if isinstance(one, Range)]
        if not found or (inner[0] not in PLAIN and not allows(inner[0], value)):
            return not found
        if not isinstance(value, Real) or isinstance(value, bool) or not all(_number(value) in one for one in found):
            return False
        strict = any(one.strict for one in found)
        return inner[0] is not int or isinstance(value, Integral) or (not strict and float(value).is_integer())
    if origin is Literal:
        return any(_is_word(value, one) for one in inner)
    if annotation in PLAIN:
        return _is_plain(annotation, value)
    if annotation is type(None):
        return value is None
    if not _is_checked(annotation) and not _is_plain_kind(annotation):
        return True
    if isinstance(annotation, type) and not inner:  # other objects may stand in for one of a class
        return isinstance(value, annotation) or not isinstance(value, str | Real)
    if isinstance(value, (str, Iterator)) or not hasattr(value, "__iter__"):  # an iterator would be empty afterwards
        return False
    if isinstance(value, Mapping) or _is_table(origin):
        return (
            isinstance(value, Mapping) and _is_table(origin) and all(allows(inner[-1], one) for one in value.values())
        )
    if origin is tuple and inner[-1] is not ...:
        values = list(value)
        return len(values) == len(inner) and all(map(allows, inner, values))
    each = inner[0] if origin is tuple else inner[-1]
    return all(allows(each, one) for one in value)


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
    if origin is tuple and inner and inner[-1] is not ...:
        return f"a list of {', '.join(described(one) for one in inner)}"
    if origin is not None and inner:
        return f"{'a table' if _is_table(origin) else 'a list'}, each {described(inner[0 if origin is tuple else -1])}"
    return PLAIN.get(annotation, f"a {getattr(annotation, '__name__', annotation)}")


def _is_plain(kind: type, value: Any) -> bool:
    """Return whether a value is a number, a bool or a text; a path is a text."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is str:
        return isinstance(value, str | os.PathLike)
    return isinstance(value, Integral if kind is int else Real)


def _is_such(annotation: Any, value: Any) -> bool:
    """Return whether a value is of the kind of one member of a union, so that another member need not allow it."""
    origin = get_origin(annotation)
    if annotation is type(None):
        return value is None
    if _is_checked(annotation) or annotation is Any or not isinstance(origin or annotation, type):
        return True
    if annotation in PLAIN or (_is_plain_kind(annotation) and origin is None):
        return True  # `allows` has looked
    return isinstance(value, origin or annotation)


def _is_word(value: Any, word: Any) -> bool:
    """Return whether a value is one of a `Literal`; True is not 1."""
    kind = Real if isinstance(word, int) else type(word)
    return isinstance(value, kind) and isinstance(value, bool) == isinstance(word, bool) and bool(value == word)


def _number(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number that no float holds
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def _is_table(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_checked(annotation: Any) -> bool:
    return get_origin(annotation) is Literal or bool(_ranges(annotation)) or any(map(_is_checked, get_args(annotation)))


def _is_plain_kind(annotation: Any) -> bool:
    """Return whether an annotation says what kind of value there is: of :data:`PLAIN`, a class, or lists of such."""
    if annotation is Any or annotation is object:
        return False
    if isinstance(annotation, type) and not get_args(annotation):
        return True
    inner = [one for one in get_args(annotation) if one is not ...]
    return get_origin(annotation) in HOLDS and bool(inner) and all(_is_plain_kind(one) for one in inner)


def _ranges(annotation: Any) -> list[Range]:
    own = [one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Range)]
    return own + [found for one in get_args(annotation) for found in _ranges(one)]


def _notes(annotation: Any) -> list[str]:
    return [found.note for found in _ranges(annotation) if found.note]


def _annotations_of(kind: type) -> dict[str, Any]:
    """Return the annotations with something to check of a class and its bases, each argument's from where it is nearest."""
    found: dict[str, Any] = {}
    for one in reversed(kind.__mro__):
        if "__init__" in vars(one):
            found |= _annotations(inspect.unwrap(vars(one)["__init__"]))
    return found


@functools.cache
def _annotations(init: Callable[..., None], plain: bool = False) -> dict[str, Any]:
    """Return the annotations with something to check. Names that exist for type checkers only are left out.

    Those that only say the kind of a value are left out, too, unless they are asked for (`plain`).
    The names of this module are known all the same: a linter may have moved their import to where type checkers alone look.
    """
    found: dict[str, Any] = {}
    if not inspect.isfunction(init):
        return found
    parameters = inspect.signature(init).parameters
    known = {name: value for name, value in globals().items() if not name.startswith("_")} | init.__globals__
    for name, annotation in inspect.get_annotations(init).items():
        try:  # as typing.get_type_hints does
            value = eval(annotation, known) if isinstance(annotation, str) else annotation
        except NameError:
            continue
        says = name != "return" and (_is_checked(value) or (plain and _is_plain_kind(value)))
        several = says and parameters[name].kind
        if several is inspect.Parameter.VAR_POSITIONAL:  # the annotation is of each
            value = types.GenericAlias(tuple, (value, ...))
        elif several is inspect.Parameter.VAR_KEYWORD:
            value = types.GenericAlias(dict, (str, value))
        if says:
            found[name] = value
    return found
