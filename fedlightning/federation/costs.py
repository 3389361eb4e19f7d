"""What a run has cost so far, round by round, over interruptions: :class:`Costs`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedlightning.federation.server import Server
from fedlightning.federation.terms import spent_of


@dataclass
class Costs:
    """Seconds, bytes and steps of a run.

    Attributes:
        seconds: Time spent, over interruptions.
        evaluation_seconds: The part of it that scoring has taken, stages G and L1 and held-out clients.
        history: Cost of each round: `round`, `bytes_up`, `bytes_down`, `steps`, `seconds`; where the loop has a clock, also
            `time`, the virtual seconds from the run's begin to the round's end.
        spent_of_rounds: The server's `spent` before the visits after the last round.
    """

    seconds: float = 0.0
    evaluation_seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    spent_of_rounds: dict[str, int] = field(default_factory=dict)
    _clock: float = field(default_factory=time.monotonic)
    _counted: dict[str, float] = field(default_factory=dict)  # what the whole of the history adds up to

    def tick(self) -> None:
        """Add the time since the last tick."""
        now = time.monotonic()
        self.seconds += now - self._clock
        self._clock = now

    def count(self, server: Server, has_clock: bool) -> None:
        """Add the cost of the round just finished (or of the visits after the last one) to the history."""
        totals = {
            "bytes_up": server.bytes_up,
            "bytes_down": server.bytes_down,
            "steps": server.steps,
            "seconds": self.seconds,
        }
        before = self._counted or {name: sum(entry[name] for entry in self.history) for name in totals}  # a resumed run
        clock = {"time": server.time} if has_clock else {}
        self.history.append(
            {"round": server.round + 1} | {name: totals[name] - before[name] for name in totals} | clock
        )
        self._counted = totals

    def forget_final_visits(self, server: Server, rounds_done: int) -> None:
        """Take the visits after what was the last round out of the costs: a longer run does not make them there."""
        final = [entry for entry in self.history if entry["round"] > rounds_done]
        self.history = [entry for entry in self.history if entry["round"] <= rounds_done]
        for entry in final:
            server.bytes_up -= int(entry["bytes_up"])
            server.bytes_down -= int(entry["bytes_down"])
            server.steps -= int(entry["steps"])
            self.seconds -= entry["seconds"]
        server.spent = dict(self.spent_of_rounds)

    def state(self) -> dict[str, Any]:
        """Return what a saved state keeps of it."""
        return {
            "seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
            "history": self.history,
            "spent_of_rounds": self.spent_of_rounds,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned."""
        self.seconds = float(saved["seconds"])
        self.evaluation_seconds = float(saved["evaluation_seconds"])
        self.history = list(saved["history"])
        self.spent_of_rounds = spent_of(saved["spent_of_rounds"])
