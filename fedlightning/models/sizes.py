"""Sizes of networks, checked before torch meets them."""

from typing import Annotated

from fedlightning.ranges import Range

Size = Annotated[int, Range("[1, inf)", strict=True)]
"""The size of a layer."""
