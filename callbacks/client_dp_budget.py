"""What the rounds of ClientDP spend: how many fit into a budget, and what is written down before each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlightning.callbacks.shared.ledger import Ledger, Steps, forgotten
from fedlightning.callbacks.shared.spending import KNOWN, merged, most_that, releases_in, spent_by, write_spending


@dataclass(frozen=True)
class RoundBudget:
    """The budget of a run.

    Attributes:
        epsilon: What may be spent; `None`: any.
        delta: Probability with which the guarantee may fail.
        noise: Noise multiplier of a round.
        rate: Probability with which a client is in a round.
        accountant: Name of Opacus' accountant.
        ledger: What other runs have spent on these clients.
    """

    epsilon: float | None
    delta: float
    noise: float
    rate: float
    accountant: str
    ledger: Ledger

    def steps(self, rounds: int, releases: Collection[str] = ()) -> list[tuple[float, float, int]]:
        """Return what a number of rounds takes: one step each, and at least one for each release."""
        return [(self.noise, self.rate, max(len(releases), rounds))]

    def released(self, folder: Path | None) -> set[str]:
        """Return the names of all releases of this run, also of what a copy of it has written into the ledger."""
        with self.ledger.held(None):
            return {row[-1] for row in releases_in(folder)} | self.ledger.releases

    def of(self, others: Steps, rounds: int, releases: Collection[str] = ()) -> float:
        """Return what a number of rounds with all their releases spends, with steps of other runs."""
        kinds = merged([*others, *self.steps(rounds, releases)])
        return spent_by(self.accountant, self.delta, kinds) if kinds else 0.0

    def known(self, others: Steps, rounds: int, releases: Collection[str] = ()) -> float:
        """Return the same against whoever knows who took part in which round: drawing participants hides nothing then."""
        kinds = merged([(noise, 1.0, count) for noise, _, count in (*others, *self.steps(rounds, releases))])
        return spent_by(self.accountant, self.delta, kinds) if kinds else 0.0

    def after(self, rounds: int, releases: Collection[str] = ()) -> float:
        """Return what a number of rounds spends with all their releases, those in the ledger too, and with other runs."""
        with self.ledger.held(None) as others:
            return self.of(others, rounds, {*releases, *self.ledger.releases})

    def in_words(self, rounds: int, releases: Collection[str]) -> str:
        """Return what a number of rounds and their releases spend in sentences, with what the ledger has of other runs."""
        with self.ledger.held(None) as others:
            every = {*releases, *self.ledger.releases}
            spent, known = self.of(others, rounds, every), self.known(others, rounds, every)
        return (
            f"epsilon={spent:.4g} at delta={self.delta:g} for each client, against everybody who sees the models "
            f"(noise_multiplier={self.noise:.4g}), and {known:.4g} against who knows who took part, as readers of this run's "
            "folder do."
        )

    def rounds(self, most: int) -> int:
        """Return how many of so many rounds there is room for."""
        assert self.epsilon is not None
        epsilon = self.epsilon
        return most_that(lambda rounds: self.after(rounds) <= epsilon, most)

    def spend(self, round: int, release: str, folder: Path | None, private: bool, told: Mapping[str, Any]) -> None:
        """Write down what a release spends; the same one again spends nothing.

        Args:
            round: The round, from 0.
            release: Name of the release.
            folder: The run's folder, if it has one.
            private: Whether the noise is secret.
            told: What else `privacy.json` is to say.

        Raises:
            ValueError: If it would exceed the budget. If the ledger has forgotten an earlier release.
        """
        rows = releases_in(folder)
        written = {row[-1] for row in rows}
        step: list[tuple[float, float, int]] = [(self.noise, self.rate, 1)]
        with self.ledger.held(step, release) as others:
            counted = self.ledger.releases  # those of a copy of this run, too
            if self.ledger.path is not None and (written - {release} - counted or (round > 0 and not counted)):
                raise forgotten(self.ledger.path)
            known = written | counted
            releases = max(len(known | {release}), round + 1)
            epsilon = self.of(others, round + 1, known | {release})
            participants_known = self.known(others, round + 1, known | {release})
            if self.epsilon is not None and release not in known and epsilon > self.epsilon * (1 + 1e-9):
                raise ValueError(
                    f"Round {round + 1} is release {releases} of this run, and other runs of the ledger may have spent: it "
                    f"would make epsilon {epsilon:.4g} in all, more than the budget of {self.epsilon:g}."
                )
        if folder is None:
            return
        own = {
            "private": private,
            "epsilon": epsilon if private else None,
            KNOWN: participants_known if private else None,
            "delta": self.delta,
            "rounds": round + 1,
            "releases": releases,
            "noise_multiplier": self.noise,
            "rate": self.rate,
            "accountant": self.accountant,
        }
        write_spending(folder, own | dict(told), rows, None if release in written else release)
