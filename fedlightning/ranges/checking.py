"""Arguments are checked when an object is made: :func:`checked`."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedlightning.errors import ConfigurationError
from fedlightning.ranges import annotations as declarations
from fedlightning.ranges.annotations import (
    allows,
    counted_in,
    described,
    is_checked,
    is_plain_kind,
    notes_in,
    ranges_in,
    to_python,
)
from fedlightning.ranges.together import fault_of, refuse_call, replaced_in, shown

Kind = TypeVar("Kind", bound=type)
Init = TypeVar("Init", bound=Callable[..., None])


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
    def __init__(self: Any, *args: Any, **given: Any) -> None:  # a constructor in tracebacks, too
        args, given = tuple(map(to_python, args)), {name: to_python(value) for name, value in given.items()}
        try:
            arguments = signature.bind(self, *args, **given).arguments
        except TypeError:
            if instead := replaced_in(init):
                refuse_call(type(self).__name__, signature, instead, (self, *args), given)
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
            finite = ["It must be finite."] if declarations.is_boundless(arguments[name]) else []
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
    told = [
        (name, things, getattr(owner, name, None))
        for name, annotation in _annotations_of(type(owner)).items()
        for things in counted_in(annotation)
    ]
    parameters = inspect.signature(type(owner)).parameters
    return [
        (name, things, value)
        for name, things, value in told
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
    return annotation is not None and any(math.inf in found for found in ranges_in(annotation))


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
    The names of `annotations.py` are known all the same: a linter may have moved their import to where only type
    checkers look.
    """
    found: dict[str, Any] = {}
    if not inspect.isfunction(init):
        return found
    parameters = inspect.signature(init).parameters
    known = {name: value for name, value in vars(declarations).items() if not name.startswith("_")} | init.__globals__
    for name, annotation in inspect.get_annotations(init).items():
        try:  # as typing.get_type_hints does
            value = eval(annotation, known) if isinstance(annotation, str) else annotation
        except NameError:
            continue
        says = name != "return" and (is_checked(value) or (plain and is_plain_kind(value)))
        several = says and parameters[name].kind
        if several is inspect.Parameter.VAR_POSITIONAL:  # the annotation is of each
            value = types.GenericAlias(tuple, (value, ...))
        elif several is inspect.Parameter.VAR_KEYWORD:
            value = types.GenericAlias(dict, (str, value))
        if says:
            found[name] = value
    return found
