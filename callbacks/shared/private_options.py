"""What ClientDP and SampleDP have in common: their arguments, what they withhold, and what they say of the rest."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fedlightning.algorithm import Cover, Facts, Need, OutgoingItem, Protection, Server, Setup, warn
from fedlightning.callbacks.shared import masks
from fedlightning.callbacks.shared.ledger import Steps, spent_in
from fedlightning.callbacks.shared.spending import accountant_of, merged, most_that, solved_noise, spent_by
from fedlightning.ranges import Range, at_least_one

Delta = Annotated[float, Range("(0, 1)")]
Noise = Annotated[float, Range("(0, 1e6]", "More leaves nothing of a model.")]
Clip = Annotated[float, Range("[1e-12, 1e12]")]
"""Of what single precision holds the squares, noise and all."""
Accountant = Literal["rdp", "prv"]
Scores = Literal["withheld", "in the clear"]
UNCOUNTED = "accounts for updates only: sums before round 1 would leave without noise and stand in no ledger."
"""Why statistics before round 1 are refused."""
NO_SELECTION = Need("gives no client's score away", ("ModelSelection",), "take the model of the last round")


some_noise = at_least_one("noise_multiplier", "epsilon", why="they say how much noise there is. Give one, or both.")
"""The rule of both arguments."""


class Private(Protection):
    """Base of callbacks that add noise and account for it; the arguments are declared and explained there."""

    delta: float
    noise_multiplier: float | None
    epsilon: float | None
    accountant: Accountant
    ledger: str | None
    noise_seed: int | None
    scores: Scores
    shares: int | None = None
    """Shares of noise that a masked sum takes; `None`: the noise is not a part of one."""
    of_updates: bool = False
    """Whether it counts whole updates, in the file of a ledger that does."""
    noised: Sequence[str] = ("entries",)
    """Kinds of items that get noise."""
    scored: Sequence[str] = ("scores",)
    """Kinds of items that leave if `scores` says so."""
    _rehearses = False

    @property
    def facts(self) -> Facts:
        """It lets no selection by scores beside it, and nothing leave before round 1."""
        return super().facts.extend(needs=[NO_SELECTION], no_statistics=UNCOUNTED)

    def epsilon_of(self, history: Steps) -> float:
        """Return what steps spend, at :attr:`delta`.

        Args:
            history: Noise multiplier, rate and number of steps, for each kind of step.
        """
        steps = merged(history)
        return spent_by(self.accountant, self.delta, steps) if steps else 0.0

    def fits(self, history: Steps) -> bool:
        """Return whether there is room for all of these steps."""
        return self._rehearses or self.epsilon is None or self.epsilon_of(history) <= self.epsilon * (1 + 1e-9)

    def room_for(self, before: Steps, kind: Sequence[float], most: int) -> int:
        """Return for how many of `most` more steps, of a noise and a rate, there is room."""
        return most_that(lambda steps: self.fits([*before, (*kind, steps)]), most)

    def noise_for(self, rate: float, steps: int) -> float:
        """Return the noise multiplier: the one given, or one with which so many steps fit."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        return solved_noise(self.epsilon, self.delta, rate, steps, self.accountant)

    def planned(self, rounds: int) -> Steps:
        """Return what a run of so many rounds spends, as far as that is known before it begins."""
        return []

    def check_runs(self, runs: Sequence[tuple[Protection, int]]) -> None:
        """Refuse runs that together spend more than `epsilon` of what a ledger counts, or that no ledger adds up.

        A run that solves for its noise spends all of it.

        Raises:
            ValueError: With the way out.
        """
        alike = [(part, rounds) for part, rounds in runs if isinstance(part, type(self))]
        ledgers = {part.ledger and os.path.realpath(part.ledger) for part, _ in alike}
        if self.noise_seed is None and len(alike) > 1 and (None in ledgers or len(ledgers) > 1):
            raise ValueError(
                f"{self.key}: {len(alike)} runs on the same data add up, and without one ledger of all each counts alone. "
                "Give ledger=FOLDER, outside of the runs."
            )
        if self.ledger is None:
            return
        alike = [(part, rounds) for part, rounds in alike if rounds]
        steps = [step for part, rounds in alike for step in part.planned(rounds)]
        before = [*spent_in(self.ledger, self.of_updates), []]
        spent = max(self.epsilon_of([*others, *steps]) for others in before)
        if any(part.noise_multiplier is None for part, _ in alike) and (len(alike) > 1 or any(before)):
            spent = math.inf
        if self.epsilon is not None and spent > self.epsilon * (1 + 1e-9):
            raise ValueError(
                f"{self.key}: {len(alike)} runs would make epsilon {spent:.4g} in all in ledger {self.ledger}, more than the "
                f"budget of {self.epsilon:g}. Make fewer, raise noise_multiplier, or tune on data that need no protection."
            )

    def rehearse(self) -> None:
        """Count alone and without end: a rehearsal spends nothing of the data's budget, and its visits are other ones."""
        self.ledger, self._rehearses = None, True

    def check(self, setup: Setup) -> None:
        """See that the packages are there; warn where a fixed seed makes the noise known.

        Raises:
            ValueError: If one is missing.
        """
        accountant_of(self.accountant)
        masks.library()
        if self.noise_seed is not None:
            setup.warn(self.known_noise)

    def warn_of_few(self, setup: Setup, count: int, what: str) -> None:
        """Warn where there is so little to hide in that the guarantee is worth little."""
        if self.delta * count >= 1:
            setup.warn(
                f"{self.key}(delta={self.delta:g}) lets the guarantee fail for one of {count} {what}. Take one well below "
                f"{1 / count:.2g}."
            )

    @property
    def known_noise(self) -> str:
        """The warning that a run with a fixed seed is not private."""
        return f"{self.key}(noise_seed=...): whoever knows the seed can subtract the noise. This run is not private."

    def new_secret(self, whose: str = "") -> str:
        """Return a secret of the operating system's, or for tests one that anybody can know."""
        owner_part = f" {whose}" if whose else ""
        return secrets.token_hex(16) if self.noise_seed is None else f"seed {self.noise_seed}{owner_part}"

    def covers(self, item: OutgoingItem) -> Cover:
        """Return how an item is covered; what nobody has thought of is in the clear."""
        if item.kind in self.noised:
            return "noised"
        if item.kind in self.scored:
            return self.scores
        return "withheld" if item.kind in ("logged", "undeclared", "classes") else "in the clear"

    def told(self, server: Server, unit: str, epsilon: float, **others: Any) -> dict[str, Any]:
        """Return what `privacy.json` says after a round; numbers of a run with a fixed seed are none."""
        spent = {"epsilon": epsilon, **others}
        numbers = spent if self.noise_seed is None else dict.fromkeys(spent)
        options = {name: getattr(self, name) for name in ("delta", "accountant", "clip")} | self.items_told(server)
        return {"private": self.noise_seed is None, **numbers, "rounds": server.round + 1, "unit": unit, **options}

    def items_told(self, server: Server) -> dict[str, Any]:
        """Return by cover what leaves clients in a run, and what the model it begins with has spent, for `privacy.json`."""
        items_by_cover: dict[str, list[str]] = {"noised": [], "withheld": [], "in the clear": []}
        for item in server.outgoing:
            items_by_cover[self.covers(item)].append(str(item))
        begins_with = server.blueprint.privacy
        report: dict[str, Any] = {"begins_with": dict(begins_with)} if begins_with else {}
        report["against"] = "; ".join(f"{promise.who} ({promise.provided})" for promise in self.promises)
        return {name.replace(" ", "_"): texts for name, texts in items_by_cover.items()} | report

    def say_spent(self, server: Server, spent: str) -> None:
        """Say what a run has spent, and what epsilon does not count, unless nothing is private."""
        if self.noise_seed is not None:
            return
        clear = ", ".join(self.items_told(server)["in_the_clear"])
        warn(f"{self.key}: {spent} {f'Epsilon does not count what is in the clear: {clear}.' if clear else ''}")
