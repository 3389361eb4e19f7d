"""Old names of arguments and classes: they work until version 0.3 and warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Init = TypeVar("Init", bound=Callable[..., None])

CLASSES = {"PFedLA": "pFedLA", "PFedMe": "pFedMe"}
"""Old name of a class in `fedlightning.callbacks`: its present one."""


def renamed_arguments(**names: str) -> Callable[[Init], Init]:
    """Decorate an `__init__` so that it still takes arguments by their old names.

    Args:
        names: Old name = present name.

    Raises:
        TypeError: When the decorated `__init__` is given both.

    Example:
        >>> class Tool:
        ...     @renamed_arguments(rate="lr")
        ...     def __init__(self, lr: float = 0.1) -> None:
        ...         self.lr = lr
        >>> Tool(rate=0.5).lr
        0.5
    """

    def decorate(init: Init) -> Init:
        @wraps(init)
        def accepting(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **present_names(type(self).__name__, names, kwargs))

        accepting.old_names = names  # type: ignore[attr-defined]
        return accepting  # type: ignore[return-value]

    return decorate


def old_names(kind: type) -> dict[str, str]:
    """Return the old argument names of a class and what each is called now."""
    return dict(getattr(vars(kind).get("__init__"), "old_names", {}))


def present_names(owner: str, names: dict[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with old argument names replaced by the present ones, with a warning for each.

    Raises:
        TypeError: If the old and the present name of one argument are both there.
    """
    out = dict(given)
    for old, new in names.items():
        if old in out:
            if new in out:
                raise TypeError(f"{owner} got '{old}' and '{new}', which are the same argument. Keep '{new}'.")
            out[new] = out.pop(old)
            _warn(f"{owner}: the argument '{old}' is called '{new}' now; the old name works until version 0.3.")
    return out


def present_class(name: str) -> str | None:
    """Return the present name of a class that had the name `name`, with a warning; `None` if it was never renamed."""
    new = CLASSES.get(name)
    if new is not None:
        _warn(f"{name} is called {new} now, as in its paper; the old name works until version 0.3.")
    return new


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=4)
