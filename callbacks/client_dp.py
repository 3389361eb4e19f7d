"""Client-level differential privacy of the server's models.

Clipping of clients' changes: to a given length, or to one that follows a quantile of the lengths (Andrew et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fedlightning.algorithm import (
    Change,
    Client,
    ClientSelection,
    Cover,
    Extra,
    Facts,
    Job,
    Message,
    OutgoingItem,
    Promise,
    Server,
    Setup,
    State,
    Update,
    Wire,
)
from fedlightning.callbacks import client_dp_checks as checks
from fedlightning.callbacks.shared.ledger import UPDATES, Ledger, Steps, forgotten
from fedlightning.callbacks.shared.private_options import Accountant, Clip, Delta, Noise, Private, Scores, some_noise
from fedlightning.callbacks.shared.secret_noise import digest_of, normal, uniform, with_noise
from fedlightning.callbacks.shared.single_updates import refuse_other_ways
from fedlightning.callbacks.shared.spending import KNOWN, releases_in, write_spending
from fedlightning.callbacks.shared.sum_noise import PLACE, SumNoise
from fedlightning.privacy.release import Release, store, stored
from fedlightning.ranges import PositiveFloat, PositiveInt, PositiveShare, Range, idle_with, make_init, needs
from fedlightning.tensors import as_reals, entry_kinds, narrow, widen
from fedlightning.tensors.memory import PIECE

SHARE = 1 / 20
"""Standard deviation of the count's noise over the expected number of participants, as the authors have it."""


FEW_CLIENTS = 100
"""Clients below which the noise drowns what they learn, in most settings."""


def _pieces(value: Tensor) -> tuple[Tensor, ...]:
    """Return the real numbers of an entry in pieces that fit into a cache; on other devices whole."""
    flat = as_reals(value.detach()).reshape(-1)
    return flat.split(PIECE) if value.device.type == "cpu" else (flat,)


def _norm(numbers: Tensor) -> float:
    """Return the length of numbers as a vector, added up in float64 but on Apple's GPUs."""
    dtype = torch.float32 if numbers.device.type == "mps" else torch.float64
    return float(torch.linalg.vector_norm(numbers, dtype=dtype))


def _coarsest(entries: Iterable[Tensor]) -> float:
    """Return the largest relative error of a difference of entries, and of the sum of many squares."""
    return max((torch.finfo(value.dtype).eps for value in entries), default=0.0) + 16 * torch.finfo(torch.float64).eps


def length_of_change(moved: Sequence[str], sent: State, state: State) -> float:
    """Return the length of the changes of some entries as one vector, rounded up: never less than it is."""
    pairs = ((now, then) for name in moved for now, then in zip(_pieces(state[name]), _pieces(sent[name]), strict=True))
    squares = math.fsum(_norm(now - then) ** 2 for now, then in pairs)
    return math.sqrt(squares) * (1.0 + _coarsest(state[name] for name in moved))


def factor_of(moved: Sequence[str], sent: State, state: State, clip: float) -> tuple[float, bool]:
    """Return by what to multiply the changes of some entries to clip them, and whether they were no longer before.

    Raises:
        ValueError: If that length is too short for the precision of the model.
    """
    limit = clip - _rounding_of(clip, [sent[name] for name in moved])
    if limit <= 0.0:
        raise ValueError(f"ClientDP: a clip of {clip:g} is within the rounding of the model's entries. Raise clip.")
    length = length_of_change(moved, sent, state)
    return (1.0 if length <= limit else limit / length), length <= clip


def clipped(sent: Tensor, state: Tensor, factor: float) -> Tensor:
    """Return an entry with its change times a factor."""
    return state if factor == 1.0 else narrow(torch.lerp(as_reals(sent), as_reals(state), factor), sent)


def _rounding_of(clip: float, sent: list[Tensor]) -> float:
    """Return by how much a change that was cut may grow when it is added: to zeros (a new layer) it is rounded itself."""
    # First of its own precision, which may end.
    lengths = {name: float(as_reals(value).norm()) for name, value in enumerate(sent)}
    lengths |= {name: _norm(as_reals(sent[name])) for name, length in lengths.items() if math.isinf(length)}
    of_sums = sum(torch.finfo(value.dtype).eps * lengths[name] for name, value in enumerate(sent))
    return of_sums + 4 * clip * _coarsest(sent)


def refuse_longer(trainable: set[str], message: Message, update: Update, clip: float) -> None:
    """Refuse an update whose change is longer than `clip`, or that changes what is not trained.

    Raises:
        ValueError: With both lengths, or the name.
    """
    fixed = {name: value for name, value in update.state.items() if name not in trainable}
    other = [name for name, value in fixed.items() if not torch.equal(value, message.state[name].to(value.dtype))]
    norm = length_of_change([name for name in update.state if name in trainable], message.state, update.state)
    if other or norm > clip:
        length = f"its change has the length {norm:.4g}, more than clip={clip:g}"
        what = f"'{other[0]}' has changed" if other else length
        raise ValueError(f"{what}; ClientDP takes in what its client side has clipped, and nothing else")


def noise_of_count(noise_multiplier: float, expected: float) -> float:
    """Return the standard deviation of the noise on the count of short changes.

    At least the noise multiplier: with few clients the authors' choice would be smaller, and the count would take all of the
    budget. So the noise on the changes grows by 2 / sqrt(3) at most.
    """
    return max(SHARE * expected, noise_multiplier)


def noise_of_changes(noise_multiplier: float, of_count: float) -> float:
    """Return the noise multiplier of the changes, so that changes and count together spend as `noise_multiplier` alone.

    ``z_u = (z^-2 - (2 s)^-2)^(-1/2)``: the count is of ``b_i - 1/2``, so that one client moves it by 1/2 (theorem 1).

    Example:
        >>> round(noise_of_changes(1.0, 5.0), 4)
        1.005
    """
    return (noise_multiplier**-2 - (2.0 * of_count) ** -2) ** -0.5


def next_clip(clip: float, count: float, expected: float, quantile: float, rate: float) -> float:
    """Return the length to clip to in the next round: ``C exp(-rate (b - quantile))``.

    Args:
        clip: That of this round.
        count: Sum of ``b_i - 1/2`` over those who came, with its noise; ``b_i`` is 1 where a change was no longer.
        expected: Expected number of participants.
        quantile: Share of changes that are to be no longer.
        rate: Step.
    """
    return clip * math.exp(-rate * (0.5 + count / expected - quantile))


OF_OPTIONS = ("on_broadcast", "on_update", "wire")
"""Methods that only `quantile` needs."""
OF_UPDATES = (*OF_OPTIONS, "check_update", "denominator")
"""Methods that work on single updates or their mean, which SecureAggregation makes."""


@some_noise
@needs(
    "shares", "where", "they are of clients whose noise adds up to that of the mean. Leave them out.", value="masked"
)
@needs("where", "shares", "that many shares of clients together are the noise of the mean. Give both, or neither.")
@idle_with("rate", "where", "masked", "a sum shows by its noise how many took part. Leave it out, or take 'server'.")
@idle_with("quantile", "where", "masked", "nobody covers a count there. Leave it out, or take where='server'.")
@idle_with("accountant", "where", "masked", "its noise is bounded by Rényi divergences. Take accountant='rdp'.")
@make_init
class ClientDP(ClientSelection, Private):
    r"""Differential privacy of clients: nobody can tell from the models whether a client took part (DP-FedAvg).

    McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018 (arXiv:1710.06963).

    * Each client takes part in a round with probability `rate`, independently of the others; the server draws it from a
      secret, not from the run's seed, which everybody knows.
    * Client: the change of all trainable entries that travel, as one vector, is cut to length ``C``:
      ``u_i min(1, C / ||u_i||)``. The server checks the length, and refuses an update that is longer.
    * Server: ``w + (sum_i u_i + z C N(0, I)) / (rate N)``, uniform weights and a fixed denominator, whoever came; a round
      that drew nobody releases noise all the same. Then the server's optimizer, if there is one.

    * With `quantile`, ``C`` follows that quantile of the lengths (Andrew, Thakkar, McMahan, Ramaswamy, "Differentially
      private learning with adaptive clipping", NeurIPS 2021, arXiv:1905.03871): a client sends whether its change was no
      longer than ``C`` too; the server adds noise to the count, and takes ``C exp(-clip_lr (share - quantile))`` in the next
      round. Changes and count together spend what ``z`` says.
    * With ``where="masked"`` beside :class:`~fedlightning.callbacks.SecureAggregation` the noise is of whole numbers, added
      before the masks (discrete Gaussian; Kairouz, Liu, Steinke, ICML 2021): the server, too, sees the noised sum alone. A
      sum of fewer than `shares` clients is not opened; the mean is over those who came.

    ``(epsilon, delta)`` holds for adding or removing one client with all its data, against everybody who sees all models that
    the server has sent or kept (other clients, users of the result). It does **not** hold against the server itself, which
    sees single updates. Against whom knows who took part in which round, as readers of the run's folder do by its costs and
    scores, it is `epsilon_participants_known`, in which ``rate`` counts as 1. With
    ``where="masked"`` who took part is known, and epsilon is about what a client sends: its change or none; it holds against
    the server too, if that keeps to the protocol (and was not killed between a sum and its entry in `privacy.json`).

    A client whose training took no step sends a change of zero, with its noise and its weight: who counts in a round depends
    on no record.

    Scores on validation data and values that the module logs do not leave clients. Epsilon counts neither test scores nor
    sample counts in the run's folder: `privacy.json` has the list. What stays with a client (personal layers and models) is
    never sent, and gets no noise.

    Epsilon is worked out by Opacus (``pip install opacus cryptography``). What is spent is in `privacy.csv` and
    `privacy.json` before a model is released; a run ends before it would exceed `epsilon`. Noise comes from a secret of the
    operating system's in the saved state alone: neither configuration, logs nor exported models hold it. A round that was
    released is never released again: a resumed run that does it again has the same bits, or takes the stored release where
    its mean would be another one (a client failed).
    Attacks on the rounding of floating-point noise are not countered.

    Args:
        delta: Probability with which the guarantee may fail; well below one over the number of clients.
        noise_multiplier: ``z``. Leave it out where `epsilon` is given: it is then solved for `max_rounds`.
        epsilon: The budget. With `noise_multiplier` the run ends before it is exceeded.
        clip: ``C``. The most that a client's change may be long; with `quantile`, in the first round. Default 1.
        rate: Probability that a client takes part in a round, in (0, 1].
        quantile: Share of changes that are to be no longer than ``C``, which adapts; `None`: it does not. The authors' 0.5
            is good in most settings.
        clip_lr: Step of ``C`` where it adapts.
        where: Who adds the noise: the ``"server"``, once for all; ``"masked"``: each client its share, in the sum of
            SecureAggregation.
        shares: With ``where="masked"``, how many shares together are the noise of the mean: the fewest clients that are sure
            to come.
        scores: ``"in the clear"``: validation scores and logged values leave clients, and epsilon says nothing of them.
        accountant: ``"rdp"`` (default; Rényi, orders of Opacus) or ``"prv"`` (tighter, slower).
        ledger: Folder with a file of what all runs have spent on these clients; `epsilon` is then the budget over all of
            them. A run whose releases are gone from it ends. `None`: every run counts alone.
        noise_seed: A fixed seed instead of the secret, for tests. The run is **not private**, and says so.

    Raises:
        ValueError: If a number is out of range, neither `noise_multiplier` nor `epsilon` is given, or options contradict each
            other.

    Example:
        >>> dp = ClientDP(delta=1e-5, noise_multiplier=1.5, rate=0.04)
        >>> round(dp.epsilon_after(2250), 4)
        7.3291
    """

    weighting = "uniform"
    hides_clients = of_updates = True
    scored = ("scores", "logged")
    rank = 1000  # adds noise to what everybody else has made of a mean

    delta: Delta
    noise_multiplier: Noise | None = None
    epsilon: PositiveFloat | None = None
    clip: Clip = 1.0
    rate: PositiveShare = 1.0
    accountant: Accountant = "rdp"
    ledger: str | None = None
    noise_seed: int | None = None
    quantile: Annotated[float, Range("(0, 1)")] | None = None
    clip_lr: PositiveFloat = 0.2
    where: Literal["server", "masked"] = "server"
    shares: PositiveInt | None = None
    scores: Scores = "withheld"

    @property
    def facts(self) -> Facts:
        """It bounds one mean of synchronous rounds."""
        needs = [checks.OF_SUM if self.shares else checks.BOUNDED]
        return super().facts.extend(changes={Change.ABSENCE}, needs=needs, asynchronous=False)

    def claims(self, name: str) -> bool:
        """Return True if this callback has such a method, and needs it with its options."""
        if self.shares and name in OF_UPDATES:
            return False
        return super().claims(name) and not (name in OF_OPTIONS and self.quantile is None)

    def wire(self, module: Any) -> Wire:
        """With `quantile`: the length to clip to, and whether a change was no longer (1) or longer (0)."""
        if self.quantile is None:
            return Wire()
        return Wire(down={"clip": "scalar"}, up={"within": Extra("scalar", low=0, high=1, whole=True, due=("",))})

    def covers(self, item: OutgoingItem) -> Cover:
        """The count of its own gets noise, as the model does; scores and logged values leave if `scores` says so."""
        return "noised" if item.owner == self.key else super().covers(item)

    @property
    def promises(self) -> Sequence[Promise]:
        """What epsilon says, of readers of the models and of the run's folder, and of the server where it sees sums only."""
        what, left = "whether a client took part, beyond epsilon", "sizes, test scores, failures"
        secret = "checkpoints/last and clients' models stay secret"
        if self.shares:
            kept = f"it keeps to the protocol, {self.shares} clients stay"
            everybody = Promise("who reads models or the folder", what, secret, f"{left}, participants")
            return (Promise("the server", what, kept, f"{left}, participants"), everybody)
        return (
            Promise("who reads models", what, "participants and checkpoints/last stay secret", "-"),
            Promise("who reads the folder", what.replace("epsilon", KNOWN), secret, f"{left}, participants"),
        )

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def check(self, setup: Setup) -> None:
        """Refuse what would leave without noise, by name.

        Raises:
            ValueError: With the leak and a way out.
        """
        super().check(setup)
        checks.refuse_fixed_draws(setup)
        refuse_other_ways(self, setup, "neither bounds nor covers with noise")
        checks.refuse_uncovered(setup)
        checks.refuse_other_sum(setup, self._in_sum(setup.run.max_rounds) if self.shares else None)
        count = len(setup.run.clients)
        self.warn_of_few(setup, count, "clients")
        if count < FEW_CLIENTS:
            setup.warn(
                f"ClientDP hides one of {count} clients: the noise that this takes is as large as what they have learnt "
                "together, in most settings. It is made for hundreds of clients and more."
            )

    def planned(self, rounds: int) -> Steps:
        """Return a release for each round."""
        return [(self.noise_for(self.rate, rounds), self.rate, rounds)]

    def on_federation_start(self, server: Server) -> None:
        """Draw the secret, solve for the noise, and see that a round fits into the budget."""
        self.on_round_start(server)

    def _own(self, server: Server) -> dict[str, Any]:
        """Return the secret and the noise of this run, which it has from round 1 on.

        Raises:
            ValueError: If earlier rounds were not private, or had other options.
        """
        options = [self.noise_multiplier, self.rate, self.noise_seed]
        options += [] if self.quantile is None else [self.quantile]
        options += [] if self.shares is None else [self.shares, self.noise_for(self.rate, server.max_rounds)]
        if self.key not in server.state:
            if server.round > 0:
                raise ValueError(f"{server.round} rounds were without ClientDP, and are not private. Start a new run.")
            noise = self.noise_for(self.rate, server.max_rounds)
            run_state = {"secret": self.new_secret(), "noise_multiplier": noise, "given": options}
            server.state[self.key] = run_state | {"clip": self.clip, "count": 0.0}
        kept = server.state[self.key]
        checks.refuse_other_options(kept["given"], options)
        return kept if self.quantile is not None else kept | {"clip": self.clip}  # a resumed run may have another one

    def epsilon_after(self, rounds: int) -> float:
        """Return what a number of rounds, each a release, spends with the `noise_multiplier` that was given."""
        if self.noise_multiplier is None:
            raise ValueError("ClientDP solves for the noise when a run starts. Give noise_multiplier to ask before.")
        return self.epsilon_of([(self.noise_multiplier, self.rate, rounds)])

    def _ledger(self, server: Server) -> Ledger:
        return Ledger(self.ledger, UPDATES, self._own(server)["secret"])

    def _step(self, server: Server) -> tuple[float, float]:
        """Return noise multiplier and rate of a round."""
        return float(self._own(server)["noise_multiplier"]), self.rate

    def _spent(self, server: Server, ledger: Ledger, others: Steps) -> tuple[float, float]:
        """Return what all rounds have spent with other runs, and the same against who knows who took part in which.

        A copy of the run may have gone further: the ledger has its releases.
        """
        steps = [*others, (*self._step(server), max(server.round + 1, len(ledger.releases)))]
        return self.epsilon_of(steps), self.epsilon_of([(noise, 1.0, count) for noise, _, count in steps])

    # -- a round -------------------------------------------------------------------------------------------------------
    def on_round_start(self, server: Server) -> None:
        """See that a run ends before it exceeds the budget, one that was extended too.

        Raises:
            ValueError: If this round would exceed it.
        """
        ledger = self._ledger(server)
        with ledger.hold(None) as others:
            room = self.room_for(others, self._step(server), server.max_rounds)
        if room >= server.max_rounds or server.stopped is not None:
            return
        if room <= server.round:
            spent = self._spent(server, ledger, others)[0]
            raise ValueError(
                f"Round {server.round + 1} would spend epsilon={spent:.4g} in all, more than the budget of {self.epsilon:g}. "
                "Raise noise_multiplier, or start a new run that is planned for this number of rounds."
            )
        server.stop(self, f"a further round would exceed epsilon={self.epsilon:g}", after=room - 1 - server.round)

    def participants(self, server: Server) -> Sequence[str]:
        """Return who takes part: a coin for each, from the secret. Who has no samples would add nothing."""
        drawn = uniform(self._own(server)["secret"], f"{server.round}|participants", len(server.clients))
        pairs = zip(server.clients, drawn.tolist(), strict=True)
        reachable = {client for client in server.clients if server.is_reachable(client) and server.num_samples[client]}
        if self.shares and self._releases(server):
            return []  # a second sum of the same shares of noise would show the change of who is in one of them
        return [client for client, coin in pairs if coin < self.rate and client in reachable]

    def _releases(self, server: Server) -> set[str]:
        """Return the names of the releases of this round, also of what a copy of the run has made: one at most."""
        ledger = self._ledger(server)
        with ledger.hold(None):
            every = {*(row[-1] for row in releases_in(server.run_dir)), *ledger.releases}
        return {name for name in every if name.startswith(self._place(server))}

    def _place(self, server: Server) -> str:
        """Return what the names of all releases of this round begin with."""
        return f"{server.round:08}"

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the length to clip to, where it changes."""
        if self.quantile is not None:
            message.extras[self.key] = {"clip": torch.tensor(self._own(server)["clip"], dtype=torch.float64)}

    def protect(self, client: Client, update: Update) -> None:
        """Cut the change to length ``C``; what is not trained goes back as it came.

        Raises:
            ValueError: If that length is too short for the precision of the model.
        """
        trainable = {name for name, kind in entry_kinds(client.module).items() if kind == "trainable"}
        sent = {name: client.received[name] for name in update.state}
        clip = self.clip if self.quantile is None else float(client.message.extras[self.key]["clip"])
        moved = [name for name in update.state if name in trainable]
        factor, within = factor_of(moved, sent, update.state, clip)
        if self.shares:
            client.scratch[PLACE] = self._in_sum(client.max_rounds, self._secret(client), str(client.visit))
        if self.quantile is not None and client.message.work != 0:
            update.extras[self.key] = {"within": torch.tensor(int(within))}
        now = {name: clipped(sent[name], update.state[name], factor) for name in moved}
        for name, value in sent.items():
            update.state[name] = now[name] if name in now else value.clone()

    def _secret(self, client: Client) -> str:
        """Return what only this client knows."""
        client.state[self.key] = client.state.get(self.key) or {"secret": self.new_secret(client.id)}
        return str(client.state[self.key]["secret"])

    def _in_sum(self, max_rounds: int, secret: str = "", address: str = "") -> SumNoise:
        noise = self.noise_for(self.rate, max_rounds)
        return SumNoise(noise, self.shares or 0, self.clip, secret, address, self.noise_seed is None)

    def on_update(self, server: Server, update: Update) -> None:
        """Count whose change was no longer than ``C``."""
        if not self.claims("on_update"):
            return
        kept, extras = self._own(server), update.extras.get(self.key)
        within = 0.0 if extras is None else int(extras["within"]) - 0.5
        server.state[self.key] = kept | {"count": kept["count"] + within}

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse an update whose change is longer than ``C``: the guarantee rests on it.

        Raises:
            ValueError: With both lengths.
        """
        clip = self.clip if self.quantile is None else self._own(server)["clip"]
        refuse_longer(set(server.trainable), message, update, clip)

    def denominator(self, server: Server) -> float:
        """Return the expected number of participants, whoever came."""
        return self.rate * len(server.clients)

    def on_reduced(self, server: Server, state: State) -> State:
        """Add the noise, to entries that nobody has sent too: stored first, then written down as spent, then released.

        A round that was released is not released again: where it comes out differently (a client failed, then or now), the
        stored one is what it was.
        """
        run_state, expected = self._own(server), self.denominator(server)
        names = sorted(set(server.trainable) & {*server.shared_names(), *state})
        mean = {name: widen(state.get(name, server.model[name])) for name in names}
        digest = digest_of(f"{run_state['secret']}|{server.round}|{run_state['count']}|{run_state['clip']}", mean)
        bound = digest if self.noise_seed is None else ""  # two means never share their noise
        z, clip = float(run_state["noise_multiplier"]), float(run_state["clip"])
        further = clip
        if self.quantile is not None:
            of_count = noise_of_count(z, expected)
            drawn = float(normal(run_state["secret"], f"{server.round}|count|{bound}", torch.Size([1])))
            further = next_clip(clip, run_state["count"] + of_count * drawn, expected, self.quantile, self.clip_lr)
            z = noise_of_changes(z, of_count)
        noisy = {name: mean[name] for name in names if name in state}  # where the noise is in the sum
        if not self.shares:
            noisy = with_noise(mean, z * clip / expected, run_state["secret"], f"{server.round}|noise", bound)
        noised = {name: narrow(value, server.model[name]) for name, value in noisy.items()}
        release, earlier = Release(self._place(server) + digest[:24], noised, further), self._releases(server)
        if earlier - {release.name}:
            release = stored(server.run_dir, earlier, server.round)
        elif server.run_dir is not None and not earlier:
            store(server.run_dir, release)
        self._spend(server, release.name)
        server.state[self.key] = run_state | {"count": 0.0, "clip": release.clip}
        return dict(state) | dict(release.state)

    def _spend(self, server: Server, release: str) -> None:
        """Write down what a release spends; the same one again spends nothing.

        Raises:
            ValueError: If it would exceed the budget. If the ledger has forgotten an earlier release.
        """
        step, rows, ledger = self._step(server), releases_in(server.run_dir), self._ledger(server)
        written = {row[-1] for row in rows}
        with ledger.hold([(*step, 1)], release) as others:
            counted = set(ledger.releases)  # those of a copy of this run, too
            if any(name.startswith(self._place(server)) for name in counted - {release}):
                raise ValueError(
                    f"Round {server.round + 1} is being released by a copy of this run too, and comes out differently there. "
                    "End one of the two, and resume the other."
                )
            if ledger.path is not None and (written - {release} - counted or (server.round > 0 and not counted)):
                raise forgotten(ledger.path)
            spent, insider = self._spent(server, ledger, others)
            if release not in written | counted and not self.fits([*others, (*step, server.round + 1)]):
                raise ValueError(
                    f"Round {server.round + 1} would spend epsilon={spent:.4g} in all, with other runs of the ledger: more "
                    f"than the budget of {self.epsilon:g}."
                )
        if server.run_dir is None:
            return
        report = self.told(server, "client", spent, **{KNOWN: insider})
        report |= {"noise_multiplier": step[0], "rate": self.rate, "clip": float(self._own(server)["clip"])}
        write_spending(server.run_dir, report, rows, None if release in written else release)

    def on_federation_end(self, server: Server) -> None:
        """Say what was spent."""
        ledger = self._ledger(server)
        with ledger.hold(None) as others:
            spent, insider = self._spent(server, ledger, others)
        if server.run_dir is not None:
            self.say_spent(
                server,
                f"epsilon={spent:.4g} at delta={self.delta:g} for each client, against everybody who sees the models, and "
                f"{insider:.4g} against who knows who took part, as readers of this run's folder do.",
            )
