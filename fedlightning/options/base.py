"""What the values of the trainer's arguments have in common."""

from dataclasses import fields
from typing import Any


def describe_changed(options: Any) -> str:
    """Return the class of options and the values that are not the defaults: their `__repr__`."""
    changed = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    return f"{type(options).__name__}({', '.join(f'{name}={getattr(options, name)!r}' for name in changed)})"
