"""Names of classes and functions in files: which of them are looked up, and which only with the user's word."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Trust = bool | Sequence[str]
"""True: whatever a file names. Or the packages and modules whose classes and functions a file may name."""
OURS = "fedlightning"
ROOMS = ("callbacks", "hooks", "layers", "models", "tensors", "wrappers")
"""Rooms of ours whose functions and classes do nothing but compute."""
COMPUTING = (
    "torch.nn.functional",
    "torch.nn.init",
    "torch._C._nn",
    "torchmetrics.metric",
    "torchmetrics.utilities.data",
    "torchmetrics.functional",
)
"""Modules of others whose functions do nothing but compute."""
BUILTIN = frozenset(
    ["relu", "relu_", "tanh", "sigmoid", "selu", "celu", "rrelu", "softmax", "log_softmax", "exp", "sin", "cos", "abs"]
)
"""Functions of `torch` itself that do nothing but compute, and serve as activations."""
PACKAGES = ("peft", "timm")
"""Packages of others whose modules are imported when a file names one: our own wrappers and networks are made with them."""
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
    module = getattr(thing, "__module__", None) or "torch"
    names = (
        getattr(thing, "__qualname__", ""),
        getattr(thing, "__name__", ""),
    )  # functions of torch have a false first one
    for name in names:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is thing:
            return f"{module}:{name}"
    raise ValueError(f"names {module}.{names[0]}, which cannot be imported by that name")


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
    if trusted or _room(module) in ROOMS or is_trusted(module, PACKAGES):
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
    if not trusted and not _harmless(found, name):
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


def _harmless(found: Any, name: str) -> bool:
    home = getattr(found, "__module__", None) or "torch"  # not the module that has imported it
    if home.partition(".")[0] == OURS:
        return _room(home) in ROOMS
    if isinstance(found, type):
        return issubclass(found, KINDS)
    return is_trusted(home, COMPUTING) or (home == "torch" and name in BUILTIN)


def _room(module: str) -> str | None:
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == OURS else None


HYPER_PARAMETERS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, "hparams", "module_arguments")
"""Entries of a checkpoint that Lightning makes a module with, those of its earlier versions included."""
_PATH = re.compile(r"(?<![\w./\\])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def refuse_untrusted_names(checkpoint: Mapping[str, Any], trust: Trust) -> None:
    """Refuse a checkpoint whose hyper-parameters would make Lightning import or call what is not trusted.

    Lightning's instantiator takes a text for a class or function wherever a parameter is one, so every text in such
    hyper-parameters that is the path of something importable is looked at.

    Raises:
        UntrustedError: Naming it.
    """
    if checkpoint.get(LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE) is not None:
        raise UntrustedError("its hyper-parameters are of a type of their own, which is called when they are read")
    for entry in HYPER_PARAMETERS:
        values = checkpoint.get(entry) or {}
        if not isinstance(values, Mapping):
            raise UntrustedError(f"its {entry} are a {type(values).__name__}, not named values")
        if "_instantiator" in values or "_class_path" in values:
            for text in _texts({name: value for name, value in values.items() if name != "_instantiator"}):
                for path in _PATH.findall(text):
                    _check_path(path, trust)


def _check_path(text: str, trust: Trust) -> None:
    if is_trusted(text, trust):
        return
    parts = text.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        if module in sys.modules or parts[0] == OURS:
            try:
                look_up(f"{module}:{'.'.join(parts[cut:])}", trust)
            except UntrustedError:
                raise
            except ValueError:
                continue  # there is no such thing: a text that only looks like it
            return
    found = importlib.util.find_spec(parts[0]) if parts[0] != OURS else None
    if found is not None and found.origin is not None:  # no folder that only has such a name
        raise UntrustedError(
            f"its hyper-parameters name {text}, which is not imported. Import it if it is yours, or say that you trust it "
            f"with trust=['{parts[0]}']"
        )


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _texts(value)
    elif isinstance(values, list | tuple | set):
        for value in values:
            yield from _texts(value)
