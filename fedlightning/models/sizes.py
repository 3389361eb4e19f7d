"""Sizes of networks, checked before torch meets them."""

from __future__ import annotations

from typing import Any

from torch import nn


def check_sizes(net: nn.Module, **sizes: Any) -> None:
    """Refuse sizes of layers that are not whole numbers of at least 1.

    Example:
        >>> from torch import nn
        >>> check_sizes(nn.Identity(), hidden=[16, -3])
        Traceback (most recent call last):
            ...
        ValueError: Identity(hidden=[16, -3]): sizes must be whole numbers of at least 1.
    """
    for name, value in sizes.items():
        several = isinstance(value, list | tuple)
        for size in value if several else [value] * (value is not None):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                rule = "sizes must be whole numbers" if several else "it must be a whole number"
                raise ValueError(f"{type(net).__name__}({name}={value!r}): {rule} of at least 1.")
