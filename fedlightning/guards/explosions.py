"""Warnings of updates and losses that have grown by orders of magnitude: training that diverges without a NaN.

A value is an explosion if it is not finite, or more than :data:`FACTOR` times what is usual. Usual is the median over
the earlier rounds (of each round's median over its clients), but not less than in the first round: updates that shrink as
training converges must not make an ordinary one look large. In the first round it is the median of that round.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlightning.contract.messages import Update
from fedlightning.datamodules.federated_data import SPLITS
from fedlightning.engines.attempts import add_site_name
from fedlightning.errors import warn
from fedlightning.scores.metric_names import bare, higher_is_better
from fedlightning.scores.rows import KIND, Row
from fedlightning.server.parts import Part
from fedlightning.tensors import State

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation
    from fedlightning.server.server import Server

FACTOR = 1e3
"""Multiple of the usual value from which a value is an explosion."""
TOO_GOOD = 1e6
"""Multiple of what others score from which a score is named."""
SAMPLE = 2**11
"""Numbers of a large entry that its norm is estimated from."""
HALF = (torch.float16, torch.bfloat16)
UPDATE = "update"
"""Name of the norms of updates among the watched values; the others are losses, by their metric."""


@dataclass
class Explosions(Part):
    """Watches the sizes of updates and losses over the rounds of a run.

    Attributes:
        usual: By what is watched, the median over clients of every round so far that had one.
        warnings: What was warned of, one a client: round (from 1), client, what (`"update"` or a metric), the entry of
            the model that has moved most, value, usual value.
    """

    usual: dict[str, list[float]] = field(default_factory=dict)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    _now: dict[str, dict[str, float]] = field(default_factory=dict)  # of this round, by what and by client
    _entries: dict[str, str] = field(default_factory=dict)  # the entry that has moved most, by client
    _limits: dict[str, float | None] = field(default_factory=dict)  # of this round, by what

    key = "explosions"

    def state(self) -> dict[str, Any]:
        return {"usual": self.usual, "warnings": self.warnings}

    def load(self, state: Mapping[str, Any]) -> None:
        self.usual, self.warnings = dict(state.get("usual", {})), list(state.get("warnings", []))
        self._limits.clear()

    def on_round_start(self, federation: Federation) -> None:
        self._now.clear()
        self._entries.clear()

    def on_update(self, server: Server, update: Update, before: State) -> None:
        if server.callbacks.hides_clients:
            return
        pairs = {
            name: (update.state[name], before[name])
            for name in server.architecture(update.model).trainable
            if name in update.state and update.state[name].shape == before[name].shape
        }
        suspect = False
        for metric, value in update.metrics.items():
            if bare(metric) == "loss":
                suspect |= self._add(metric, update.client, abs(value))
        if pairs:
            norm = math.hypot(*(_distance(*pair) for pair in pairs.values()))
            if norm > 0:
                suspect |= self._add(UPDATE, update.client, norm)
            if suspect:
                self._entries[update.client] = max(pairs, key=lambda name: _sortable(_distance(*pairs[name])))

    def on_round_trained(self, federation: Federation, updates: Sequence[Update]) -> None:
        """Warn of this round's explosions, once a client, and note what was usual in it."""
        round = federation.server.round + 1
        warned = {entry["client"] for entry in self.warnings}
        for what in sorted(self._now, key=lambda what: what != UPDATE):  # which names the entry
            values = self._now[what]
            finite = [value for value in values.values() if math.isfinite(value)]
            limit = self._limit(what)
            if limit is None and finite:
                limit = FACTOR * median(finite)
            for client, value in values.items():
                if client not in warned and not (math.isfinite(value) and (limit is None or value <= limit)):
                    warned.add(client)
                    self._warn(round, client, what, value, limit)
            if finite:
                self.usual.setdefault(what, []).append(median(finite))
        self._now.clear()
        self._entries.clear()
        self._limits.clear()

    def summary(self, federation: Federation) -> dict[str, Any]:
        return {"warnings": self.warnings} if self.warnings else {}

    def _add(self, what: str, client: str, value: float) -> bool:
        """Note a value; return True if it may be an explosion."""
        values = self._now.setdefault(what, {})
        before = values.get(client, 0.0)
        values[client] = value if not value <= before else before  # a NaN stays
        limit = self._limit(what)
        return limit is None or not value <= limit

    def _limit(self, what: str) -> float | None:
        if what not in self._limits:  # it changes between rounds only
            before = self.usual.get(what)
            self._limits[what] = FACTOR * max(before[0], median(before)) if before else None
        return self._limits[what]

    def _warn(self, round: int, client: str, what: str, value: float, limit: float | None) -> None:
        usual = None if limit is None else limit / FACTOR
        entry = {"round": round, "client": client, "what": what, "entry": None, "value": _plain(value), "usual": usual}
        if what == UPDATE:
            entry["entry"] = self._entries.get(client)
            sentence = f"the update of client '{client}' has the norm {value:.3g} (most in '{entry['entry']}')"
        else:
            sentence = f"{what} of client '{client}' is {value:.3g}"
            if client in self._entries:
                entry["entry"] = self._entries[client]
                sentence += f" (its update moves '{entry['entry']}' most)"
        self.warnings.append(entry)
        than = f"; {usual:.3g} has been usual so far" if usual is not None else ""
        warn(
            f"Round {round}: {sentence}{than}. Training diverges: lower the learning rate, or clip gradients "
            "(gradient_clip_val). This is told once for every client."
        )


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of `a - b`; of a large tensor, what a sample of its entries lets expect."""
    if a.numel() > 8 * SAMPLE:  # up to there all numbers next to each other are read sooner than some of them
        step, number = a.numel() // SAMPLE, a.numel()
        a, b = a.reshape(-1)[::step], b.reshape(-1)[::step]
        return math.sqrt(number / a.numel()) * _distance(a, b)
    if a.dtype in HALF:  # its norm would overflow at once
        a = a.float()
    if b.dtype != a.dtype or b.device != a.device:
        b = b.to(a)
    return float(torch.dist(a, b))


def _sortable(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


class FarScores(Part):
    """Warns of a score that is far better than those of other clients, where nothing says what the metric can be.

    Means and selections follow such a one. Losses that explode are :class:`Explosions`'.
    """

    def __init__(self) -> None:
        self._warned_clients: set[str] = set()

    def on_round_scored(self, federation: Federation, rows: Sequence[Row], updates: Sequence[Update]) -> None:
        self.on_evaluated(federation, rows)

    def on_evaluated(self, federation: Federation, rows: Sequence[Row]) -> None:
        server = federation.server
        groups = defaultdict[tuple[Any, ...], list[Row]](list)
        for row in rows:
            if row.split in SPLITS[1:] and row.client in server.population.sizes:
                groups[KIND(row)].append(row)
        for group in groups.values():
            sizes = [abs(row.value) for row in group if math.isfinite(row.value)]
            usual = max(1.0, median_low(sizes)) if len(group) > 1 and sizes else math.inf
            for row in group:
                good = row.value if higher_is_better(row.metric) else -row.value
                if good > TOO_GOOD * usual and row.client not in self._warned_clients:
                    self._warned_clients.add(row.client)
                    whom = add_site_name(f"client '{row.client}'", row.client, server.sites.get(row.client))
                    warn(
                        f"Round {row.round}: {row.metric} of {whom} is {row.value:g}, and of others about {usual:.3g}: means "
                        "and selections follow it. Say what it can be, and such scores are refused: metric_bounds = {'"
                        f"{bare(row.metric)}': (low, high)}} in the module. This is told once for every client."
                    )
