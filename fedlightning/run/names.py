"""Names of classes and functions in files: which of them are looked up, and which only with the user's word."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Trust = bool | Sequence[str]
"""True: whatever a file names. Or the packages and modules whose classes and functions a file may name."""
OURS = "fedlightning"
ROOMS = ("callbacks", "hooks", "layers", "models", "tensors", "wrappers")
"""Rooms of ours whose functions and classes do nothing but compute."""
COMPUTING = ("torch.nn.functional", "torch.nn.init", "torchmetrics.utilities.data", "torchmetrics.functional")
"""Modules of others whose functions do nothing but compute."""
BUILTIN = ("relu", "relu_", "tanh", "sigmoid", "selu", "celu", "rrelu", "softmax", "log_softmax", "exp", "sin", "cos", "abs")
"""Functions of `torch` itself that do nothing but compute, and serve as activations."""
KINDS = (nn.Module, Optimizer, LRScheduler, Enum)
"""Classes that may be looked up where their module is imported already."""


class UntrustedError(ValueError):
    """A file names a class or function that is looked up only with the user's word."""


def path_of(thing: Any) -> str:
    """Return the import path of a class or function.

    Raises:
        ValueError: If it cannot be imported by that path.

    Example:
        >>> path_of(nn.Linear)
        'torch.nn.modules.linear:Linear'
    """
    module, name = getattr(thing, "__module__", None) or "torch", getattr(thing, "__qualname__", "")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing:
        raise ValueError(f"names {module}.{name}, which cannot be imported by that name")
    return f"{module}:{name}"


def look_up(path: Any, trust: Trust = False) -> Any:
    """Return the class or function that a file names.

    Ours are imported. Others are taken where their module is imported already and they cannot do harm: modules, optimizers,
    schedulers and enums, and functions that only compute. All else needs `trust`.

    Args:
        path: As :func:`path_of` returns it.
        trust: What the user trusts.

    Raises:
        UntrustedError: If it needs trust.
        ValueError: If there is no such thing.
    """
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(f"{path!r} is no name of a class")
    trusted = is_trusted(module, trust)
    room = module.partition(".")[2].partition(".")[0] if module.partition(".")[0] == OURS else None
    if trusted or room in ROOMS:
        try:
            found: Any = importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"{module} cannot be imported ({error})") from None
    elif module in sys.modules:
        found = sys.modules[module]
    else:
        raise UntrustedError(
            f"it names {module}.{name}, and {module} is not imported. Import it if it is yours, or say that you trust it "
            f"with trust=['{module}']"
        )
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
        if found is None:
            raise ValueError(f"{module} has no {name}")
        if not trusted and not isinstance(found, type | FunctionType | BuiltinFunctionType):
            raise UntrustedError(f"it names {module}.{name}, which is no class and no function")
    if not trusted and not _harmless(found, module, name, room):
        raise UntrustedError(
            f"it names {module}.{name}, which may do more than compute. If you trust the file, say so with "
            f"trust=['{module}']"
        )
    return found


def is_trusted(module: str, trust: Trust) -> bool:
    """Return True if the user trusts a module by its name or its package's."""
    if isinstance(trust, bool):
        return trust
    prefixes = [trust] if isinstance(trust, str) else trust
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _harmless(found: Any, module: str, name: str, room: str | None) -> bool:
    at_home = (getattr(found, "__module__", None) or "torch") == module  # not what another module has imported
    if not at_home:
        return False
    if room in ROOMS:
        return True
    if isinstance(found, type):
        return issubclass(found, KINDS)
    return module.startswith(COMPUTING) or (module == "torch" and name in BUILTIN)
