"""The server: the global models, its own state, and how updates become the next model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.clock import VirtualClock
from fedlightning.datamodules.base import in_order
from fedlightning.errors import ConfigurationError, warn
from fedlightning.federation.architectures import Architecture, architectures_of, refuse_other_choice, refuse_unlike
from fedlightning.federation.attempts import WITHOUT, at_site
from fedlightning.federation.models import KeepsModels
from fedlightning.federation.parts import Parts
from fedlightning.hooks import (
    POOLED,
    CallbackList,
    ClientSelection,
    FederatedCallback,
    Job,
    Outgoing,
    SumCodec,
    UpdateCodec,
)
from fedlightning.messages import GLOBAL, Message, Update, check_extras, contributors, tree_bytes
from fedlightning.seeding import first_of_permutation, generator
from fedlightning.tensors import State, clone, module_state

Scores = dict[tuple[str | None, str, str, str, str], dict[str, tuple[float, int]]]
"""Values and numbers of samples by client; under model (`None`: the global one or what a client made of it), stage,
data, split and metric."""

AFTER_LAST_ROUND = "After the last round"
"""Start of what is said of clients that fail when all rounds are done."""


def refused(message: Message, reason: str) -> Update:
    """Return the answer in the place of an update that was refused: nothing came, and its client has failed."""
    update = Update(message.round, message.client, model=message.model, tag=message.tag)
    return replace(update, error=f"the update of client '{message.client}' was refused: {reason}")


def error_in_check(error: Exception) -> str:
    """Return in a sentence that an update cannot be looked at: nested tensors, dtypes without arithmetic ..."""
    return f"it cannot be checked: {type(error).__name__}: {' '.join(str(error).split()):.200}"


class Server(KeepsModels):
    """The server of one federation.

    Args:
        blueprint: What models are built from.
        num_samples: Training samples of every client.
        max_rounds: Rounds of the federation.
        participation: Share (float) or number (int) of clients that take part in a round.
        float_buffers: What happens to running statistics: `"average"`, `"local"` or `"server"`.
        run_dir: The run's folder, or `None` where nothing is written.
        held_out: Clients that take no part in training; they are not among `num_samples`.

    Attributes:
        round: The present round, from 0.
        clients: All clients' ids, in order.
        together: Whether all clients' data are in one place.
        held_out: Ids of the clients that are kept out of training, in order. Algorithms do not see them.
        evaluated: Ids of the clients that are scored, in order: `clients`, or those that `evaluation.clients` drew.
        architectures: By name, what is known of each architecture; one, called ``""``, where all clients have the same.
        models: Per model key (`"global"` unless an algorithm keeps several) the full state, on the CPU.
        state: Per callback key, what lives from round to round: tensors (replaced, never edited) and plain values.
        checkpoints: Per callback key, selected global models and their scores.
        model_architectures: By model key, the name of its architecture, where that is not the global model's.
        combining: Key of the model whose updates are being combined: for `reduce`, `on_reduced` and `server_step`.
        bytes_up: Bytes sent to the server so far.
        bytes_down: Bytes sent to clients so far.
        steps: Optimizer steps of all clients so far.
        spent: What the clients have done besides: see :mod:`fedlightning.federation.terms`.
        failures: Clients that failed so far: round (from 1), client, where (`"training"` or a stage), reason,
            decision.
        sites: Name of each client's site, where clients are at sites.
        parts: What attaches to the federation: checks of what arrives, warnings, what is saved and printed.
        sizes: Samples of each client in training, validation and test, as they were told before round 1.
        over_rounds: Training samples of a client in rounds 0, 1, ..., the last number from then on, where they change.
        outgoing: All that leaves clients, found before round 1.
        scores: This round's scores; see :meth:`score`.
        time: Virtual seconds since the run began, where the loop has a clock.
        heard: By client whose update is being combined, and by neighbour, the latest model that the neighbour has sent
            it, with the number of steps that the neighbour had taken: in a loop that delivers such messages.
        clock: The loop's clock, or `None`.
        round_began: Virtual time at which a synchronous round began: who can be reached then takes part.
        stopped: What ends the run before `max_rounds`: after which `round` (from 1), `by` which callback (its key), and the
            `reason`; else `None`.
        asked: Whether :meth:`participants` was asked for since the round was planned.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        num_samples: Mapping[str, int],
        *,
        max_rounds: int,
        participation: int | float = 1.0,
        float_buffers: str = "average",
        run_dir: Path | None = None,
        held_out: Iterable[str] = (),
    ) -> None:
        self.blueprint = blueprint
        self.callbacks: CallbackList = blueprint.callbacks
        self.max_rounds = max_rounds
        self.participation = participation
        self.float_buffers = float_buffers
        self._choosers = [callback for callback in self.callbacks if callback.claims("shared_names")]
        self._unchosen: dict[str, tuple[str, ...]] = {}  # by architecture, the names that travel if nobody chooses
        self.run_dir = run_dir
        self.together = True
        self.round = 0
        self.clients = in_order(num_samples)
        self.held_out = in_order(held_out)
        self.evaluated = self.clients
        self.over_rounds: Mapping[str, Sequence[int]] = {}
        self.num_samples = {client: num_samples[client] for client in self.clients}
        self.architectures: dict[str, Architecture] = architectures_of(blueprint)
        self._own = self.architectures[blueprint.architecture_of("server")]
        self.models: dict[str, State] = {GLOBAL: clone(module_state(self.module))}
        self.model_architectures: dict[str, str] = {}
        self.combining = GLOBAL
        self.state: dict[str, dict[str, Any]] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.bytes_up = 0
        self.bytes_down = 0
        self.steps = 0
        self.spent: dict[str, int] = {}
        self.failures: list[dict[str, Any]] = []
        self.stopped: dict[str, Any] | None = None
        self.sites: dict[str, str] = {}
        self.parts = Parts()
        self.sizes: Mapping[str, tuple[int, int, int]] = {}
        self.scores: Scores = {}
        self.outgoing: Sequence[Outgoing] = ()
        self.time = 0.0
        self.heard: dict[str, dict[str, tuple[int, State]]] = {}
        self.clock: VirtualClock | None = None
        self.round_began = 0.0
        self.asked = False

    def __repr__(self) -> str:
        """Return model, clients, round and callbacks."""
        model = type(self.blueprint.template).__name__
        rounds = f"round {self.round + 1} of {self.max_rounds}"
        return f"<Server of {model}, {len(self.clients)} clients, {rounds}, {self.callbacks.callbacks!r}>"

    @property
    def num_samples(self) -> dict[str, int]:
        """Training samples of each client: of this round, where they change from round to round."""
        if self.over_rounds and self._counted != self.round:
            now = {client: counts[min(self.round, len(counts) - 1)] for client, counts in self.over_rounds.items()}
            self.num_samples = {client: now.get(client, count) for client, count in self._num_samples.items()}
        return self._num_samples

    @num_samples.setter
    def num_samples(self, counts: dict[str, int]) -> None:
        self._num_samples, self._counted = counts, self.round if self.over_rounds else -1

    @property
    def seed(self) -> int:
        """The run's seed, for addresses of randomness that server and client share."""
        return self.blueprint.settings.seed

    def rng(self, purpose: str) -> torch.Generator:
        """Return a generator addressed by (seed, round, server, purpose)."""
        return generator(self.blueprint.settings.seed, self.round, "server", purpose)

    def participants(self) -> list[str]:
        """Return this round's clients in client order: as a callback says, else a uniform sample without replacement.

        Raises:
            ConfigurationError: If a callback names a client twice, or one that the federation does not have.
        """
        self.asked = True
        owner = self.callbacks.answering(ClientSelection, "participants")
        if owner is not None:
            return self._named(owner.key, list(owner.participants(self)))
        share = self.participation
        count = share if isinstance(share, int) and not isinstance(share, bool) else round(share * len(self.clients))
        count = min(max(count, 1), len(self.clients))
        if count == len(self.clients):
            return [client for client in self.clients if self.is_reachable(client)]
        if self.clock is None:
            picked = first_of_permutation(len(self.clients), count, self.rng("participation"))
        else:  # the same ones where all can be reached; as few are asked as will do
            order = torch.randperm(len(self.clients), generator=self.rng("participation")).tolist()
            picked = list(islice((index for index in order if self.is_reachable(self.clients[index])), count))
        return [self.clients[index] for index in sorted(picked)]

    def is_reachable(self, client: str) -> bool:
        """Return whether a client can be reached as this round begins: always without a clock."""
        return self.clock is None or self.clock.available(client, self.round_began)

    def _named(self, owner: str, named: list[str]) -> list[str]:
        known = set(self.num_samples)
        unknown = next((client for client in named if client not in known), None)
        if unknown is not None or len(set(named)) != len(named):
            what = "a client twice" if unknown is None else f"{unknown!r}, which is no client of this federation"
            raise ConfigurationError(
                f"{owner}.participants names {what}. It returns ids out of server.clients, each once."
            )
        return in_order(named)

    def score(
        self, metric: str, *, stage: str = "G", split: str = "val", model: str | None = None
    ) -> dict[str, tuple[float, int]]:
        """Return this round's score of every client on its own data.

        Args:
            metric: Name as the module logs it.
            stage: `"G"`, `"L1"` or `"L2"`.
            split: `"val"` or `"test"`.
            model: Key of the server's model that the clients trained, in a method with several. `None`: the global
                model, or the one that a client made of it.

        Returns:
            Per client (value, evaluated samples); empty if it was not evaluated.
        """
        return self.scores.get((model, stage, "local", split, metric), {})

    @property
    def rounds(self) -> int:
        """Rounds that the run will have, as far as is known: `max_rounds`, or fewer where a callback ends it."""
        return self.max_rounds if self.stopped is None else min(self.stopped["round"], self.max_rounds)

    def stop(self, by: FederatedCallback, reason: str, after: int = 0) -> None:
        """End the run as if `max_rounds` were reached: models are scored, tested and exported. The earliest end counts.

        Args:
            by: The callback that ends it.
            reason: Why, as the end of a sentence: terminal, summary and report tell it.
            after: Further rounds; 0: this one was the last. A round that is known beforehand to be the last is scored
                as such, at stage L2 too.
        """
        last = self.round + 1 + after
        if self.stopped is None or last < self.stopped["round"]:
            self.stopped = {"round": last, "by": by.key, "reason": reason}
            if last < self.max_rounds:
                rank_zero_info(f"{by.key} ends the run after round {last} of {self.max_rounds}: {reason}.")

    def note_failure(
        self, client: str, reason: str, where: str = "training", when: str = "", decision: str = ""
    ) -> None:
        """Warn of a client that failed, in training or in evaluation, and keep it for the summary.

        Args:
            client: The client's id.
            reason: A sentence that names the client.
            where: `"training"`, or the stage at which it could not be scored.
            when: Start of the warning; default: the round.
            decision: What became of it; default: `"left out"`, or `"not scored"` in an evaluation.
        """
        reason = at_site(reason, client, self.sites.get(client))
        usual = "left out" if where == "training" else "not scored"
        failure = {
            "round": self.round + 1,
            "client": client,
            "where": where,
            "reason": reason,
            "decision": decision or usual,
        }
        is_lost = WITHOUT in reason and self._is_lost(client)
        if failure not in self.failures or decision:  # else: a repeated test
            self.failures.append(failure)
        if not is_lost:  # else it was said, and the summary has each time
            warn(f"{when or f'Round {self.round + 1}'}: {reason}{f'; {decision}' if decision else ''}.")

    def _is_lost(self, client: str) -> bool:
        """Return whether the client's last failure was that its site is lost, in this round or the one before."""
        before = next((one for one in reversed(self.failures) if one["client"] == client), None)
        return before is not None and WITHOUT in before["reason"] and before["round"] >= self.round

    def job(self, client: str, **options: Any) -> Job:
        """Return a job for a client with the model that it is sent (:meth:`model_of`).

        Args:
            client: The client's id.
            options: The other attributes of the job.
        """
        return Job(client, model=self.model_of(client), **options)

    def message(self, job: Job) -> Message:
        """Make the message for one job: state, names to return, and every callback's extras, checked against `wire`.

        Raises:
            ConfigurationError: If an entry would travel that the client's model does not have.
        """
        if not self.together and POOLED in (job.client, job.data):
            raise ConfigurationError(
                "A visit on the union of all clients' data is planned, and the clients' data are not in one place. Use an "
                "engine that has all data in one process, or another algorithm."
            )
        sent, own = self.architecture(job.model), self.architecture_of(job.client)
        shared = self.shared_names(model=job.model)
        everything = tuple(sent.kinds)
        down = job.down if job.down is not None else (everything if job.client == POOLED else shared)
        returns = job.returns
        if returns is None:
            returns = (
                ()
                if job.work == 0
                else self._without_server_buffers(everything if job.client == POOLED else shared, sent)
            )
        if own is not sent:
            refuse_unlike(job.model, sent, (*down, *returns), job.client, own)
            if job.down is None:
                refuse_other_choice(self, job.model, shared, job.client)
        model = self.models[job.model]
        message = Message(
            round=self.round,
            client=job.client,
            state={name: model[name] for name in down},
            returns=tuple(returns),
            work=job.work,
            model=job.model,
            data=job.data,
            tag=job.tag,
        )
        for callback in self.callbacks:
            callback.on_broadcast(self, job, message)
            extras = message.extras.get(callback.key)
            if extras:
                check_extras(callback.key, extras, callback.wire(own.module).down, own.shapes)
        return message

    def accept(self, message: Message, update: Update) -> Update:
        """Return an update that has arrived as it may be folded in: decoded, and checked by all parts.

        Returns:
            The update, or one without entries that says by its `error` why it was refused.
        """
        if update.error is not None:
            return update
        message = self.message_of_choice(message, update)
        codec = self.callbacks.answering(UpdateCodec, "encode")
        single = codec is not None and not isinstance(codec, SumCodec)
        if codec is not None and single and codec.key in update.extras and update.code_bytes is None:
            try:
                state = codec.decode(self, message, update)
                code_bytes = tree_bytes(update.state) + tree_bytes(update.extras)
            except Exception as error:
                return refused(message, error_in_check(error))
            update.extras = {key: extras for key, extras in update.extras.items() if key != codec.key}
            update.state, update.code_bytes = state, code_bytes
        return self.parts.check_update(self, message, update)

    def message_of_choice(self, message: Message, update: Update) -> Message:
        """Return a message with the entries that its update counts from: those of the model that the update says it is for.

        A client may choose among several models that came. Codes, limits of what a client may change, and attackers go by
        the one that it chose.
        """
        chosen: Any = update.model
        if chosen == message.model or not isinstance(chosen, str) or chosen not in self.models:
            return message
        model = self.models[chosen]
        return replace(message, state={name: model.get(name, value) for name, value in message.state.items()})

    def weight(self, update: Update) -> float:
        """Return an update's weight before normalisation; 0 for one that does not count."""
        if not contributors([update]):
            return 0.0
        return self.callbacks.weight(self, update)
