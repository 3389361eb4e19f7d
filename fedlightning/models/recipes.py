"""Recipes: how a module or an optimizer was made, as plain values that a checkpoint or a YAML file can hold.

A *recipe* is what LightningCLI writes too: `{"class_path": "fedlightning.models.MLP", "init_args": {...}}`. A network
has one if it has an attribute `init_args`: a dict with the value of every argument of its constructor. All networks of
this package have it; `recorded`, or one line in your own network's `__init__`, adds it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedlightning.ranges import Init, checked

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""Lightning's own function that turns recipes back into objects when a checkpoint is loaded."""


def module_recipe(module: nn.Module) -> dict[str, Any] | None:
    """Return the recipe of `module`, or `None` if it is not known.

    It is not known if the class cannot be imported by name, or if `module.init_args` is missing, does not name the
    arguments of the constructor (a subclass with another constructor inherits it) or holds more than plain values.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.models.recipes import module_recipe
        >>> module_recipe(MLP(4, [], 2))["init_args"]
        {'in_features': 4, 'hidden': [], 'num_classes': 2, 'dropout': 0.0}
    """
    init_args = getattr(module, "init_args", None)
    if not isinstance(init_args, Mapping):
        return None
    arguments = [name for name in inspect.signature(type(module).__init__).parameters if name != "self"]
    path, values = _import_path(type(module)), _plain(dict(init_args))
    if path is None or values is None or set(values) != set(arguments):
        return None
    return {"class_path": path, "init_args": values}


def recorded(init: Init) -> Init:
    """Keep the arguments of a network's `__init__` in `init_args`, after a check of their ranges: a decorator.

    Example:
        >>> from fedlightning.models import MLP
        >>> MLP(4, hidden=(8,), num_classes=2).init_args
        {'in_features': 4, 'hidden': [8], 'num_classes': 2, 'dropout': 0.0}
    """
    signature, making = inspect.signature(init), checked(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        making(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *arguments = bound.arguments.items()
        self.init_args = {name: list(value) if isinstance(value, list | tuple) else value for name, value in arguments}

    return __init__  # type: ignore[return-value]


def callable_recipe(factory: Any) -> dict[str, Any] | None:
    """Return the recipe of an optimizer or scheduler factory, or `None` if it is not known.

    It is known for a class, or a `functools.partial` of one with plain keywords. Lambdas and local functions cannot be
    written down.

    Example:
        >>> import functools
        >>> import torch
        >>> from fedlightning.models.recipes import callable_recipe
        >>> callable_recipe(functools.partial(torch.optim.SGD, lr=0.1))
        {'class_path': 'torch.optim.sgd.SGD', 'init_args': {'lr': 0.1}}
    """
    keywords: dict[str, Any] = {}
    if isinstance(factory, functools.partial) and not factory.args:
        factory, keywords = factory.func, factory.keywords
    path, values = (_import_path(factory) if isinstance(factory, type) else None), _plain(keywords)
    if path is None or values is None:
        return None
    return {"class_path": path, "init_args": values}


def plain_factory(factory: Any) -> Any:
    """Return jsonargparse's `partial(instantiate, ..., SGD, lr=0.1)` as `partial(SGD, lr=0.1)`, all else unchanged.

    The first form holds a reference to the parser of the command line and can be neither pickled nor copied cheaply.

    Example:
        >>> import torch
        >>> from fedlightning.models.recipes import plain_factory
        >>> plain_factory(torch.optim.SGD) is torch.optim.SGD
        True
    """
    if not isinstance(factory, functools.partial) or not factory.args or not isinstance(factory.args[-1], type):
        return factory
    maker = factory.func if hasattr(factory.func, "__qualname__") else type(factory.func)
    if maker.__module__.partition(".")[0] != "jsonargparse":
        return factory
    return functools.partial(factory.args[-1], **factory.keywords)


def unrecorded_net(name: str) -> nn.Module:
    """Raise an error that says what to do; checkpoints name this function for a network whose recipe is not known.

    Example:
        >>> from fedlightning.models.recipes import unrecorded_net
        >>> unrecorded_net("mine.Net")
        Traceback (most recent call last):
        TypeError: This checkpoint holds the weights of a mine.Net but not how to build one, ...
    """
    raise TypeError(
        f"This checkpoint holds the weights of a {name} but not how to build one, because {name} has no `init_args` "
        f"with plain values for all arguments of its constructor. Pass the network yourself, as in "
        f"load_from_checkpoint(path, net={name.rpartition('.')[2]}(...)), or set `self.init_args = dict(...)` in its "
        f"__init__ before saving."
    )


def net_recipe(net: nn.Module) -> dict[str, Any]:
    """Return the recipe of `net`. If it is not known, the recipe calls `unrecorded_net` on loading.

    Example:
        >>> from torch import nn
        >>> from fedlightning.models.recipes import net_recipe
        >>> net_recipe(nn.ReLU())["class_path"]
        'fedlightning.models.recipes.unrecorded_net'
    """
    recipe = module_recipe(net)
    if recipe is not None:
        return recipe
    name = f"{type(net).__module__}.{type(net).__qualname__}"
    return {"class_path": f"{__name__}.{unrecorded_net.__name__}", "init_args": {"name": name}}


def _import_path(cls: type) -> str | None:
    return None if "<locals>" in cls.__qualname__ else f"{cls.__module__}.{cls.__qualname__}"


def _plain(value: Any) -> Any:
    """Return `value` with tuples as lists, or `None` if it holds (at any depth) something that is not a plain value."""
    try:
        return _listed(value)
    except TypeError:
        return None


def _listed(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _listed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    raise TypeError(type(value).__name__)
