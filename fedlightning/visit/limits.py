"""Limits of batches, as in Lightning's `limit_*_batches`."""

from __future__ import annotations


def limited(batches: int, limit: int | float | None) -> int:
    """Return the number of batches that a limit leaves.

    Example:
        >>> limited(10, 3), limited(10, 0.25), limited(10, None)
        (3, 2, 10)
    """
    if limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)
