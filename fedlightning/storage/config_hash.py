"""Configurations as JSON, the same in every process, and a short hash of one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` as JSON can hold it, the same in every process.

    Example:
        >>> plain({"classes": {2: "b", "a": 1}, "names": {"y", "x"}})
        {'classes': {'2': 'b', 'a': 1}, 'names': ['x', 'y']}
    """
    return {name: json.loads(_plain(value)) for name, value in config.items()}


def config_hash(config: Any) -> str:
    """Return a short hash of a configuration."""
    return hashlib.sha256(_plain(config).encode()).hexdigest()[:12]


def _plain(value: Any) -> str:
    return json.dumps(_with_text_keys(value), sort_keys=True, default=_stable)


def _with_text_keys(value: Any) -> Any:
    """Replace what JSON cannot take or sort: keys that are no texts, and sets, whose order differs between processes."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _key(key): _with_text_keys(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(entry) if not isinstance(entry, str) else entry for entry in value)
    return value


def _key(key: Any) -> str:
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else _stable(key)


def _stable(value: Any) -> str:
    """Return a text that is the same in every process: an object's text may hold addresses in memory."""
    text = str(value)
    if f"{id(value):x}" in text:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return re.sub(r"0x[0-9a-fA-F]+", "0x", text)
