"""Client-level differential privacy of the server's models."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch

from fedlightning.algorithm import (
    Change,
    Client,
    ClientSelection,
    Facts,
    Message,
    Need,
    Range,
    Server,
    Setup,
    State,
    Update,
    warn,
)
from fedlightning.callbacks.client_dp_spending import (
    accountant_of,
    releases_in,
    solved_noise,
    spent_by,
    write_spending,
)
from fedlightning.callbacks.shared.ledger import Ledger, Steps
from fedlightning.callbacks.shared.secret_noise import normal, uniform
from fedlightning.callbacks.shared.single_updates import norm_of, refuse_other_ways, rounding_of
from fedlightning.ranges import PositiveFloat, PositiveShare
from fedlightning.tensors import entry_kinds, tied_names

FEW = 100
"""Clients below which the noise drowns what they learn, in most settings."""
UNCOUNTED = "accounts for updates only: sums before round 1 would leave without noise and stand in no ledger."
"""Why statistics before round 1 are refused."""
BOUNDED = Need(
    "adds noise to one mean of changes whose lengths it bounds",
    (
        *(
            Change.REDUCE,
            Change.REDUCED,
            Change.DENOMINATOR,
            Change.PLAN,
            Change.BROADCAST,
            Change.MODEL_OF,
            Change.VALUES,
            Change.LOSSY,
        ),
        *(Change.NEIGHBOURS, Change.GLOBAL, Change.SHAPE),
    ),
)
NO_SELECTION = Need("gives no client's score away", (Change.SELECTION,), "take the model of the last round")


class ClientDP(ClientSelection):
    r"""Differential privacy of clients: nobody can tell from the models whether a client took part (DP-FedAvg).

    McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018 (arXiv:1710.06963).

    * Each client takes part in a round with probability `rate`, independently of the others; the server draws it from a
      secret, not from the run's seed, which everybody knows.
    * Client: the change of all trainable entries that travel, as one vector, is cut to length ``C``:
      ``u_i min(1, C / ||u_i||)``. The server checks the length, and refuses an update that is longer.
    * Server: ``w + (sum_i u_i + z C N(0, I)) / (rate N)``, uniform weights and a fixed denominator, whoever came; a round
      that drew nobody releases noise all the same. Then the server's optimizer, if there is one.

    ``(epsilon, delta)`` holds for adding or removing one client with all its data, against everybody who sees all models that
    the server has sent or kept (other clients, users of the result). It does **not** hold against the server itself, which
    sees single updates; against whom knows who took part in which round (then ``rate`` counts as 1); nor for scores, logged
    numbers, sample counts and costs in the run's folder: who gives those away gives more away. What stays with a client
    (personal layers and models) is never released, and gets no noise.

    Epsilon is worked out by Opacus (``pip install fedlightning[privacy]``). What is spent is in `privacy.csv` and
    `privacy.json` before a model is released; a run ends before the round that would exceed `epsilon`. Noise comes from a
    secret of the operating system's, which lies in the saved state alone: neither configuration, logs nor exported models
    hold it. A round that a resumed run does again gives the same bits; where its mean is another one (a client failed), its
    noise is another one too, and it counts as a further release. Attacks on the rounding of floating-point noise are not
    countered.

    Args:
        delta: Probability with which the guarantee may fail; well below one over the number of clients.
        noise_multiplier: ``z``. Leave it out where `epsilon` is given: it is then solved for `max_rounds`.
        epsilon: The budget. With `noise_multiplier` the run ends before it is exceeded.
        clip: ``C``. The most that a client's change may be long. Default 1.
        rate: Probability that a client takes part in a round, in (0, 1].
        accountant: ``"rdp"`` (default; Rényi, orders of Opacus) or ``"prv"`` (tighter, slower).
        ledger: Folder with a file of what all runs have spent on these clients; `epsilon` is then the budget over all of
            them. `None`: every run counts alone.
        noise_seed: A fixed seed in the place of the secret, for tests. The run is **not private**, and says so.

    Raises:
        ValueError: If a number is out of range, or neither `noise_multiplier` nor `epsilon` is given.

    Example:
        >>> dp = ClientDP(delta=1e-5, noise_multiplier=1.5, rate=0.04)
        >>> round(dp.epsilon_after(2250), 4)
        7.3291
    """

    weighting = "uniform"
    rank = 1000  # clips what everybody else has made of the update

    def __init__(
        self,
        delta: Annotated[float, Range("(0, 1)")],
        noise_multiplier: PositiveFloat | None = None,
        epsilon: PositiveFloat | None = None,
        clip: PositiveFloat = 1.0,
        rate: PositiveShare = 1.0,
        accountant: Literal["rdp", "prv"] = "rdp",
        ledger: str | None = None,
        noise_seed: int | None = None,
    ) -> None:
        if noise_multiplier is None and epsilon is None:
            raise ValueError("ClientDP has neither noise_multiplier nor epsilon. Give one of them, or both.")
        self.delta = delta
        self.noise_multiplier = noise_multiplier
        self.epsilon = epsilon
        self.clip = clip
        self.rate = rate
        self.accountant = accountant
        self.ledger = ledger
        self.noise_seed = noise_seed

    @property
    def facts(self) -> Facts:
        """It bounds one mean of synchronous rounds, and lets no selection by scores beside it."""
        return super().facts.extend(
            changes={Change.ABSENCE}, needs=[BOUNDED, NO_SELECTION], asynchronous=False, no_statistics=UNCOUNTED
        )

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def check(self, setup: Setup) -> None:
        """Refuse what would leave without noise, by name.

        Raises:
            ValueError: With the leak and a way out.
        """
        accountant_of(self.accountant)
        if isinstance(setup.participation, int) or setup.participation != 1.0:
            raise ValueError(
                f"participation={setup.participation} draws a fixed number of clients, which ClientDP does not account for. "
                f"Leave it out, and give ClientDP(rate=...)."
            )
        refuse_other_ways(self, setup, "neither bounds nor covers with noise")
        travelling = set(setup.shared_names())
        loose = [
            name for name, kind in setup.kinds.items() if name in travelling and kind not in ("trainable", "frozen")
        ]
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
            if name in travelling and entry.requires_grad and entry.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"'{name}' is {entry.dtype}, and ClientDP covers float32 and float64: rounding a mean to 16 bits moves "
                    "it further than the noise allows for. precision='16-mixed' or 'bf16-mixed' keeps float32."
                )
        if self.delta * len(setup.clients) >= 1:
            setup.warn(
                f"ClientDP(delta={self.delta:g}) lets the guarantee fail for one of {len(setup.clients)} clients. Take one "
                f"well below {1 / len(setup.clients):.2g}."
            )
        if len(setup.clients) < FEW:
            setup.warn(
                f"ClientDP hides one of {len(setup.clients)} clients: the noise that this takes is as large as what they "
                "have learnt together, in most settings. It is made for hundreds of clients and more."
            )
        if self.noise_seed is not None:
            setup.warn(
                "ClientDP(noise_seed=...): whoever knows the seed can subtract the noise. This run is not private."
            )

    def on_federation_start(self, server: Server) -> None:
        """Draw the secret, solve for the noise, and find out after how many rounds the budget is spent.

        Raises:
            ValueError: If not a single round fits into the budget.
        """
        noise = self._own(server)["noise_multiplier"]
        if self.epsilon is None:
            return
        if self._rounds_in_budget(server, noise) == 0:
            raise ValueError(
                f"ClientDP: one round with noise_multiplier={noise:g} and rate={self.rate:g} makes epsilon "
                f"{self._epsilon(server, 1, noise):.3g}, more than {self.epsilon:g}. Raise noise_multiplier."
            )
        self.on_round_start(server)

    def _own(self, server: Server) -> dict[str, Any]:
        """Return the secret and the noise of this run, which it has from round 1 on.

        Raises:
            ValueError: If earlier rounds were not private, or had other options.
        """
        given = [self.noise_multiplier, self.rate, self.noise_seed]
        if self.key not in server.state:
            if server.round > 0:
                raise ValueError(
                    f"{server.round} rounds of this run were without ClientDP, and are not private. Start a new run."
                )
            noise = self.noise_multiplier
            if noise is None:
                assert self.epsilon is not None
                noise = solved_noise(self.epsilon, self.delta, self.rate, server.max_rounds, self.accountant)
            secret = secrets.token_hex(16) if self.noise_seed is None else f"seed {self.noise_seed}"
            server.state[self.key] = {"secret": secret, "noise_multiplier": noise, "given": given}
        kept = server.state[self.key]
        if kept["given"] != given:
            raise ValueError(
                f"ClientDP accounts for all rounds by one noise_multiplier, rate and noise_seed: they were {kept['given']}, "
                f"and are {given} now. Resume with those of before, or start a new run."
            )
        return kept

    def _epsilon(self, server: Server, rounds: int, noise: float) -> float:
        """Return what a number of rounds of this run spends, with what the ledger has of other runs."""
        with self._ledger(server).held(None) as others:
            return self._of(others, rounds, noise)

    def _of(self, others: Steps, rounds: int, noise: float) -> float:
        steps = [*others, (noise, self.rate, rounds)] if rounds else others
        return (
            spent_by(self.accountant, self.delta, tuple((z, q, int(count)) for z, q, count in steps)) if steps else 0.0
        )

    def _ledger(self, server: Server) -> Ledger:
        return Ledger(self.ledger, "clients", self._own(server)["secret"])

    def _rounds_in_budget(self, server: Server, noise: float) -> int:
        """Return how many of the planned rounds the budget allows."""
        assert self.epsilon is not None
        low, high = 0, server.max_rounds
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._epsilon(server, middle, noise) <= self.epsilon else (low, middle - 1)
        return low

    def epsilon_after(self, rounds: int, noise_multiplier: float | None = None) -> float:
        """Return what a number of rounds spends, at :attr:`delta`.

        Args:
            rounds: Rounds, each a release.
            noise_multiplier: ``z``; default: the one that was given.
        """
        noise = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        if noise is None:
            raise ValueError("ClientDP solves for the noise when a run starts. Give noise_multiplier to ask before.")
        return self._of([], rounds, noise)

    # -- a round -------------------------------------------------------------------------------------------------------
    def on_round_start(self, server: Server) -> None:
        """See that a run ends before it exceeds the budget, one that was extended too.

        Raises:
            ValueError: If this round would exceed it.
        """
        noise, planned = self._own(server)["noise_multiplier"], server.stopped is not None
        if self.epsilon is None or planned or self._epsilon(server, server.max_rounds, noise) <= self.epsilon:
            return
        spent, rounds = self._epsilon(server, server.round + 1, noise), self._rounds_in_budget(server, noise)
        if spent > self.epsilon * (1 + 1e-9):
            raise ValueError(
                f"Round {server.round + 1} would spend epsilon={spent:.4g} in all, more than the budget of {self.epsilon:g}. "
                "Start a new run, planned for this number of rounds."
            )
        last = max(rounds - 1 - server.round, 0)
        server.stop(self, f"a further round would exceed epsilon={self.epsilon:g}", after=last)

    def participants(self, server: Server) -> Sequence[str]:
        """Return who takes part: a coin for each, from the secret. Who has no samples would add nothing."""
        drawn = uniform(self._own(server)["secret"], f"{server.round}|participants", len(server.clients))
        pairs = zip(server.clients, drawn.tolist(), strict=True)
        there = {client for client in server.clients if server.is_reachable(client) and server.num_samples[client]}
        return [client for client, coin in pairs if coin < self.rate and client in there]

    def on_send(self, client: Client, update: Update) -> None:
        """Cut the change to length ``C``; what is not trained goes back as it came.

        Raises:
            ValueError: If that length is too short for the precision of the model.
        """
        trainable = {name for name, kind in entry_kinds(client.module).items() if kind == "trainable"}
        sent = {name: client.received[name] for name in update.state}
        moved = [name for name in update.state if name in trainable]
        changes = {name: update.state[name].double() - sent[name].double() for name in moved}
        limit = self.clip - rounding_of([sent[name] for name in moved])
        norm = norm_of(changes.values())
        if limit <= 0.0:
            raise ValueError(f"ClientDP(clip={self.clip:g}) is within the rounding of the model's entries. Raise clip.")
        factor = 1.0 if norm <= limit else limit / norm
        for name in update.state:
            value = sent[name]
            update.state[name] = (
                (value.double() + factor * changes[name]).to(value.dtype) if name in changes else value.clone()
            )

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse an update whose change is longer than ``C``: the guarantee rests on it.

        Raises:
            ValueError: With both lengths.
        """
        trainable = set(server.trainable)
        other = [
            name
            for name, value in update.state.items()
            if name not in trainable and not torch.equal(value, message.state[name].to(value.dtype))
        ]
        norm = norm_of(
            update.state[name].double() - message.state[name].double() for name in update.state if name in trainable
        )
        if other or norm > self.clip:
            what = (
                f"'{other[0]}' has changed"
                if other
                else f"its change has the length {norm:.4g}, more than clip={self.clip:g}"
            )
            raise ValueError(f"{what}; ClientDP takes in what its client side has clipped, and nothing else")

    def denominator(self, server: Server) -> float:
        """Return the expected number of participants, whoever came."""
        return self.rate * len(server.clients)

    def on_reduced(self, server: Server, state: State) -> State:
        """Write down what this round spends, then add the noise: to entries that nobody has sent too."""
        own = self._own(server)
        std = float(own["noise_multiplier"]) * self.clip / (self.rate * len(server.clients))
        noisy = dict(state)
        names = sorted(set(server.trainable) & {*server.shared_names(), *state})
        mean = {name: state.get(name, server.model[name]).double() for name in names}
        release = hashlib.sha256(f"{own['secret']}|{server.round}".encode())
        for name, value in mean.items():
            release.update(name.encode() + value.contiguous().numpy().tobytes())
        self._spend(server, release.hexdigest()[:32])
        bound = release.hexdigest() if self.noise_seed is None else ""  # two means never share their noise
        for name, value in mean.items():
            noise = normal(own["secret"], f"{server.round}|noise {name}|{bound}", value.shape)
            noisy[name] = (value + std * noise).to(server.model[name].dtype)
        return noisy

    def _spend(self, server: Server, release: str) -> None:
        """Write down what a release spends; the same one again spends nothing.

        Raises:
            ValueError: If it would exceed the budget: rounds were done again, and came out differently.
        """
        noise, rows = float(self._own(server)["noise_multiplier"]), releases_in(server.run_dir)
        known = any(row[0] == str(server.round + 1) and row[-1] == release for row in rows)
        releases = max(len(rows) + (not known), server.round + 1)
        with self._ledger(server).held([(noise, self.rate, releases)]) as others:
            epsilon = self._of(others, releases, noise)
            if self.epsilon is not None and not known and epsilon > self.epsilon * (1 + 1e-9):
                raise ValueError(
                    f"Round {server.round + 1} is release {releases} of this run: rounds were done again after an "
                    "interruption, or other runs of the ledger have spent. It would make epsilon "
                    f"{epsilon:.4g} in all, more than the budget of {self.epsilon:g}."
                )
        told = {
            "private": self.noise_seed is None,
            "epsilon": epsilon if self.noise_seed is None else None,
            "delta": self.delta,
            "unit": "client",
            "against": "everybody who sees the server's models; not the server, nor who knows the participants",
            "rounds": server.round + 1,
            "releases": releases,
            "noise_multiplier": noise,
            "clip": self.clip,
            "rate": self.rate,
            "accountant": self.accountant,
        }
        if server.run_dir is not None:
            write_spending(server.run_dir, told, rows, None if known else release)

    def on_federation_end(self, server: Server) -> None:
        """Say what was spent."""
        noise = self._own(server)["noise_multiplier"]
        if self.noise_seed is not None:
            warn("ClientDP: this run is not private, because its noise came from a fixed seed.")
        elif server.run_dir is not None:
            spent = self._epsilon(server, max(len(releases_in(server.run_dir)), server.round + 1), noise)
            warn(
                f"ClientDP: epsilon={spent:.4g} at delta={self.delta:g} for each client, against everybody who sees the "
                f"models (noise_multiplier={noise:.4g}). Scores and logs in the run's folder are not covered."
            )
