"""YAML files of earlier versions: names of classes and arguments that have changed are read as the present ones."""

from __future__ import annotations

from typing import Any

from jsonargparse import get_loader, set_loader
from yaml import YAMLError

import fedlightning.callbacks
from fedlightning.compat.renamed import old_names, present_class, present_names
from fedlightning.config.values import refuse_expansion, refuse_form


def read_old_names() -> None:
    """Let jsonargparse's YAML loader replace old names as it reads, and refuse what no configuration holds."""
    load = get_loader("yaml")
    if not getattr(load, "reads_old_names", False):

        def loading(text: str) -> Any:
            refuse_form(text)
            try:
                found = load(text)
            except (ValueError, OverflowError, RecursionError) as error:
                raise YAMLError(f"it has a value that cannot be read: {error}") from None
            refuse_expansion(found)
            return with_present_names(found)

        loading.reads_old_names = True  # type: ignore[attr-defined]
        set_loader("yaml", loading, exceptions=(YAMLError,))


def with_present_names(value: Any) -> Any:
    """Return a configuration in which every class and argument has its present name.

    Example:
        >>> with_present_names({"class_path": "FedProx", "init_args": {"mu": 0.1}})
        {'class_path': 'FedProx', 'init_args': {'mu': 0.1}}
    """
    if isinstance(value, list):
        return [with_present_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: with_present_names(item) for key, item in value.items()}
    path = value.get("class_path")
    if not isinstance(path, str):
        return value
    package, dot, name = path.rpartition(".")
    if package in ("", "fedlightning.callbacks"):
        name = present_class(name) or name
        value["class_path"] = f"{package}{dot}{name}"
        kind = getattr(fedlightning.callbacks, name, None)
        if isinstance(kind, type) and isinstance(value.get("init_args"), dict):
            value["init_args"] = present_names(name, old_names(kind), value["init_args"])
    return value
