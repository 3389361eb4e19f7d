"""What ClientDP refuses or warns of before round 1.

What the rounds of ClientDP spend: how many fit into a budget, and what is written down before each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlightning.algorithm import Change, Need, Setup, facts
from fedlightning.callbacks.secure_aggregation import LEAST, SecureAggregation
from fedlightning.callbacks.shared.fixed_point import FixedPoint
from fedlightning.callbacks.shared.ledger import Ledger, Steps, forgotten
from fedlightning.callbacks.shared.spending import KNOWN, merged, most_that, releases_in, spent_by, write_spending
from fedlightning.callbacks.shared.sum_noise import LEAST_STD, SumNoise
from fedlightning.tensors import as_reals, tied_names


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


BOUNDED = Need(
    "adds noise to one mean of changes whose lengths it bounds",
    (
        *("reduce", "on_reduced", "denominator", "plan_round", "on_broadcast", "model_of"),
        *(Change.VALUES, "encode", "neighbours", "global_module", "on_build"),
    ),
)
OF_A_SUM = Need(
    BOUNDED.what,
    tuple(one for one in BOUNDED.without if one not in ("reduce", "plan_round", "on_broadcast", "encode")),
)
"""The same but for what SecureAggregation itself does; it refuses others that do."""
FEW = 100
"""Clients below which the noise drowns what they learn, in most settings."""


def refuse_contradictions(where: str, shares: int | None, rate: float, quantile: float | None, accountant: str) -> None:
    """Refuse options that contradict each other.

    Raises:
        ValueError: With the way out.
    """
    if (where == "masked") != (shares is not None):
        raise ValueError(
            f"ClientDP got where={where!r} and shares={shares}: shares is the number of clients whose noise together is that "
            "of the mean, for where='masked' only."
        )
    if where == "masked" and (rate < 1.0 or quantile is not None):
        raise ValueError(
            "ClientDP(where='masked') shows how many took part, by how much noise there is, so that drawing them hides "
            "nothing; and nobody covers a count for quantile. Leave out rate and quantile, or take where='server'."
        )
    if where == "masked" and accountant != "rdp":
        raise ValueError(
            f"ClientDP(where='masked', accountant={accountant!r}): its noise is bounded by Rényi divergences. "
            "Take accountant='rdp'."
        )


def refuse_other_rounds(kept: Mapping[str, Any], given: Sequence[Any], solved: float | None, max_rounds: int) -> None:
    """Refuse a resumed run whose noise is another one than that of the rounds before.

    Args:
        kept: What the run keeps from round to round.
        given: The options of now.
        solved: The noise multiplier that clients solve for, where they add the noise.
        max_rounds: For how many rounds they solve.

    Raises:
        ValueError: With both.
    """
    if kept["given"] != given:
        raise ValueError(
            "ClientDP accounts for all rounds by one noise_multiplier, rate and noise_seed (and quantile, shares): they "
            f"were {kept['given']}, and are {given} now. Resume with those of before, or start a new run."
        )
    if solved is not None and solved != kept["noise_multiplier"]:
        raise ValueError(
            f"Clients of ClientDP(where='masked') add the noise, and solve for noise_multiplier={solved:.4g} with max_rounds="
            f"{max_rounds}; the rounds of this run are accounted with {kept['noise_multiplier']:.4g}. Resume with the "
            "max_rounds of before, or start a new run."
        )


def refuse_fixed_draws(setup: Setup) -> None:
    """Refuse rounds of a number of clients that is fixed.

    Raises:
        ValueError: With the way out.
    """
    if isinstance(setup.run.participation, int) or setup.run.participation != 1.0:
        raise ValueError(
            f"participation={setup.run.participation} draws a fixed number of clients, which ClientDP does not account for. "
            "Leave it out, and give ClientDP(rate=...)."
        )


def refuse_uncovered(setup: Setup) -> None:
    """Refuse entries that travel and are neither bounded nor covered with noise.

    Raises:
        ValueError: With their name and a way out.
    """
    travelling = set(setup.shared_names())
    loose = [name for name, kind in setup.kinds.items() if name in travelling and kind not in ("trainable", "frozen")]
    if loose:
        raise ValueError(
            f"'{loose[0]}' is a running statistic that travels, which ClientDP neither bounds nor covers with noise. "
            "Take GroupNorm in the place of BatchNorm, or keep such entries with the clients: float_buffers='local'."
        )
    tied = sorted(name for name in tied_names(setup.module) if name in travelling)
    if tied:
        raise ValueError(
            f"'{tied[0]}' is one tensor under several names, each of which ClientDP would give noise of its own. "
            "Keep it with the clients, or untie it."
        )
    for name, entry in setup.module.named_parameters():
        if name in travelling and entry.requires_grad and as_reals(entry).dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"'{name}' is {entry.dtype}, and ClientDP covers float32 and float64: rounding a mean to 16 bits moves "
                "it further than the noise allows for. precision='16-mixed' or 'bf16-mixed' keeps float32."
            )


def refuse_other_sum(setup: Setup, noise: SumNoise | None) -> None:
    """Refuse SecureAggregation beside noise that is not made for its sums, and such noise where it does not fit.

    Args:
        setup: The federation.
        noise: The noise of a client, with where='masked'; else `None`.

    Raises:
        ValueError: With the way out.
    """
    secure = next((one for one in setup.callbacks if isinstance(one, SecureAggregation)), None)
    if secure is None or noise is None:
        if secure is not None or noise is not None:
            raise ValueError(
                "ClientDP(where='masked', shares=...) adds its noise to the whole numbers that SecureAggregation masks, and "
                "no other ClientDP stands beside it. Take both, or leave out both SecureAggregation and where='masked'."
            )
        return
    for other in setup.callbacks:
        if other is not secure and other.claims("on_broadcast"):
            raise ValueError(
                f"ClientDP {BOUNDED.what}, and {other.key} {facts.describe_change('on_broadcast')}. Remove one of the two."
            )
    count = sum(setup.data.num_samples[client] > 0 for client in setup.run.clients)
    if noise.shares > secure.survivors(count):
        raise ValueError(
            f"ClientDP(shares={noise.shares}): SecureAggregation(threshold={secure.threshold:.3g}) opens sums of "
            f"{secure.survivors(count)} of {count} clients, which would have too little noise. Lower shares, or raise the "
            "threshold."
        )
    travelling = set(setup.shared_names())
    elements = sum(as_reals(value).numel() for name, value in setup.module.named_parameters() if name in travelling)
    points = [FixedPoint(secure.clip, secure.bits, clients) for clients in {count, max(noise.shares, LEAST)}]
    if secure.bits > 32 or min(noise.std(point, elements) for point in points) < LEAST_STD:
        raise ValueError(
            f"SecureAggregation(bits={secure.bits}) has too many or too few levels for whole numbers of noise, which ClientDP"
            "(where='masked') adds. Take bits=32."
        )
    least = max(noise.clip_for(point, elements) for point in points)
    if secure.clip < least:
        raise ValueError(
            f"SecureAggregation(clip={secure.clip:g}) leaves no room for the noise of ClientDP(clip={noise.length:g}, "
            f"noise_multiplier={noise.multiplier:.4g}): a sum could overflow. Take a clip of {1.1 * least:.3g} or more."
        )


def warn_of_few(setup: Setup, delta: float) -> None:
    """Warn where so few clients take part that the guarantee, or the model, is worth little."""
    if delta * len(setup.run.clients) >= 1:
        setup.warn(
            f"ClientDP(delta={delta:g}) lets the guarantee fail for one of {len(setup.run.clients)} clients. Take one "
            f"well below {1 / len(setup.run.clients):.2g}."
        )
    if len(setup.run.clients) < FEW:
        setup.warn(
            f"ClientDP hides one of {len(setup.run.clients)} clients: the noise that this takes is as large as what they "
            "have learnt together, in most settings. It is made for hundreds of clients and more."
        )
