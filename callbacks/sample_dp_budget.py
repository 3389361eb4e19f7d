"""What SampleDP's steps spend: how many fit into a budget, what was spent before, and what a run's folder says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlightning.algorithm import Client
from fedlightning.callbacks.shared.ledger import Ledger, Steps, forgotten
from fedlightning.callbacks.shared.spending import merged, most_that, solved_noise, spent_by


@dataclass(frozen=True)
class StepBudget:
    """The budget of a client's data, or of a plain Trainer's.

    Attributes:
        epsilon: What may be spent; `None`: any.
        delta: Probability with which the guarantee may fail.
        accountant: Name of Opacus' accountant.
        noise_multiplier: The one that was given; `None`: it is solved.
        ledger: Folder of the ledger; `None`: each run counts alone.
        unit: What is hidden, a `"record"` or a `"patient"`.
    """

    epsilon: float | None
    delta: float
    accountant: str
    noise_multiplier: float | None
    ledger: str | None
    unit: str = "record"

    def of(self, history: Steps) -> float:
        """Return what steps spend."""
        steps = merged(history)
        return spent_by(self.accountant, self.delta, steps) if steps else 0.0

    def fits(self, history: Steps) -> bool:
        """Return whether there is room for all of these steps."""
        return self.epsilon is None or self.of(history) <= self.epsilon * (1 + 1e-9)

    def noise(self, history: Steps, rate: float, steps: int) -> float:
        """Return the noise multiplier: the one given, that of the fits before, or one with which so many steps fit."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        if history:
            return float(history[-1][0])
        assert self.epsilon is not None
        return solved_noise(self.epsilon, self.delta, rate, steps, self.accountant)

    def file(self, client: Client | None, secret: str = "") -> Ledger:
        """Return the file that counts visits: in the ledger, or else in the client's folder of the run, if it has one.

        Raises:
            ValueError: If the ledger counts these data by the other unit.
        """
        if self.ledger is not None or client is None:
            data = "data" if client is None else client.id
            records, patients = Ledger(self.ledger, data, secret), Ledger(self.ledger, f"{data} by patient", secret)
            own, other = (records, patients) if self.unit == "record" else (patients, records)
            if other.path is not None and other.path.exists():
                raise ValueError(
                    f"The ledger {self.ledger} counts runs on these data by the other unit than {self.unit}, and the two do "
                    "not add up. Take the same unit."
                )
            return own
        return Ledger(None if client.folder is None else str(client.folder), "privacy", secret)

    def before(self, history: Steps, others: Steps) -> Steps:
        """Return what was spent before a visit: what the file has, or what the client remembers if that is more.

        The client forgets visits that the server refused. What it remembers, the file of a run may lack: it is gone, or on
        another machine. A ledger may not.

        Raises:
            ValueError: If the ledger lacks it.
        """
        counts = {(noise, rate): count for noise, rate, count in merged(others)}
        if self.ledger is not None and any(counts.get((z, rate), 0) < count for z, rate, count in merged(history)):
            raise forgotten(Path(self.ledger))
        return others if self.ledger is not None or self.of(others) >= self.of(history) else history

    def enter(self, file: Ledger, history: Steps, kind: tuple[float, float], planned: int, all_of_them: bool) -> int:
        """Write down the steps of a fit before they are taken; return for how many there is room.

        Raises:
            ValueError: If not for all of them, and they are needed.
        """
        with file.held([(*kind, planned)]) as others:
            room = room_for(self.fits, self.before(history, others), kind, planned)
            if room < planned and all_of_them:
                since = ", since others of the ledger have spent" if self.ledger is not None and others else ""
                raise ValueError(
                    f"SampleDP: {planned} more steps would exceed epsilon={self.epsilon:g}; there is room for {room}{since}. "
                    "Raise noise_multiplier, or train for fewer steps."
                )
        return room


def added(history: Steps, steps: Sequence[float]) -> list[list[float]]:
    """Return a history with more steps; those of one noise and rate are counted together."""
    return [list(one) for one in merged([*history, steps])]


def count(client: Client, key: str, steps: Sequence[float]) -> None:
    """Add steps to what a client remembers, of all visits and of this one."""
    kept, visit = client.state[key], added(client.scratch.get("private steps", []), steps)
    client.scratch["private steps"] = visit
    client.state[key] = kept | {"history": added(kept["history"], steps), "visit": visit}


def room_for(fits: Callable[[Steps], bool], before: Steps, kind: tuple[float, float], most: int) -> int:
    """Return for how many of `most` more steps, of a noise and a rate, a budget has room."""
    return most_that(lambda steps: fits([*before, (*kind, steps)]), most)


def told_of(epsilon: Mapping[str, float], private: bool, unit: str) -> dict[str, Any]:
    """Return what a run's folder says of what clients have spent."""
    return {
        "private": private,
        "epsilon": max(epsilon.values()) if private else None,
        "unit": f"{unit} of a client",
        "against": "everybody who sees what a client sends, the server too",
        "epsilon_by_client": dict(epsilon) if private else {},
    }
