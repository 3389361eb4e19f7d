"""What the values of the trainer's arguments have in common."""

from dataclasses import fields, is_dataclass
from typing import Any


def describe_changed(options: Any) -> str:
    """Return the class of options and the values that are not the defaults: their `__repr__`."""
    texts = [
        f"{field.name}={getattr(options, field.name)!r}"
        for field in (fields(options) if is_dataclass(options) else ())
        if repr(getattr(options, field.name)) != repr(field.default)  # 1.0 is a share, and 1 a number
    ]
    return f"{type(options).__name__}({', '.join(texts)})"
