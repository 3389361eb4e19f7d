"""Names of classes and functions in files: which of them are looked up, and which only with the user's word."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from lightning.pytorch import LightningModule

from fedlightning.codec.allowed import IMPORTED, constructed, forbidden, pure, within

Trust = bool | Sequence[str]
"""True: whatever a file names. Or the packages and modules whose classes and functions a file may name."""


class UntrustedError(ValueError):
    """A file names a class or function that is looked up only with the user's word."""


def path_of(thing: Any) -> str:
    """Return the import path of a class or function.

    Example:
        >>> import torch
        >>> path_of(torch.nn.Linear)
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


def look_up(path: Any, trust: Trust = False, called: bool = False) -> Any:
    """Return the class or function that a file names.

    Without trust it is a class whose objects are restored by setting attributes, or, where the file's module calls it, a
    function or class that only computes: :mod:`fedlightning.codec.allowed` lists them. All else needs `trust`.
    """
    module, name = _parts(path)
    found = _found(module, name, imported=is_trusted(module, trust) or within(module, IMPORTED))
    home = getattr(found, "__module__", None) or "torch"  # not the module that has imported it
    if trust is True or (is_trusted(module, trust) and is_trusted(home, trust)):
        return found
    if called and not pure(found, home):
        reason = "may do more than compute"
    elif not called and isinstance(found, type):
        reason = forbidden(found) or ""
    else:
        reason = "" if called else "is no class"
    if reason:
        raise UntrustedError(
            f"it names {module}.{name}, which {reason}. If you trust the file, say so with trust=['{module}']"
        )
    return found


def plain_kind(path: Any, kind: type) -> Any:
    """Return the enum or named tuple that a file names, which is imported already or ours."""
    module, name = _parts(path)
    found = _found(module, name, imported=within(module, IMPORTED))
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{path} is no {kind.__name__.lower()}")
    if any("__call__" in vars(base) for base in found.__mro__):
        raise UntrustedError(f"it names {path}, whose values can be called")
    return found


def _parts(path: Any) -> tuple[str, str]:
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError(f"{path!r:.200} is no name of a class")
    return module, name


def _found(module: str, name: str, imported: bool) -> Any:
    """Return what a module holds under a name, without asking the module's `__getattr__`, which would import more."""
    if imported:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"{module} cannot be imported ({error})") from None
    elif module not in sys.modules:
        raise UntrustedError(
            f"it names {module}.{name}, and {module} is not imported. Import it if it is yours, and say that you trust it "
            f"with trust=['{module}']"
        )
    found: Any = sys.modules[module]
    for depth, part in enumerate(name.split(".")):
        if depth and not isinstance(found, type):
            raise UntrustedError(f"it names {module}.{name}, which is no class and no function")
        found = vars(found).get(part)
        if found is None:
            raise ValueError(f"{module} has no {name}")
    return found


def is_trusted(module: str, trust: Trust) -> bool:
    """Return True if the user trusts a module by its name or its package's."""
    if isinstance(trust, bool):
        return trust
    prefixes = [trust] if isinstance(trust, str) else trust
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


HYPER_PARAMETERS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, "hparams", "module_arguments")
"""Entries of a checkpoint that Lightning makes a module with, those of its earlier versions included."""
_PATH = re.compile(r"(?<![\w./\\])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def refuse_untrusted_names(checkpoint: Mapping[str, Any], trust: Trust) -> None:
    """Refuse a checkpoint whose hyper-parameters would make Lightning import or call what is not trusted.

    Lightning's instantiator takes a text for a class or function wherever a parameter is one, so every text in such
    hyper-parameters that is the path of something importable is looked at.
    """
    if checkpoint.get(LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE) is not None:
        raise UntrustedError("its hyper-parameters are of a type of their own, which is called when they are read")
    for entry in HYPER_PARAMETERS:
        values = checkpoint.get(entry) or {}
        if not isinstance(values, Mapping):
            raise UntrustedError(f"its {entry} are a {type(values).__name__}, not named values")
        if "_instantiator" in values or "_class_path" in values:
            for text in _texts({name: value for name, value in values.items() if name != "_instantiator"}, set()):
                for path in _PATH.findall(text):
                    _check_path(path, trust)


def _check_path(text: str, trust: Trust) -> None:
    """Refuse a text that Lightning's instantiator would take for something that is not trusted."""
    if is_trusted(text, trust):
        return
    parts = text.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module, name = ".".join(parts[:cut]), ".".join(parts[cut:])
        if module in sys.modules or within(module, IMPORTED):
            try:
                found = _found(module, name, imported=True)
            except ValueError:
                continue  # there is no such thing: a text that only looks like it
            home = getattr(found, "__module__", None) or "torch"
            if not (constructed(found, home) or is_trusted(home, trust)):
                raise UntrustedError(
                    f"its hyper-parameters name {text}, which may do more than compute. If you trust the file, say so with "
                    f"trust=['{module}']"
                )
            return
    spec = importlib.util.find_spec(parts[0])
    if spec is not None and spec.origin is not None:  # no folder that only has such a name
        raise UntrustedError(
            f"its hyper-parameters name {text}, which is not imported. Import it if it is yours, and say that you trust it "
            f"with trust=['{parts[0]}']"
        )


def _texts(values: Any, seen: set[str]) -> Iterator[str]:
    """Yield all texts in hyper-parameters, those in what Lightning's instantiator would parse or read included."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            if str(name).endswith("class_path") and not (isinstance(value, str) and "." in value):
                raise UntrustedError(f"its hyper-parameters name the class {value!r:.60} without its module")
            yield from _texts(value, seen)
    elif isinstance(values, list | tuple | set):
        for value in values:
            yield from _texts(value, seen)
    elif isinstance(values, str) and values not in seen:
        seen.add(values)
        yield values
        for text in (values, _content(values)):
            try:
                yield from _texts(yaml.safe_load(text), seen)
            except (yaml.YAMLError, RecursionError, ValueError):
                continue  # nobody else can read it either


def _content(text: str) -> str:
    """Return the beginning of the file that a text names; where a network is wanted it may be that of one."""
    try:
        with open(text, encoding="utf-8") as file:
            return file.read(1 << 20)
    except (OSError, ValueError):
        return ""
