"""What a checkpoint holds, as tensors and the plain values that a message carries, and back."""

from __future__ import annotations

from typing import Any

import torch

KIND = "fedlightning:native"
"""Key of a dict that stands for a value that files hold as it is and messages do not."""


def packed(value: Any) -> Any:
    """Return a checkpoint's content in which dtypes, devices, shapes, sets and complex numbers are made of plain values.

    Example:
        >>> packed({"a": torch.float16, "b": [torch.Size([2, 3])]})
        {'a': {'fedlightning:native': 'dtype', 'of': 'float16'}, 'b': [{'fedlightning:native': 'Size', 'of': [2, 3]}]}
        >>> unpacked(packed({"a": torch.float16, "b": [torch.Size([2, 3])], "c": {1}, "d": 2j}))
        {'a': torch.float16, 'b': [torch.Size([2, 3])], 'c': {1}, 'd': 2j}
    """
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "of": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {KIND: "device", "of": str(value)}
    if isinstance(value, torch.Size):
        return {KIND: "Size", "of": list(value)}
    if isinstance(value, complex):
        return {KIND: "complex", "of": [value.real, value.imag]}
    if isinstance(value, set):
        return {KIND: "set", "of": [packed(one) for one in value]}
    if isinstance(value, dict):
        return type(value)((packed(key), packed(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value)(packed(one) for one in value)
    return value


def unpacked(value: Any) -> Any:
    """Return what :func:`packed` was given."""
    if isinstance(value, dict):
        if KIND in value:
            return _native(value)
        return type(value)((unpacked(key), unpacked(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value)(unpacked(one) for one in value)
    return value


def _native(value: dict[str, Any]) -> Any:
    kind: Any = value[KIND]
    of: Any = value.get("of")
    try:
        if kind == "dtype" and isinstance(getattr(torch, of, None), torch.dtype):
            return getattr(torch, of)
        if kind == "device":
            return torch.device(of)
        if kind == "Size":
            return torch.Size(of)
        if kind == "complex":
            return complex(*of)
        if kind == "set":
            return {unpacked(one) for one in of}
    except (TypeError, RuntimeError, AttributeError):
        pass
    raise ValueError(f"it holds a {kind!r:.40} that is none")
