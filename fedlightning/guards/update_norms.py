"""How large updates usually are: one that is far beyond that is a failed client, decided before it is folded in.

Usual is the median over the last :data:`WINDOW` rounds of each round's median over what was accepted in it. It changes
between rounds only, so that neither the engine nor the order of arrival within a round matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fedlightning.tensors import widen

WINDOW = 25
"""Rounds whose medians are kept."""
FACTOR = 1e3
"""Multiple of the usual norm beyond which an update is refused, unless the trainer says otherwise."""
POWERS = {"parameters": (1, 1), "buffers": (4, 2), "extra": (2, 1), "entries": (1, 1)}
"""To which powers the factor is taken, in the first round and later: running variances are squares, and what they and extras
will be cannot be seen from a model that has not trained. `"entries"` are extras shaped as the model's."""
TINY = 1e-6
"""Root mean square below which what was sent, being all zeros, tells nothing of the size of its numbers: it counts as 1."""

FAST = (torch.float32, torch.float64)
CHUNK = 2**17
"""Numbers whose differences are taken at a time: they stay in the cache."""


@dataclass
class Norms:
    """What is usual in a run.

    Attributes:
        factor: The trainer's `failures.update_limit`; `None`: nothing is refused.
        usual: By what is measured, the medians of the last rounds that had one.
    """

    factor: float | None = FACTOR
    usual: dict[str, list[float]] = field(default_factory=dict)
    _now: dict[str, dict[tuple[str, int], float]] = field(default_factory=dict)  # of this round, by client and visit

    def limit(self, what: str, kind: str, sent: Callable[[], float], norm: float) -> tuple[float, float] | None:
        """Return the largest norm that is accepted and what is usual, where `norm` is beyond it; `None` if it is accepted."""
        if self.factor is None:
            return None
        first, later = (self.factor**power for power in POWERS[kind])
        before = self.usual.get(what)
        usual = median(before) if before else 0.0
        if norm <= later * usual:
            return None
        reference = sent()
        most = max(later * usual, reference) if before else first * reference
        return None if norm <= most else (most, usual if before else reference)

    def note(self, client: str, visit: int, found: Mapping[str, float]) -> None:
        """Take in an update that was accepted. One that comes again, as when a visit is tried again, counts once."""
        for what, norm in found.items():
            if 0.0 < norm < math.inf:
                self._now.setdefault(what, {})[client, visit] = float(f"{norm:.6g}")  # the same in every engine

    def end_round(self) -> None:
        """Note what was usual in a round."""
        for what, found in self._now.items():
            self.usual[what] = [*self.usual.get(what, []), median(found.values())][-WINDOW:]
        self._now.clear()

    def forget_round(self) -> None:
        """Forget what was seen of a round that is not finished."""
        self._now.clear()


def norm_of(values: Iterable[Tensor]) -> float:
    """Return the norm of some tensors together; finite if all their numbers are (as far as float64 goes)."""
    return math.hypot(*map(_norm, values))


def norm_of_change(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> float:
    """Return the norm of `value - base` over all pairs; without a base, of the value."""
    return math.hypot(
        *(_norm(value) if base is None else _distance(value, base.to(value.device)) for value, base in pairs)
    )


def _distance(value: Tensor, base: Tensor) -> float:
    if value.numel() <= CHUNK:
        return _norm(value - base)
    parts = zip(value.reshape(-1).split(CHUNK), base.reshape(-1).split(CHUNK), strict=True)
    return math.hypot(*(_norm(a - b) for a, b in parts))


def _norm(value: Tensor) -> float:
    if value.dtype in FAST:
        norm = float(torch.linalg.vector_norm(value))
        if math.isfinite(norm):
            return norm
    return float(torch.linalg.vector_norm(widen(value)))  # the squares of finite numbers can overflow in others


def norm_of_sent(values: Iterable[Tensor]) -> float:
    """Return the norm of what was sent; where that is all zeros, what it would be if all numbers were 1."""
    found = list(values)
    norm, ones = norm_of(found), math.sqrt(max(sum(value.numel() for value in found), 1))
    return norm if norm > TINY * ones else ones


def numbers_in(value: Any) -> list[Tensor]:
    """Return the tensors in an extra, numbers as tensors too."""
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in numbers_in(part)]
    if isinstance(value, int | float):
        return [torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)]
    if not isinstance(value, Tensor):
        raise ValueError(f"it holds a {type(value).__name__}")
    return [value]
