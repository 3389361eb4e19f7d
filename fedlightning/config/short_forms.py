"""Short forms of the trainer's `engine`, `failures`, `evaluation` and `seed`, and of our classes, written out before parsing.

So files stack key by key: `evaluation: 5` sets the rounds between evaluations and leaves the stages of a file before it, and
`--trainer.engine.workers=4` goes on from `engine: processes`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedlightning.options import FIELDS
from fedlightning.options.value_objects import ENGINES, EngineOptions

_NAMES = ENGINES | {kind.__name__: kind for kind in ENGINES.values()}
CLASS_PATHS = {name: f"fedlightning.options.{kind.__name__}" for name, kind in _NAMES.items()}
"""Name of an engine, or of the class of its options -> full path of that class."""


def expand_file(document: Any) -> Any:
    """Return a YAML document with the short forms in its section `trainer`, and the names of our classes, written out.

    Example:
        >>> expand_file({"trainer": {"engine": "processes", "evaluation": 5}})["trainer"]
        {'engine': {'class_path': 'fedlightning.options.Processes'}, 'evaluation': {'every': 5}}
    """
    document = _with_full_paths(document)
    trainer = document.get("trainer") if isinstance(document, dict) else None
    if not isinstance(trainer, dict):
        return document
    expanded = {name: _expand(name, value) for name, value in trainer.items()}
    return document | {"trainer": expanded}


def _with_full_paths(value: Any) -> Any:
    """Return a document whose class paths name our classes in full, since other packages have the same names (MLP)."""
    if isinstance(value, list):
        return [_with_full_paths(item) for item in value]
    if not isinstance(value, dict):
        return value
    from fedlightning.config.class_names import class_names  # it imports torch; who watches runs does without

    filled = {key: _with_full_paths(item) for key, item in value.items()}
    if isinstance(path := value.get("class_path"), str) and "." not in path:
        filled["class_path"] = class_names().get(path, path)
    return filled


def _expand(name: str, value: Any) -> Any:
    if name in FIELDS and isinstance(value, int | float | str) and not isinstance(value, bool):
        return {FIELDS[name][1]: value}
    if name == "engine" and isinstance(value, str) and value in CLASS_PATHS:
        return {"class_path": CLASS_PATHS[value]}
    if name == "engine" and isinstance(value, dict) and (path := CLASS_PATHS.get(str(value.get("class_path")))):
        return value | {"class_path": path}
    return value


def expand_words(words: Sequence[str]) -> list[str]:
    """Return words of a command line with the short forms written out.

    Example:
        >>> expand_words(["--trainer.engine=ray", "--trainer.evaluation", "5"])
        ['--trainer.engine=fedlightning.options.Ray', '--trainer.evaluation.every', '5']
    """
    expanded: list[str] = []
    for word, following in zip(words, [*words, ""][1:], strict=True):
        option, equals, text = word.partition("=")
        name = option.removeprefix("--trainer.")
        if option in (f"--trainer.{argument}" for argument in FIELDS):
            plain = re.fullmatch(r"[-+.\w]+", text if equals else following)
            word = word if plain is None or plain[0] == "null" else f"{option}.{FIELDS[name][1]}{equals}{text}"
        elif option == "--trainer.engine" and text in CLASS_PATHS:
            word = f"{option}={CLASS_PATHS[text]}"
        elif expanded and expanded[-1] == "--trainer.engine":
            word = CLASS_PATHS.get(word, word)
        expanded.append(word)
    return expanded


def nested_options() -> list[str]:
    """Return the options of the command line that are fields of the values.

    Example:
        >>> nested_options()[:2]
        ['--trainer.engine.workers', '--trainer.engine.clients_per_stack']
    """
    kinds: list[tuple[str, Any]] = [("engine", kind) for kind in ENGINES.values()]
    kinds += [(name, kind) for name, (kind, _) in FIELDS.items()]
    return list(dict.fromkeys(f"--trainer.{name}.{field.name}" for name, kind in kinds for field in fields(kind)))


def engine_of(trainer: Mapping[str, Any]) -> type[EngineOptions] | None:
    """Return the class of the engine's options in the section `trainer` of a parsed configuration."""
    engine = trainer.get("engine")
    name = engine if isinstance(engine, str) else str((engine or {}).get("class_path")).rpartition(".")[2]
    return _NAMES.get(name)
