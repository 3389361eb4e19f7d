"""What crosses to or from a site: tensors and plain values in one binary format.

docs/reference/wire_format.md describes it.

Nothing here pickles, and nothing that is read names code: an object is a kind from a fixed list and its fields.
"""

from __future__ import annotations

from typing import Any

from fedlightning.wire.container import VERSION, Limits, WireError, pack, unpack
from fedlightning.wire.tree import KINDS, Objects, TreeReader, TreeWriter

__all__ = ["KINDS", "VERSION", "Limits", "WireError", "read", "write"]


def write(value: Any) -> bytes:
    """Return a value as a message.

    Example:
        >>> import torch
        >>> read(write({"weights": (torch.ones(2), None), 3: float("inf")}))
        {'weights': (tensor([1., 1.]), None), 3: inf}
        >>> write({"loss": print})
        Traceback (most recent call last):
        fedlightning.wire.container.WireError: A message cannot hold a builtins.builtin_function_or_method (at ['loss'])...
    """
    writer = TreeWriter(Objects())
    return pack(writer.text(value), writer.tensors)


def read(data: bytes | bytearray | memoryview, limits: Limits | None = None) -> Any:
    """Return the value of a message. Its tensors are copies: they do not hold on to `data`."""
    limits = limits or Limits()
    text, tensors = unpack(data, limits)
    return TreeReader(Objects(), tensors, limits).value(text)
