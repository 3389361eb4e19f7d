"""Bytes, steps and seconds that a run has spent, round by round, over interruptions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedlightning.contract.messages import Update

SPENT = ("own_steps", "fine_tuning_steps", "selections")
"""What the clients do beside federated steps: steps on models of their own, steps after the last round, and passes over
validation data with which they choose something."""


@dataclass
class Costs:
    """Seconds, bytes and steps of a run.

    Attributes:
        bytes_up: Bytes sent to the server so far.
        bytes_down: Bytes sent to clients so far.
        steps: Optimizer steps of all clients so far.
        extra_work: What the clients have done besides, by the names of :data:`SPENT`.
        virtual_time: Virtual seconds since the run began, where the loop has a clock.
        seconds: Time spent, over interruptions.
        evaluation_seconds: The part of it that scoring has taken, stages G and L1 and held-out clients.
        history: Cost of each round: `round`, `bytes_up`, `bytes_down`, `steps`, `seconds`; where the loop has a clock, also
            `time`, the virtual seconds from the run's begin to the round's end.
        extra_work_of_rounds: `extra_work` before the visits after the last round.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    steps: int = 0
    extra_work: dict[str, int] = field(default_factory=dict)
    virtual_time: float = 0.0
    seconds: float = 0.0
    evaluation_seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    extra_work_of_rounds: dict[str, int] = field(default_factory=dict)
    _clock: float = field(default_factory=time.monotonic)
    _counted: dict[str, float] = field(default_factory=dict)  # what the whole of the history adds up to

    def tick(self) -> None:
        """Add the time since the last tick."""
        now = time.monotonic()
        self.seconds += now - self._clock
        self._clock = now

    def add_work(self, update: Update, after_last_round: bool = False) -> None:
        """Add what a client has done beside its federated steps."""
        steps = "fine_tuning_steps" if after_last_round else "own_steps"
        for name, count in ((steps, update.own_steps), ("selections", update.selections)):
            if count:
                self.extra_work[name] = self.extra_work.get(name, 0) + count

    def end_round(self, round: int, has_clock: bool) -> None:
        """Add the cost of a round just finished (or of the visits after the last one) to the history.

        Args:
            round: The round, from 0.
            has_clock: Whether the loop has a clock.
        """
        totals = {
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "steps": self.steps,
            "seconds": self.seconds,
        }
        before = self._counted or {name: sum(entry[name] for entry in self.history) for name in totals}  # a resumed run
        clock = {"time": self.virtual_time} if has_clock else {}
        self.history.append({"round": round + 1} | {name: totals[name] - before[name] for name in totals} | clock)
        self._counted = totals

    def forget_final_visits(self, rounds_done: int) -> None:
        """Take the visits after what was the last round out of the costs: a longer run does not make them there."""
        final = [entry for entry in self.history if entry["round"] > rounds_done]
        self.history = [entry for entry in self.history if entry["round"] <= rounds_done]
        for entry in final:
            self.bytes_up -= int(entry["bytes_up"])
            self.bytes_down -= int(entry["bytes_down"])
            self.steps -= int(entry["steps"])
            self.seconds -= entry["seconds"]
        self.extra_work = dict(self.extra_work_of_rounds)

    def state(self) -> dict[str, Any]:
        """Return what a saved state keeps of it."""
        return {
            "seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
            "history": self.history,
            "spent_of_rounds": self.extra_work_of_rounds,
            "spent": self.extra_work,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned."""
        self.seconds = float(saved["seconds"])
        self.evaluation_seconds = float(saved["evaluation_seconds"])
        self.history = list(saved["history"])
        self.extra_work_of_rounds, self.extra_work = (
            _read_extra_work(saved["spent_of_rounds"]),
            _read_extra_work(saved["spent"]),
        )


def _read_extra_work(saved: Any) -> dict[str, int]:
    """Return the extra work in a saved state."""
    entries = saved if isinstance(saved, Mapping) else {}
    return {name: int(entries[name]) for name in SPENT if isinstance(entries.get(name), int)}
