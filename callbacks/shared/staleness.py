"""How much an update that comes late still counts."""

from __future__ import annotations

from typing import Annotated, Literal

from fedlightning.ranges import Range

StalenessName = Literal["constant", "polynomial", "hinge"]
DecayRate = Annotated[float, Range("[0, inf)", "An older update must not count more.")]
MaxStaleness = Annotated[int, Range("[0, inf)", "None is no limit.", strict=True)]


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
