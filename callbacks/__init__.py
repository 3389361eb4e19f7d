"""Algorithms, checkpointing and diagnostics: one file per algorithm. A class is imported when it is first asked for.

The names are those of the stub beside this file, which `make registry` writes; editors and type checkers read it too.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def _modules() -> dict[str, str]:
    """Return the module of each public class."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
    return {
        name.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names
    }


_MODULES = _modules()
__all__ = sorted(_MODULES, key=str.casefold)


def __getattr__(name: str) -> Any:
    """Import the class of that name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedlightning.callbacks' has no attribute '{name}'")
    exported = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return exported


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
