"""How much an update that comes late still counts."""

from __future__ import annotations

from typing import Literal, get_args

StalenessName = Literal["constant", "polynomial", "hinge"]
STALENESS = get_args(StalenessName)


def staleness_weight(kind: StalenessName, staleness: float, a: float, b: float) -> float:
    """Return the factor ``s(d)`` of an update that is ``d`` steps of the server old.

    * ``"constant"``: 1
    * ``"polynomial"``: ``(d + 1)^-a``
    * ``"hinge"``: 1 up to ``d = b``, then ``1 / (a (d - b) + 1)``

    Example:
        >>> from fedlightning.callbacks.shared.staleness import staleness_weight
        >>> staleness_weight("polynomial", 3, a=0.5, b=4), staleness_weight("hinge", 5, a=10, b=4)
        (0.5, 0.09090909090909091)
    """
    if kind == "polynomial":
        return float((staleness + 1.0) ** -a)
    if kind == "hinge" and staleness > b:
        return 1.0 / (a * (staleness - b) + 1.0)
    return 1.0


def check_staleness(owner: str, kind: str, a: float, b: float, max_staleness: int | None) -> None:
    """Refuse options that are out of range."""
    if kind not in STALENESS:
        raise ValueError(f"{owner} got staleness={kind!r}. Choose one of {list(STALENESS)}.")
    if a < 0 or b < 0:
        raise ValueError(f"{owner} got a={a} and b={b}. An older update must not count more: use numbers from 0.")
    if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
        raise ValueError(
            f"{owner} got max_staleness={max_staleness!r}. Give a whole number from 0, or None for no limit."
        )
