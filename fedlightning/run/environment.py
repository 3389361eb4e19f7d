"""What the numbers of a run depend on: versions, and the configuration in a form that can be compared."""

from __future__ import annotations

import hashlib
import json
import platform
import resource
import sys
from importlib import metadata
from typing import Any


def versions() -> dict[str, str]:
    """Versions of what numbers depend on."""
    packages = ("fedlightning", "torch", "lightning", "torchmetrics", "numpy")
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` as JSON can hold it."""
    return {name: json.loads(_plain(value)) for name, value in config.items()}


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_stable)


def config_hash(config: Any) -> str:
    """A short hash of a configuration."""
    return hashlib.sha256(_plain(config).encode()).hexdigest()[:12]


def _stable(value: Any) -> str:
    """A text that is the same in every process: an object's own ``str`` may hold its address in memory."""
    text = str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if f"{id(value):x}" in text else text
