"""A JSON Schema of configurations, for editors: completion, and a mark at a key that is misspelt."""

from __future__ import annotations

import inspect
import types
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fedlightning import __version__, virtual_time
from fedlightning.catalogue.catalogue_row import argument_texts
from fedlightning.config.class_names import class_names
from fedlightning.config.short_forms import CLASS_PATHS
from fedlightning.options import FIELDS, EngineOptions
from fedlightning.server import loop
from fedlightning.trainer import FederatedTrainer

PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
"""Type -> its name in a schema."""
ANYTHING: dict[str, Any] = {}
"""The schema of what an editor cannot check: objects, and types of other packages."""


def config_schema() -> dict[str, Any]:
    """Return the schema of a configuration of `fedlightning fit`.

    A file may be a part of a configuration, so no key is required. Classes of other packages may be named everywhere.

    Example:
        >>> schema = config_schema()
        >>> schema["properties"]["trainer"]["properties"]["max_rounds"]["type"]
        'integer'
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Configuration of FedLightning {__version__}",
        "type": "object",
        "properties": {
            "trainer": {**_arguments(FederatedTrainer), "description": "Arguments of FederatedTrainer."},
            "model": {"$ref": "#/$defs/a class"},
            "data": {"$ref": "#/$defs/a class"},
        },
        "$defs": {"a class": _a_class(), **{path: _arguments(cls) for path, cls in _classes().items()}},
    }


@cache
def _classes() -> dict[str, type]:
    """Return the classes whose arguments are known: full path -> class."""
    classes = {}
    for path in class_names().values():
        module, _, name = path.rpartition(".")
        classes[path] = getattr(import_module(module), name)
    for package in (loop, virtual_time):
        for name in package.__all__:
            if name != "Loop" and issubclass(getattr(package, name), loop.Loop):
                classes[f"{package.__name__}.{name}"] = getattr(package, name)
    return classes


def _a_class() -> dict[str, Any]:
    """Return the schema of a class by name, with its arguments where it is one of ours."""
    short = {path: name for name, path in class_names().items()}
    names = [name for path in _classes() for name in (path, short.get(path)) if name]
    conditions = [
        {
            "if": {"properties": {"class_path": {"enum": [path, short.get(path, path)]}}, "required": ["class_path"]},
            "then": {"properties": {"init_args": {"anyOf": [{"$ref": f"#/$defs/{path}"}, {"type": "null"}]}}},
        }
        for path in _classes()
    ]
    return {
        "anyOf": [
            {"type": "string", "anyOf": [{"enum": names}, {}]},
            {"type": "null"},
            {
                "type": "object",
                "properties": {
                    "class_path": {"type": "string", "anyOf": [{"enum": names}, {}]},
                    "init_args": {"type": ["object", "null"]},
                    "dict_kwargs": {"type": "object"},
                },
                "allOf": conditions,
            },
        ]
    }


def _arguments(cls: type) -> dict[str, Any]:
    """Return the schema of the arguments of a class, with the words of its docstring."""
    try:
        parameters = inspect.signature(cls, eval_str=True).parameters
    except (NameError, TypeError):  # names that are imported for type checkers only
        parameters = inspect.signature(cls).parameters
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    described = argument_texts(cls)
    properties = {}
    for name, parameter in parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        schema = dict(_of_type(parameter.annotation))
        if described.get(name):
            schema["description"] = described[name]
        properties[name] = schema
    if cls is FederatedTrainer:
        properties["callbacks"]["anyOf"] = [
            {"type": "array", "items": {"$ref": "#/$defs/a class"}},
            {"$ref": "#/$defs/a class"},
        ]
        properties["callbacks+"] = {**properties["callbacks"], "description": "Callbacks beside those of other files."}
    return {"type": "object", "properties": properties, "additionalProperties": open_ended}


def _of_type(hint: Any) -> dict[str, Any]:
    """Return the schema of a type, and one that allows everything where the type says too little."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _of_type(get_args(hint)[0])
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if origin in (list, tuple, set) or hint in (list, tuple):
        inside = _of_type(get_args(hint)[0]) if origin is list and get_args(hint) else ANYTHING
        return {"type": "array", "items": inside} if inside else {"type": "array"}
    if origin in (Union, types.UnionType):
        parts = [_of_type(part) for part in get_args(hint)]
        return {"anyOf": parts} if all(parts) else ANYTHING
    if hint in (kind for kind, _ in FIELDS.values()):  # their arguments stand for themselves
        return _arguments(hint)
    if hint is EngineOptions:
        names = [*CLASS_PATHS, *CLASS_PATHS.values()]
        properties = {"class_path": {"enum": names}, "init_args": {"type": ["object", "null"]}}
        return {"anyOf": [{"enum": names}, {"type": "object", "properties": properties}]}
    if inspect.isclass(hint) and hint.__module__.startswith("fedlightning."):
        return {"$ref": "#/$defs/a class"}
    return ANYTHING
