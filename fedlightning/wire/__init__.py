"""What crosses to or from a site: tensors and plain values in one binary format.

docs/reference/wire_format.md describes it.

Nothing here pickles, and nothing that is read names code: an object is a kind from a fixed list and its fields.
"""

from __future__ import annotations

from typing import Any

from fedlightning.codec.container import VERSION, Limits, layout, unpack
from fedlightning.codec.tree import NotPlainError
from fedlightning.storage.files import UnreadableError
from fedlightning.wire.objects import KINDS, MessageReader, MessageWriter, WireError

__all__ = ["KINDS", "VERSION", "Limits", "WireError", "read", "write"]


def write(value: Any) -> bytes:
    """Return a value as a message.

    Example:
        >>> import torch
        >>> read(write({"weights": (torch.ones(2), None), 3: float("inf")}))
        {'weights': (tensor([1., 1.]), None), 3: inf}
        >>> write({"loss": print})
        Traceback (most recent call last):
        fedlightning.wire.objects.WireError: A message cannot hold a builtin_function_or_method (at ['loss'])...
    """
    writer = MessageWriter()
    try:
        text = writer.text(writer.node(value))
    except NotPlainError as error:
        raise WireError(str(error)) from None
    return b"".join(layout(text, writer.tensors))


def read(data: bytes | bytearray | memoryview, limits: Limits | None = None) -> Any:
    """Return the value of a message. Its tensors are copies: they do not hold on to `data`."""
    limits = limits or Limits()
    try:
        text, tensors = unpack(data, limits)
        return MessageReader(tensors, limits).value(text)
    except (NotPlainError, UnreadableError) as error:
        raise WireError(f"A message was refused: {str(error).rstrip('.')}.") from None
