"""What an annotation says of an argument's values: ranges, lengths and classes, what they allow, and how sentences say it.

Arguments are checked when an object is made: :func:`checked`.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, dataclass_transform, get_args, get_origin

from fedlightning.errors import ConfigurationError
from fedlightning.ranges.together import Init, Kind, fault_of, refuse_call, replaced_in, shown

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
            raise ValueError(f"Range({self.interval!r}) is not an interval. Write '[0, 1)', or '[0, inf)'.")

    def __contains__(self, value: float) -> bool:
        """Return True if a number is in the range."""
        low, high = (float(end) for end in self.interval[1:-1].split(","))
        above = low <= value if self.interval.startswith("[") else low < value
        below = value <= high if self.interval.endswith("]") else value < high
        return above and below


@dataclass(frozen=True)
class Length:
    """How many elements a list or table has, and whether they differ.

    Args:
        least: Fewest elements.
        different: Whether no two are equal.
        note: What the elements are, as a sentence for the error message.

    Example:
        >>> from typing import Annotated
        >>> described(Annotated[list[Share], Length(2, different=True)])
        'a list of at least 2, all different, each a number in [0, 1]'
    """

    least: int = 1
    different: bool = False
    note: str = ""

    def allows(self, value: Any) -> bool:
        """Return True if a list or table is long enough, and its elements differ where they have to."""
        try:
            if isinstance(value, str) or not isinstance(value, Sized) or len(value) < self.least:
                return False
            return not self.different or len(set(value)) == len(value)  # type: ignore[call-overload]
        except TypeError:  # an array without a dimension; elements that are not plain values
            return False


@dataclass(frozen=True)
class Instance:
    """That an object is of the annotated class, and not one that stands in for it.

    Args:
        note: What the object is for, or another way, as a sentence for the error message.
    """

    note: str = ""


@dataclass(frozen=True)
class Counts:
    """What a whole number counts: before round 1, when that is known, one above what there is is told of.

    Args:
        things: `"clients"`: a number above theirs is refused. `"rounds"`: it is warned of, since a run may be resumed with
            more.

    Example:
        >>> counted_in(Annotated[int, Range("[1, inf)"), Counts("clients")] | None)
        ['clients']
    """

    things: Literal["clients", "rounds"]


Count = Annotated[int, Range("[1, inf)", strict=True)]
"""A number of things, where `3.0` is none: a float may mean a share."""
Natural = Annotated[int, Range("[0, inf)", strict=True)]
PositiveInt = Annotated[int, Range("[1, inf)")]
ClientCount = Annotated[int, Range("[1, inf)"), Counts("clients")]
RoundCount = Annotated[int, Range("[0, inf)"), Counts("rounds")]
NonNegativeInt = Annotated[int, Range("[0, inf)")]
PositiveFloat = Annotated[float, Range("(0, inf)")]
NonNegativeFloat = Annotated[float, Range("[0, inf)")]
Share = Annotated[float, Range("[0, 1]")]
PositiveShare = Annotated[float, Range("(0, 1]")]
ShareBelowOne = Annotated[float, Range("[0, 1)")]
CountOrShare = Natural | Share
"""A whole number is a number of things, and 1.0 all of them."""
RoundCountOrShare = Annotated[int, Range("[0, inf)", strict=True), Counts("rounds")] | Share


def allows(annotation: Any, value: Any) -> bool:
    """Return False if an annotation rules a value out. What has neither `Range` nor `Literal` in it rules nothing out."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(allows(part, value) and _is_such(part, value) for part in inner)
    if origin is Annotated:
        if any(isinstance(note, Instance) for note in annotation.__metadata__):
            return isinstance(value, get_origin(inner[0]) or inner[0])
        lengths = [note for note in annotation.__metadata__ if isinstance(note, Length)]
        if lengths:
            return allows(inner[0], value) and all(length.allows(value) for length in lengths)
        ranges = [note for note in annotation.__metadata__ if isinstance(note, Range)]
        if not ranges or (inner[0] not in PLAIN and not allows(inner[0], value)):
            return not ranges
        if (
            not isinstance(value, Real)
            or isinstance(value, bool | Fraction)
            or not all(_number(value) in range_ for range_ in ranges)
        ):
            return False
        strict = any(range_.strict for range_ in ranges)
        return inner[0] is not int or isinstance(value, Integral) or (not strict and float(value).is_integer())
    if origin is Literal:
        return any(_is_word(value, word) for word in inner)
    if annotation in PLAIN:
        return _is_plain(annotation, value)
    if annotation is type(None):
        return value is None
    if not is_checked(annotation) and not is_plain_kind(annotation):
        return True
    if isinstance(annotation, type) and not inner:  # other objects may stand in for one of a class
        return isinstance(value, annotation) or not isinstance(value, str | Real)
    if isinstance(value, (str, Iterator)) or not hasattr(value, "__iter__"):  # an iterator would be empty afterwards
        return False
    if isinstance(value, Mapping) or _is_table(origin):
        return (
            isinstance(value, Mapping)
            and _is_table(origin)
            and all(allows(inner[-1], entry) for entry in value.values())
        )
    if origin is tuple and inner[-1] is not ...:
        values = list(value)
        return len(values) == len(inner) and all(map(allows, inner, values))
    each = inner[0] if origin is tuple else inner[-1]
    return all(allows(each, entry) for entry in value)


def described(annotation: Any) -> str:
    """Return in words what an annotation allows."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        words = [described(part) for part in inner]
        return ", ".join(words[:-1]) + (f", or {words[-1]}" if words[1:] else words[-1])
    if origin is Annotated:
        lengths = [note for note in annotation.__metadata__ if isinstance(note, Length)]
        if lengths:
            kind, comma, each = described(inner[0]).partition(",")
            least = max(length.least for length in lengths)
            different = ", all different" if any(length.different for length in lengths) else ""
            return f"{kind} of at least {'one' if least == 1 else least}{different}{comma}{each}"
        intervals = [note.interval for note in annotation.__metadata__ if isinstance(note, Range)]
        return described(inner[0]) + (f" in {' and '.join(intervals)}" if intervals else "")
    if origin is Literal:
        words = [repr(word) for word in inner]
        return ", ".join(words[:-1]) + (f" or {words[-1]}" if words[1:] else words[-1])
    if annotation is type(None):
        return "None"
    if origin is tuple and inner and inner[-1] is not ...:
        return f"a list of {', '.join(described(part) for part in inner)}"
    if origin is not None and inner:
        kind, each = "a table" if _is_table(origin) else "a list", inner[0 if origin is tuple else -1]
        return kind if each is Any else f"{kind}, each {described(each)}"
    name = str(getattr(annotation, "__name__", annotation))
    return PLAIN.get(annotation, f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}")


def _is_plain(kind: type, value: Any) -> bool:
    """Return whether a value is a number, a bool or a text; a path is a text."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is str:
        return isinstance(value, str | os.PathLike)
    return isinstance(value, Integral if kind is int else Real) and is_finite(value)


def is_boundless(value: Any) -> bool:
    """Return whether a value is a number, but NaN, infinite or beyond what a float holds."""
    return isinstance(value, Real) and not isinstance(value, bool) and not is_finite(value)


def is_finite(value: Any) -> bool:
    """Return whether a value is a number, and neither NaN, infinite nor beyond what a float holds.

    Example:
        >>> is_finite(0.5), is_finite(float("nan")), is_finite(10**400), is_finite(True)
        (True, False, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(_number(value))


def _is_such(annotation: Any, value: Any) -> bool:
    """Return whether a value is of the kind of one member of a union, so that another member need not allow it."""
    origin = get_origin(annotation)
    if annotation is type(None):
        return value is None
    if is_checked(annotation) or annotation is Any or not isinstance(origin or annotation, type):
        return True
    if annotation in PLAIN or (is_plain_kind(annotation) and origin is None):
        return True  # `allows` has looked
    return isinstance(value, origin or annotation)


def _is_word(value: Any, word: Any) -> bool:
    """Return whether a value is one of a `Literal`; True is not 1."""
    kind = Real if isinstance(word, int) else type(word)
    return isinstance(value, kind) and isinstance(value, bool) == isinstance(word, bool) and bool(value == word)


def to_python(value: Any) -> Any:
    """Return a number of numpy as Python's, which files and settings hold; any other value as it is.

    Example:
        >>> import numpy as np
        >>> to_python(np.int64(3)), to_python("a")
        (3, 'a')
    """
    numpy = sys.modules.get("numpy")  # whoever has a number of numpy has imported it
    return value if numpy is None or not isinstance(value, numpy.generic) else value.item()


def number_in(text: str) -> float:
    """Return the number that a text is, in digits as English writes them: Python takes `1_0` and those of other scripts.

    Raises:
        ValueError: If it is none.

    Example:
        >>> number_in(" 1e3"), number_in("-.5")
        (1000.0, -0.5)
        >>> number_in("1_0")
        Traceback (most recent call last):
        ValueError: could not convert string to float: '1_0'
    """
    if "_" in text or not text.strip().isascii():
        raise ValueError(f"could not convert string to float: {text!r}")
    return float(text)


def _number(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number that no float holds is in no range
        return math.nan


def _is_table(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def is_checked(annotation: Any) -> bool:
    """Return whether an annotation declares more than the kind of a value."""
    return (
        get_origin(annotation) is Literal or bool(_declared(annotation)) or any(map(is_checked, get_args(annotation)))
    )


def is_plain_kind(annotation: Any) -> bool:
    """Return whether an annotation says what kind of value there is: of :data:`PLAIN`, a class, or lists of such."""
    if annotation is Any or annotation is object:
        return False
    if isinstance(annotation, type) and not get_args(annotation):
        return True
    inner = [part for part in get_args(annotation) if part is not ...]
    return get_origin(annotation) in HOLDS and bool(inner) and all(is_plain_kind(part) for part in inner)


def ranges_in(annotation: Any) -> list[Range]:
    """Return the ranges of numbers in an annotation."""
    return [declared for declared in _declared(annotation) if isinstance(declared, Range)]


def counted_in(annotation: Any) -> list[str]:
    """Return what a whole number with an annotation counts, as :class:`Counts` says."""
    things = [note.things for note in getattr(annotation, "__metadata__", ()) if isinstance(note, Counts)]
    return things + [things for part in get_args(annotation) for things in counted_in(part)]


def notes_in(annotation: Any) -> list[str]:
    """Return what an annotation's declarations add to the error message."""
    return list(dict.fromkeys(declared.note for declared in _declared(annotation) if declared.note))


def _declared(annotation: Any) -> list[Range | Length | Instance]:
    declared = [note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, Range | Length | Instance)]
    return declared + [declared for part in get_args(annotation) for declared in _declared(part)]


def checked(init: Init) -> Init:
    """Refuse arguments that their annotations rule out: numbers outside their `Range`, words outside a `Literal`.

    Plain values of another kind are refused as well, as in a YAML file: `"0.1"` for a number, 1 for a bool, one text for a
    list. Whether an object is of a class is checked where its annotation has an `Instance`. Arguments that do not go together
    are refused by what is declared above `__init__`, such as :func:`at_most_one`.

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
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:  # a constructor in tracebacks, too
        args, keywords = tuple(map(to_python, args)), {name: to_python(value) for name, value in keywords.items()}
        try:
            arguments = signature.bind(self, *args, **keywords).arguments
        except TypeError:
            refuse_call(type(self).__name__, signature, replaced_in(init) or {}, (self, *args), keywords)
            init(self, *args, **keywords)  # Python says what is missing
            raise
        check_arguments(self, init, arguments)
        init(self, *args, **keywords)

    return __init__  # type: ignore[return-value]


def check_on_creation(kind: Kind) -> Kind:
    """Make the `__init__` that a class itself defines a :func:`checked` one: a decorator, also of dataclasses.

    A base class calls it in `__init_subclass__` for all of its family.
    """
    if "__init__" in vars(kind):
        kind.__init__ = checked(kind.__init__)  # type: ignore[misc]
    return kind


@dataclass_transform(eq_default=False)
def make_init(kind: Kind) -> Kind:
    """Make the `__init__` of a class out of the arguments that its body declares: kept under their names, and checked.

    A decorator for classes whose constructor would do nothing else. What it has to do beside goes into `__post_init__`, and
    what is declared of several arguments, such as :func:`at_most_one`, above the decorator. Arguments of a base class are no
    arguments here unless they are declared again.

    It is the constructor of a dataclass, and nothing else is one's: equality and representation are those of the base, and
    whoever looks for arguments (jsonargparse) finds a constructor, whose annotations are read in the class's own module.

    Example:
        >>> @make_init
        ... class Noise:
        ...     sigma: Annotated[float, Range("[0, inf)")] = 1.0
        >>> Noise().sigma
        1.0
        >>> Noise(sigma=-1)
        Traceback (most recent call last):
            ...
        fedlightning.errors.ConfigurationError: Noise got sigma=-1. Use a number in [0, inf).
    """
    dataclass(eq=False, repr=False, match_args=False)(kind)  # in place
    for name in ("__dataclass_fields__", "__dataclass_params__"):
        delattr(kind, name)
    return check_on_creation(kind)


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
            finite = ["It must be finite."] if is_boundless(arguments[name]) else []
            raise ConfigurationError(
                f"{type(owner).__name__} got {name}={shown(arguments[name])}. "
                + " ".join([f"Use {described(annotation)}.", *notes_in(annotation), *finite])
            )
    fault = fault_of(init, arguments)
    if fault is not None:
        raise ConfigurationError(f"{type(owner).__name__} {fault}")


def counts_of(owner: object) -> list[tuple[str, str, int]]:
    """Return the arguments of an object that count something, each with what it counts and its value; defaults left out.

    Example:
        >>> from fedlightning.callbacks import IFCA
        >>> counts_of(IFCA(num_clusters=3))
        [('num_clusters', 'clients', 3)]
    """
    counts = [
        (name, things, getattr(owner, name, None))
        for name, annotation in _annotations_of(type(owner)).items()
        for things in counted_in(annotation)
    ]
    parameters = inspect.signature(type(owner)).parameters
    return [
        (name, things, value)
        for name, things, value in counts
        if isinstance(value, int) and (name not in parameters or value != parameters[name].default)
    ]


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
    return annotation is not None and any(math.inf in range_ for range_ in ranges_in(annotation))


def _annotations_of(kind: type) -> dict[str, Any]:
    """Return the annotations with something to check of a class and its bases, each argument's from where it is nearest."""
    if not isinstance(kind, type):  # a function that a configuration names in place of a class
        return _annotations(inspect.unwrap(kind))
    annotations: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if "__init__" in vars(base):
            annotations |= _annotations(inspect.unwrap(vars(base)["__init__"]))
    return annotations


@functools.cache
def _annotations(init: Callable[..., None], plain: bool = False) -> dict[str, Any]:
    """Return the annotations with something to check. Names that exist for type checkers only are left out.

    Those that only say the kind of a value are left out, too, unless they are asked for (`plain`).
    The names of `annotations.py` are known all the same: a linter may have moved their import to where only type
    checkers look.
    """
    annotations: dict[str, Any] = {}
    if not inspect.isfunction(init):
        return annotations
    parameters = inspect.signature(init).parameters
    namespace = {name: value for name, value in globals().items() if not name.startswith("_")} | init.__globals__
    for name, annotation in inspect.get_annotations(init).items():
        try:  # as typing.get_type_hints does
            value = eval(annotation, namespace) if isinstance(annotation, str) else annotation
        except NameError:
            continue
        says = name != "return" and (is_checked(value) or (plain and is_plain_kind(value)))
        several = says and parameters[name].kind
        if several is inspect.Parameter.VAR_POSITIONAL:  # the annotation is of each
            value = types.GenericAlias(tuple, (value, ...))
        elif several is inspect.Parameter.VAR_KEYWORD:
            value = types.GenericAlias(dict, (str, value))
        if says:
            annotations[name] = value
    return annotations
