"""Words in the columns of `metrics.csv` and `summary.json`."""

from __future__ import annotations

from collections.abc import Sequence

LOCAL, POOLED = "local", "pooled"
"""Column `data`: a client's own samples, or the union of all clients' samples."""
PERSONAL, GLOBAL, UNSEEN = "personal", "global", "unseen"
"""Column `model`: a client's model, the server's, or what a client gets that takes no part in training."""
STAGES = ("G", "L1", "L2")
"""Column `stage`: the server's model, a client's model as received, and the same after local training."""
FEWEST_SITES = 3
"""Fewest sites of leave-one-site-out: without one of two, one alone is left, which is not a federation."""


def interval_text(mean: float, interval: Sequence[float] | None) -> str:
    """Return what stands behind a mean: its interval as a radius, or by its ends where these are not equally far from it.

    Example:
        >>> interval_text(0.5, [0.4, 0.6]), interval_text(0.9, [0.7, 1.0]), interval_text(0.9, None)
        (' ± 0.100', ' [0.700, 1.000]', '')
    """
    if interval is None or interval[0] == interval[1]:
        return ""
    low, high = interval
    is_even = abs(high - mean - (mean - low)) < 1e-9
    return f" ± {(high - low) / 2:.3f}" if is_even else f" [{low:.3f}, {high:.3f}]"
