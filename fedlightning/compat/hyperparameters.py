"""The hyper-parameters of objects made from a configuration: each object's own.

LightningCLI hands the configuration of `model` (or `data`) to `save_hyperparameters` by a context variable, for
whatever object calls it meanwhile. So it also reaches objects inside the one that the configuration describes: a data
module inside a wrapper, or a module that another one makes in its constructor, would silently take the values of the
outer one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# The context variable is private, and there is no public way to give hyper-parameters to one object alone.
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin, _given_hyperparameters_context

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""What Lightning makes an object with when it reads the hyper-parameters back from a checkpoint."""
PLAIN = (bool, int, float, str)


class Maker:
    """A function that makes the objects of one section of a configuration, for `ArgumentParser.add_instantiator`.

    The section's own object gets its configuration as hyper-parameters, as from LightningCLI. Every other object has
    those that it would have in Python.

    Args:
        section: Function that returns the section as plain values, with `class_path` and `init_args`.
    """

    def __init__(self, section: Callable[[], Any]) -> None:
        self._section = section

    def __call__(
        self, class_type: type, *args: Any, applied_instantiation_links: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        section = self._section()
        if not isinstance(section, Mapping) or args or not describes(section, class_type, kwargs):
            return class_type(*args, **kwargs)
        given = {
            "_class_path": section["class_path"],
            **(section.get("init_args") or {}),
            **(section.get("dict_kwargs") or {}),
            "_instantiator": INSTANTIATOR,
        }
        if type(class_type).__call__ is not type.__call__:  # it makes its objects in another way
            with _given_hyperparameters_context(given, INSTANTIATOR):
                return class_type(**kwargs)
        made: Any = class_type.__new__(class_type, **kwargs)  # type: ignore[call-overload]
        with only_for(made, given):
            made.__init__(**kwargs)
        return made


@contextmanager
def only_for(made: Any, given: dict[str, Any]) -> Iterator[None]:
    """Within the block, `save_hyperparameters` of one object takes the values given, that of others their own."""
    original = HyperparametersMixin.save_hyperparameters

    def save(self: Any, *args: Any, ignore: Any = None, frame: Any = None, logger: bool = True) -> None:
        if frame is None:
            current = inspect.currentframe()
            frame = None if current is None else current.f_back
        if self is not made:
            original(self, *args, ignore=ignore, frame=frame, logger=logger)
            return
        with _given_hyperparameters_context(given, INSTANTIATOR):
            original(self, *args, ignore=ignore, frame=frame, logger=logger)

    HyperparametersMixin.save_hyperparameters = save  # type: ignore[method-assign]
    try:
        yield
    finally:
        HyperparametersMixin.save_hyperparameters = original  # type: ignore[method-assign]


def describes(section: Mapping[str, Any], class_type: type, arguments: Mapping[str, Any]) -> bool:
    """Return True if a section of a configuration is that of an object with these arguments.

    Example:
        >>> from fedlightning.compat.hyperparameters import describes
        >>> section = {"class_path": "collections.Counter", "init_args": {"size": 3}}
        >>> from collections import Counter, OrderedDict
        >>> describes(section, Counter, {"size": 3}), describes(section, Counter, {"size": 4})
        (True, False)
        >>> describes(section, OrderedDict, {"size": 3})
        False
    """
    if _imported(section.get("class_path")) is not class_type:
        return False
    for name, said in (section.get("init_args") or {}).items():
        value = arguments.get(name)
        if type(said) in PLAIN and type(value) in PLAIN and said != value:
            return False
        if isinstance(said, Mapping) and "class_path" in said:
            inner = _imported(said["class_path"])
            if isinstance(inner, type) and not callable(value) and type(value) is not inner:
                return False
    return True


def _imported(path: Any) -> Any:
    """Return the object of an import path, or `None`."""
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None
