"""The server: the global models, its own state, and how updates become the next model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from fedlightning.client.blueprint import Blueprint
from fedlightning.contract import (
    POOLED,
    CallbackList,
    ClientSelection,
    FederatedCallback,
    Job,
    OutgoingItem,
    ServerModels,
    SumCodec,
    UpdateCodec,
)
from fedlightning.contract.messages import GLOBAL, Message, Update, check_extras, contributors, tree_bytes
from fedlightning.datamodules.federated_data import sort_clients
from fedlightning.engines.attempts import WITHOUT, add_site_name
from fedlightning.errors import ConfigurationError, warn
from fedlightning.layers import expand
from fedlightning.options.value_objects import Source
from fedlightning.seeding import first_of_permutation, generator
from fedlightning.server.costs import Costs
from fedlightning.server.model_store import Architecture, ModelStore, refuse_other_choice, refuse_unlike
from fedlightning.server.parts import Parts
from fedlightning.server.population import Participation, Population
from fedlightning.server.round_clock import NO_CLOCK, RoundClock
from fedlightning.server.server_training import ServerTraining
from fedlightning.tensors import EntryKind, State, load_state

Scores = dict[tuple[str | None, str, str, str, str], dict[str, tuple[float, int]]]
"""Values and numbers of samples by client; under model (`None`: the global one or what a client made of it), stage,
data, split and metric."""

AFTER_LAST_ROUND = "After the last round"
"""Start of what is said of clients that fail when all rounds are done."""


def refused(message: Message, reason: str) -> Update:
    """Return the answer in place of an update that was refused: nothing came, and its client has failed."""
    update = Update(message.round, message.client, model=message.model, tag=message.tag)
    return replace(update, error=f"the update of client '{message.client}' was refused: {reason}")


def error_in_check(error: Exception) -> str:
    """Return in a sentence that an update cannot be looked at: nested tensors, dtypes without arithmetic ..."""
    return f"it cannot be checked: {type(error).__name__}: {' '.join(str(error).split()):.200}"


class Server:
    """The server of one federation.

    Args:
        blueprint: What models are built from.
        population: The clients, and what is known of their data.
        max_rounds: Rounds of the federation.
        participation: Share (float) or number (int) of clients that take part in a round.
        float_buffers: What happens to running statistics: `"average"`, `"local"` or `"server"`.
        run_dir: The run's folder, or `None` where nothing is written.
        parts: What attaches to the federation.

    Attributes:
        blueprint: What models are built from.
        population: The clients, and what is known of their data.
        max_rounds: Rounds of the federation.
        round: The present round, from 0.
        participation: How many clients take part in a round.
        models: Per model key (`"global"` unless an algorithm keeps several) the full state, and the architectures.
        state: Per callback key, what lives from round to round: tensors (replaced, never edited) and plain values.
        checkpoints: Per callback key, selected global models and their scores.
        costs: Bytes, steps and seconds so far.
        scores: This round's scores; see :meth:`score`.
        failures: Clients that failed so far: round (from 1), client, where (`"training"` or a stage), reason,
            decision.
        stopped: What ends the run before `max_rounds`: after which `round` (from 1), `by` which callback (its key), and the
            `reason`; else `None`.
        outgoing: All that leaves clients, found before round 1.
        parts: What attaches to the federation: checks of what arrives, warnings, what is saved and printed.
        clock: The clock of a synchronous round: who can be reached as it begins takes part.
        run_dir: The run's folder, or `None`.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        *,
        max_rounds: int,
        participation: int | float = 1.0,
        float_buffers: str = "average",
        run_dir: Path | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.blueprint = blueprint
        self.population = population
        self.max_rounds = max_rounds
        self.round = 0
        self.participation = Participation(participation)
        self.models = ModelStore(blueprint, float_buffers)
        self.state: dict[str, dict[str, Any]] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.costs = Costs()
        self.scores: Scores = {}
        self.failures: list[dict[str, Any]] = []
        self.stopped: dict[str, Any] | None = None
        self.outgoing: Sequence[OutgoingItem] = ()
        self.parts = Parts() if parts is None else parts
        self.clock: RoundClock = NO_CLOCK
        self.run_dir = run_dir

    def __repr__(self) -> str:
        """Return model, clients, round and callbacks."""
        model = type(self.blueprint.template).__name__
        rounds = f"round {self.round + 1} of {self.max_rounds}"
        return f"<Server of {model}, {len(self.clients)} clients, {rounds}, {self.callbacks.callbacks!r}>"

    def beside(self, blueprint: Blueprint, newcomers: Sequence[str]) -> Server:
        """Return a server that knows what this one knows, for clients that took no part in training.

        Args:
            blueprint: What models are built from, the new clients' among them.
            newcomers: Their ids: they are held out.
        """
        other = copy.copy(self)
        other.blueprint, other.failures = blueprint, []
        other.population = replace(self.population, held_out=list(newcomers))
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return what a saved state holds of the server."""
        return {
            "models": {
                name: self.blueprint.without_base(model, self.architecture(name).name)
                for name, model in self.models.items()
            },
            "model_architectures": self.models.architecture_names,
            "frozen": {name: self.blueprint.base_hash(name) for name in self.models.architectures},
            "state": self.state,
            "checkpoints": self.checkpoints,
            "bytes_up": self.costs.bytes_up,
            "bytes_down": self.costs.bytes_down,
            "steps": self.costs.steps,
            "time": self.costs.virtual_time,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned; frozen parameters that it lacks are as modules are built."""
        self.models.clear()
        self.models.architecture_names = state["model_architectures"]
        for name, model in state["models"].items():
            architecture = self.architecture(name)
            entries = self.blueprint.base(architecture.name) | model
            self.models[name] = {entry: entries[entry] for entry in architecture.shapes}
        self.models.architecture_names = state["model_architectures"]
        self.state, self.checkpoints = state["state"], state["checkpoints"]
        self.costs.bytes_up, self.costs.bytes_down = state["bytes_up"], state["bytes_down"]
        self.costs.steps, self.costs.virtual_time = state["steps"], state["time"]

    def detach(self) -> None:
        """Keep models and state apart from those of the server that this one was made :meth:`beside`."""
        self.models, self.state = self.models.copy(), _copied(self.state)

    @property
    def callbacks(self) -> CallbackList:
        """The run's callbacks."""
        return self.blueprint.callbacks

    @property
    def training(self) -> ServerTraining:
        """Public data, and training at the server."""
        return ServerTraining(self)

    @property
    def clients(self) -> list[str]:
        """Ids of all clients that take part in training, in order."""
        return self.population.clients

    @property
    def held_out(self) -> list[str]:
        """Ids of the clients that are kept out of training, in order. Algorithms do not see them."""
        return self.population.held_out

    @property
    def sites(self) -> Mapping[str, str]:
        """Name of each client's site, where clients are at sites."""
        return self.population.sites

    @property
    def num_samples(self) -> dict[str, int]:
        """Training samples of each client: of this round, where they change from round to round."""
        return self.population.samples_in(self.round)

    @property
    def seed(self) -> int:
        """The run's seed, for addresses of randomness that server and client share."""
        return self.blueprint.settings.seed

    def seed_of(self, source: Source) -> int:
        """Return the seed of "initialisation" (first weights) or "participation": :attr:`seed`, unless it is another."""
        return self.blueprint.settings.seed_of(source)

    def rng(self, purpose: str, source: Source = "run") -> torch.Generator:
        """Return a generator addressed by (seed, round, server, purpose).

        Args:
            purpose: What is drawn.
            source: Whose seed: "participation" for who takes part.
        """
        return generator(self.seed_of(source), self.round, "server", purpose)

    def participants(self) -> list[str]:
        """Return this round's clients in client order: as a callback says, else a uniform sample without replacement.

        Raises:
            ConfigurationError: If a callback names a client twice, or one that the federation does not have.
        """
        self.participation.is_requested = True
        owner = self.callbacks.answering(ClientSelection, "participants")
        if owner is not None:
            return self._named(owner.key, list(owner.participants(self)))
        count = self.participation.count(len(self.clients))
        if count == len(self.clients):
            return [client for client in self.clients if self.is_reachable(client)]
        if not self.clock.takes_time:
            picked = first_of_permutation(len(self.clients), count, self.rng("participation", "participation"))
        else:  # the same ones where all can be reached; as few are asked as will do
            order = torch.randperm(len(self.clients), generator=self.rng("participation", "participation")).tolist()
            picked = list(islice((index for index in order if self.is_reachable(self.clients[index])), count))
        return [self.clients[index] for index in sorted(picked)]

    def is_reachable(self, client: str) -> bool:
        """Return whether a client can be reached as this round begins: always without a clock."""
        return self.clock.is_reachable(client)

    def _named(self, owner: str, named: list[str]) -> list[str]:
        names = set(self.num_samples)
        unknown = next((client for client in named if client not in names), None)
        if unknown is not None or len(set(named)) != len(named):
            what = "a client twice" if unknown is None else f"{unknown!r}, which is not a client of this federation"
            raise ConfigurationError(
                f"{owner}.participants names {what}. It returns ids out of server.clients, each once."
            )
        return sort_clients(named)

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
        reason = add_site_name(reason, client, self.sites.get(client))
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
        before = next((failure for failure in reversed(self.failures) if failure["client"] == client), None)
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
        if not self.population.together and POOLED in (job.client, job.data):
            raise ConfigurationError(
                "A visit on the union of all clients' data is planned, and the clients' data are not in one place. Use an "
                "engine that has all data in one process, or another algorithm."
            )
        sent, architecture = self.architecture(job.model), self.architecture_of(job.client)
        shared = self.shared_names(model=job.model)
        everything = tuple(sent.kinds)
        model, down = self.models[job.model], job.down
        if down is None:  # everybody has the frozen network
            down = tuple(self.blueprint.without_base(model, sent.name)) if job.client == POOLED else shared
        returns = job.returns
        if returns is None:
            returns = (
                ()
                if job.work == 0
                else self._without_server_buffers(everything if job.client == POOLED else shared, sent)
            )
        if architecture is not sent:
            refuse_unlike(job.model, sent, (*down, *returns), job.client, architecture)
            if job.down is None:
                refuse_other_choice(self, job.model, shared, job.client)
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
                check_extras(callback.key, extras, callback.wire(architecture.module).down, architecture.shapes)
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

    # -- models -----------------------------------------------------------------------------------------------------
    def architecture(self, model: str = GLOBAL) -> Architecture:
        """Return the architecture of one of the server's models."""
        return self.models.architecture(model)

    @property
    def combining(self) -> str:
        """Key of the model whose updates are being combined: for `reduce`, `on_reduced` and `server_step`."""
        return self.models.combining

    def architecture_of(self, client: str) -> Architecture:
        """Return the architecture of a client's model."""
        return self.models.architectures[self.blueprint.architecture_of(client)]

    @property
    def is_mixed(self) -> bool:
        """Whether clients, or clients and the global model, have models of different architectures."""
        if not self.blueprint.assigned:
            return False
        names = {self.blueprint.architecture_of(client) for client in (*self.clients, *self.held_out)}
        return bool(names - {self.models.main.name})

    def model_of(self, client: str) -> str:
        """Return the key of the model that a client is sent: a callback's answer, or the global one."""
        owner = self.callbacks.answering(ServerModels, "model_of")
        return GLOBAL if owner is None else owner.model_of(self, client)

    def selected(self, name: str, client: str | None = None) -> dict[str, Any] | None:
        """Return a model of the server that a checkpoint callback has selected, with its score; `None` if there is none."""
        model = GLOBAL if client is None else self.model_of(client)
        entries = (
            kept for kept in self.checkpoints.values() if (kept["name"], kept.get("of", GLOBAL)) == (name, model)
        )
        return next(entries, None)

    @property
    def module(self) -> LightningModule:
        """A module of the global model's architecture as the federation began, for names and layers."""
        return self.models.main.module

    @property
    def kinds(self) -> dict[str, EntryKind]:
        """Kind of every entry of the global model."""
        return self.models.main.kinds

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every entry of the global model."""
        return self.models.main.shapes

    @property
    def model(self) -> State:
        """The global model's state."""
        return self.models[GLOBAL]

    @property
    def trainable(self) -> list[str]:
        """Names of the trainable parameters: the only entries server optimizers and noise may touch.

        Those of the global model; while the updates of another model are combined, that model's.
        """
        return self.architecture(self.models.combining).trainable

    def module_with(self, state: State, model: str = GLOBAL) -> LightningModule:
        """Build a module that holds `state`."""
        module = self.blueprint.build("server", self.architecture(model).name)
        load_state(module, state)
        return module

    def shared_names(self, without: FederatedCallback | None = None, *, model: str = GLOBAL) -> tuple[str, ...]:
        """Return the names that travel this round: the callbacks' answers, intersected; every entry by default.

        An entry that is tied under several names travels only if all of its names do.
        """
        return self.shared_in(self.architecture(model).name, without)

    def shared_in(self, architecture: str, without: FederatedCallback | None = None) -> tuple[str, ...]:
        """Return the names that travel of a model of an architecture, whether or not the server has one."""
        architecture_of_model, models = self.models.architectures[architecture], self.models
        choosers = [callback for callback in self.callbacks if callback.claims("shared_names")]
        if not choosers and architecture_of_model.name in models.usual_names:
            return models.usual_names[architecture_of_model.name]
        names = list(architecture_of_model.kinds)
        for callback in choosers:
            answer = None if callback is without else callback.shared_names(self, architecture_of_model.module)
            if answer is not None:
                chosen = set(expand(answer, architecture_of_model.kinds))
                names = [name for name in names if name in chosen]
        if self.models.float_buffers == "local":
            names = [name for name in names if architecture_of_model.kinds[name] in ("trainable", "frozen")]
        travelling = set(names)
        shared = tuple(name for name in names if architecture_of_model.tied.get(name, travelling) <= travelling)
        if not choosers:
            models.usual_names[architecture_of_model.name] = shared
        return shared

    def returned_names(self, *, model: str = GLOBAL) -> tuple[str, ...]:
        """Return the shared names that an ordinary visit sends back; without buffers where those are the server's."""
        return self._without_server_buffers(self.shared_names(model=model), self.architecture(model))

    def _without_server_buffers(self, names: tuple[str, ...], architecture: Architecture) -> tuple[str, ...]:
        if self.models.float_buffers != "server":
            return names
        return tuple(name for name in names if architecture.kinds[name] in ("trainable", "frozen"))

    def global_module(self, client: str | None = None) -> LightningModule | None:
        """Return the model of stage G; by default there is one exactly when every entry of the model travels."""
        owner = self.callbacks.answering(ServerModels, "global_module")
        if owner is not None:
            return owner.global_module(self, client)
        if self.is_mixed and client is None:
            return None
        model = GLOBAL if client is None else self.model_of(client)
        if len(self.shared_names(model=model)) < len(self.architecture(model).kinds):
            return None
        if client is not None and self.architecture(model) is not self.architecture_of(client):
            return None
        return self.module_with(self.models[model], model)

    def global_with(self, state: State, model: str = GLOBAL) -> LightningModule:
        """Build the model of stage G with other entries, such as those of a selected checkpoint."""
        has_own = model == GLOBAL and self.callbacks.role("global_module") is not None
        module = self.global_module(None) if has_own else None
        if module is None:
            return self.module_with(state, model)
        load_state(module, state)
        return module


def _copied(tree: Any) -> Any:
    """Return a copy of the dicts and lists of a tree, so that entries can be replaced; the leaves are the same."""
    if isinstance(tree, dict):
        return {name: _copied(value) for name, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree
