"""Which arguments go together: declared above an `__init__`, and checked with the values of each."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedlightning.errors import ConfigurationError, listed

Init = TypeVar("Init", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)
Rule = Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]
"""What is wrong with arguments, as the end of a sentence: a function of the given ones, and of all of them."""
RULES = "_arguments_together"
"""Attribute of an `__init__` that holds its rules."""
REPLACED = "_replaced_arguments"
"""Attribute of an `__init__` that holds what has taken the place of arguments that it does not have."""
ANY: Any = object()


def at_most_one(*names: str, why: str) -> Callable[[Init], Init]:
    """Declare that at most one of some arguments is given: that is not its default.

    Args:
        names: Names of the arguments.
        why: Why, and the way out: the end of the sentence.

    Example:
        >>> from fedlightning.ranges import checked
        >>> class Round:
        ...     @checked
        ...     @at_most_one("steps", "seconds", why="a round is one of them. Leave one out.")
        ...     def __init__(self, steps: int | None = None, seconds: float | None = None) -> None:
        ...         self.steps, self.seconds = steps, seconds
        >>> Round(3, 0.5)
        Traceback (most recent call last):
            ...
        fedlightning.errors.ConfigurationError: Round got both steps=3 and seconds=0.5: a round is one of them. Leave one out.
    """
    return _ruled(names, lambda chosen, _: _several(chosen, names, why))


def at_least_one(*names: str, why: str) -> Callable[[Init], Init]:
    """Declare that at least one of some arguments is given. The arguments are those of :func:`at_most_one`."""
    return _ruled(names, lambda chosen, _: _none(chosen, names, why))


def exactly_one(*names: str, why: str) -> Callable[[Init], Init]:
    """Declare that one of some arguments is given, and no more. The arguments are those of :func:`at_most_one`."""
    return _ruled(names, lambda chosen, _: _none(chosen, names, why) or _several(chosen, names, why))


def needs(names: str | tuple[str, ...], other: str, why: str, value: Any = ANY) -> Callable[[Init], Init]:
    """Declare that an argument, or each of several, is given only beside another one.

    Args:
        names: Name of the argument, or of several.
        other: Name of the one that they need.
        why: Why, and the way out: the end of the sentence.
        value: What the other one has to be. Default: anything but its default.
    """
    several = (names,) if isinstance(names, str) else names

    def rule(chosen: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
        name = next((name for name in several if name in chosen), None)
        if name is None or (other in chosen if value is ANY else _is_default(values[other], value)):
            return None
        return f"got {name}={shown(chosen[name])} without {other if value is ANY else f'{other}={value!r}'}: {why}"

    return _ruled((*several, other), rule)


def idle_with(names: str | tuple[str, ...], other: str, value: Any, why: str) -> Callable[[Init], Init]:
    """Declare that an argument, or any of several, is not given where another one has a value with which it does nothing.

    Args:
        names: Name of the argument, or of several.
        other: Name of the one that decides.
        value: Its value with which the others do nothing.
        why: Why, and the way out: the end of the sentence.
    """
    several = (names,) if isinstance(names, str) else names

    def rule(chosen: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
        name = next((name for name in several if name in chosen), None)
        if name is None or not _is_default(values[other], value):
            return None
        return f"got {name}={shown(chosen[name])} with {other}={value!r}: {why}"

    return _ruled((*several, other), rule)


def replaced(**names: str) -> Callable[[Init], Init]:
    """Declare what has taken the place of arguments that an `__init__` does not have: name -> what to use.

    Calls that Python would refuse are refused in words then; :func:`refuse_in_words` is the same for methods.

    Example:
        >>> from fedlightning.ranges import checked
        >>> class Round:
        ...     @checked
        ...     @replaced(batches="steps")
        ...     def __init__(self, steps: int = 1) -> None:
        ...         self.steps = steps
        >>> Round(batches=3)
        Traceback (most recent call last):
            ...
        fedlightning.errors.ConfigurationError: Round has no argument 'batches'. Use steps.
    """

    def declare(init: Init) -> Init:
        setattr(_constructor(init), REPLACED, names)
        return init

    return declare


def replaced_in(init: Callable[..., None]) -> Mapping[str, str]:
    """Return what has taken the place of arguments that an `__init__` does not have, as :func:`replaced` says."""
    names: Mapping[str, str] = getattr(_constructor(init), REPLACED, {})
    return names


def refuse_in_words(methods: Mapping[str, Mapping[str, str]], attributes: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """Refuse in words what is asked of a class as of another one that it stands in for: a decorator.

    Args:
        methods: Method -> argument that it does not have -> what to use.
        attributes: Attribute that its objects do not have -> what to use.

    Example:
        >>> @refuse_in_words({"begin": {"batches": "steps"}}, {"batch": "step"})
        ... class Round:
        ...     def begin(self, steps: int = 1) -> None: ...
        >>> Round().begin(batches=3)
        Traceback (most recent call last):
            ...
        fedlightning.errors.ConfigurationError: begin() has no argument 'batches'. Use steps.
        >>> Round().batch
        Traceback (most recent call last):
            ...
        AttributeError: 'Round' object has no attribute 'batch'. Use step.
    """

    def declare(kind: Kind) -> Kind:
        for name, instead in methods.items():
            setattr(kind, name, _called_in_words(vars(kind)[name], instead))

        def __getattr__(self: Any, name: str) -> Any:
            hint = f". Use {attributes[name]}." if name in attributes else ""
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'{hint}", name=name, obj=self)

        kind.__getattr__ = __getattr__  # type: ignore[attr-defined]  # unknown to type checkers, which know every attribute
        return kind

    return declare


def _called_in_words(method: Callable[..., Any], instead: Mapping[str, str]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        refuse_call(f"{method.__name__}()", signature, instead, args, keywords)
        return method(*args, **keywords)

    return call


def refuse_call(
    owner: str,
    signature: inspect.Signature,
    instead: Mapping[str, str],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> None:
    """Refuse arguments that a signature does not take; of those that are missing Python tells.

    Args:
        owner: What is called, as a sentence begins.
        signature: Its signature, with `self`.
        instead: Name -> what has taken its place.
        args: The arguments without a name, with `self`.
        keywords: The others.

    Raises:
        ConfigurationError: If there is one of another name, or too many without a name.
    """
    names = [name for name in signature.parameters if name != "self"]
    for name in keywords:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"Use {instead[name]}." if name in instead else f"Did you mean {close[0]}?" if close else ""
            raise ConfigurationError(f"{owner} has no argument {name!r}. {hint or f'It has {listed(names)}.'}")
    ordered = [name for name in names if signature.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) - 1 > len(ordered):
        rule = f"takes {listed(ordered)} without a name" if ordered else "takes no argument without a name"
        others = [name for name in names if name not in ordered and name not in keywords]
        way_out = f"Name it, as in {others[0]}=..." if others else "Leave it out."
        raise ConfigurationError(f"{owner} got {shown(args[-1])}, and {rule}. {way_out}")


def fault_of(init: Callable[..., None], arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments of an `__init__` together, as the end of a sentence; `None`: nothing."""
    rules: list[Rule] = getattr(inspect.unwrap(init), RULES, [])
    if not rules:
        return None
    parameters = inspect.signature(init).parameters.items()
    defaults = {
        name: None if parameter.default is parameter.empty else parameter.default for name, parameter in parameters
    }
    values = {name: arguments.get(name, default) for name, default in defaults.items()}
    chosen = {name: value for name, value in values.items() if not _is_default(value, defaults[name])}
    return next((fault for rule in rules if (fault := rule(chosen, values)) is not None), None)


def shown(value: Any, most: int = 200) -> str:
    """Return a value as a sentence shows it; its class, if it is long or an object without words of its own."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "\n"
    return text if len(text) <= most and "\n" not in text and " at 0x" not in text else f"<{type(value).__name__}>"


def _ruled(names: tuple[str, ...], rule: Rule) -> Callable[[Init], Init]:
    def declare(init: Init) -> Init:
        constructor = _constructor(init)
        if misspelt := [name for name in names if name not in inspect.signature(constructor).parameters]:
            raise TypeError(
                f"{constructor.__qualname__} has no argument {listed(misspelt)}, of which a rule is declared above it."
            )
        setattr(constructor, RULES, [rule, *getattr(constructor, RULES, [])])
        return init

    return declare


def _constructor(init: Any) -> Any:
    """Return the `__init__` itself: of a class its own; above `checked` it is the same as below."""
    return inspect.unwrap(vars(init)["__init__"] if isinstance(init, type) else init)


def _several(chosen: Mapping[str, Any], names: tuple[str, ...], why: str) -> str | None:
    settings = [f"{name}={shown(chosen[name])}" for name in names if name in chosen]
    return f"got both {' and '.join(settings[:2])}: {why}" if len(settings) > 1 else None


def _none(chosen: Mapping[str, Any], names: tuple[str, ...], why: str) -> str | None:
    if any(name in chosen for name in names):
        return None
    return f"got {f'neither {names[0]} nor {names[1]}' if len(names) == 2 else f'none of {listed(names)}'}: {why}"


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a value is the default, or a plain value equal to it."""
    return value is default or (isinstance(value, bool | int | float | str) and value == default)
