"""The server: the global models, its own state, and how updates become the next model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.datamodules.base import in_order
from fedlightning.errors import warn
from fedlightning.federation.architectures import Architecture, architectures_of, refuse_other_choice, refuse_unlike
from fedlightning.federation.explosions import Explosions
from fedlightning.federation.server_fit import TrainsAtServer
from fedlightning.hooks import POOLED, CallbackList, FederatedCallback, Job
from fedlightning.layers import expand
from fedlightning.messages import GLOBAL, Message, Update, check_extras
from fedlightning.seeding import generator
from fedlightning.tensors import EntryKind, State, clone, load_state, module_state

Scores = dict[tuple[str | None, str, str, str, str], dict[str, tuple[float, int]]]
"""Values and numbers of samples by client; under model (`None`: the global one or what a client made of it), stage,
data, split and metric."""


class Server(TrainsAtServer):
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
        held_out: Ids of the clients that are kept out of training, in order. Algorithms do not see them.
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
        explosions: Watches for updates and losses that explode.
        scores: This round's scores; see :meth:`score`.
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
        self.round = 0
        self.clients = in_order(num_samples)
        self.held_out = in_order(held_out)
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
        self.explosions = Explosions()
        self.scores: Scores = {}

    def __repr__(self) -> str:
        """Return model, clients, round and callbacks."""
        model = type(self.blueprint.template).__name__
        rounds = f"round {self.round + 1} of {self.max_rounds}"
        return f"<Server of {model}, {len(self.clients)} clients, {rounds}, {self.callbacks.callbacks!r}>"

    # -- models and their architectures --------------------------------------------------------------------------
    def rebuild(self) -> None:
        """Build the architectures anew: the blueprint has another template, that of a resumed run."""
        self.architectures = architectures_of(self.blueprint)
        self._own = self.architectures[self._own.name]

    def architecture(self, model: str = GLOBAL) -> Architecture:
        """Return the architecture of one of the server's models.

        Args:
            model: The model's key.
        """
        name = self.model_architectures.get(model)
        return self._own if name is None else self.architectures[name]

    def architecture_of(self, client: str) -> Architecture:
        """Return the architecture of a client's model.

        Args:
            client: The client's id; the global model's for :data:`~fedlightning.hooks.POOLED`.
        """
        return self.architectures[self.blueprint.architecture_of(client)]

    @property
    def is_mixed(self) -> bool:
        """Whether clients, or clients and the global model, have models of different architectures."""
        names = {self.blueprint.architecture_of(client) for client in (*self.clients, *self.held_out)}
        return bool(names - {self._own.name})

    def add_model(self, key: str, architecture: str | None = None, state: State | None = None) -> None:
        """Add a model, or replace one. It is saved with the run, and jobs may name it.

        Args:
            key: The model's key.
            architecture: Name of its architecture. `None`: that of the global model.
            state: Its entries, all of them. `None`: a model as the federation began.

        Raises:
            ValueError: If there is no such architecture, or `state` does not have its names and shapes.
        """
        name = self._own.name if architecture is None else architecture
        if name not in self.architectures:
            raise ValueError(
                f"There is no architecture '{name}' for model '{key}'. There are {list(self.architectures)}."
            )
        own = self.architectures[name]
        found = clone(module_state(own.module)) if state is None else dict(state)
        differing = sorted({name: value.shape for name, value in found.items()}.items() ^ own.shapes.items())
        if differing:
            raise ValueError(f"Model '{key}' is no '{name}': '{differing[0][0]}' differs.")
        self.models[key] = found
        self.model_architectures.pop(key, None)
        if own is not self._own:
            self.model_architectures[key] = name

    def model_of(self, client: str) -> str:
        """Return the key of the model that a client is sent: a callback's answer, or the global one."""
        owner = self.callbacks.role("model_of")
        return GLOBAL if owner is None else owner.model_of(self, client)

    def selected(self, name: str, client: str | None = None) -> dict[str, Any] | None:
        """Return a model of the server that a checkpoint callback has selected, with its score; `None` if there is none.

        Args:
            name: Name of the checkpoint.
            client: For whom, where a model is selected for each architecture. `None`: the global one.
        """
        model = GLOBAL if client is None else self.model_of(client)
        found = (kept for kept in self.checkpoints.values() if (kept["name"], kept.get("of", GLOBAL)) == (name, model))
        return next(found, None)

    @property
    def module(self) -> LightningModule:
        """A module of the global model's architecture as the federation began, for names and layers."""
        return self._own.module

    @property
    def kinds(self) -> dict[str, EntryKind]:
        """Kind of every entry of the global model."""
        return self._own.kinds

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every entry of the global model."""
        return self._own.shapes

    # -- what algorithms ask for ---------------------------------------------------------------------------------
    @property
    def model(self) -> State:
        """The global model's state."""
        return self.models[GLOBAL]

    @property
    def seed(self) -> int:
        """The run's seed, for addresses of randomness that server and client share."""
        return self.blueprint.settings.seed

    def rng(self, purpose: str) -> torch.Generator:
        """Return a generator addressed by (seed, round, server, purpose)."""
        return generator(self.blueprint.settings.seed, self.round, "server", purpose)

    @property
    def trainable(self) -> list[str]:
        """Names of the trainable parameters: the only entries server optimizers and noise may touch.

        Those of the global model; while the updates of another model are combined, that model's.
        """
        return self.architecture(self.combining).trainable

    def participants(self) -> list[str]:
        """Draw this round's clients: a uniform sample without replacement, in client order."""
        share = self.participation
        count = share if isinstance(share, int) and not isinstance(share, bool) else round(share * len(self.clients))
        count = min(max(count, 1), len(self.clients))
        if count == len(self.clients):
            return list(self.clients)
        picked = torch.randperm(len(self.clients), generator=self.rng("participation"))[:count]
        return [self.clients[index] for index in sorted(picked.tolist())]

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
        usual = "left out" if where == "training" else "not scored"
        failure = {
            "round": self.round + 1,
            "client": client,
            "where": where,
            "reason": reason,
            "decision": decision or usual,
        }
        if failure not in self.failures or decision:  # else: a repeated test
            self.failures.append(failure)
        warn(f"{when or f'Round {self.round + 1}'}: {reason}{f'; {decision}' if decision else ''}.")

    def module_with(self, state: State, model: str = GLOBAL) -> LightningModule:
        """Build a module that holds `state`.

        Args:
            state: Entries.
            model: Key of the model whose architecture it has.
        """
        module = self.blueprint.build("server", self.architecture(model).name)
        load_state(module, state)
        return module

    # -- messages ------------------------------------------------------------------------------------------------
    def shared_names(self, without: FederatedCallback | None = None, *, model: str = GLOBAL) -> tuple[str, ...]:
        """Return the names that travel this round: the callbacks' answers, intersected; every entry by default.

        An entry that is tied under several names travels only if all of its names do.

        Args:
            without: A callback that is not asked.
            model: Key of the model that travels.
        """
        return self.shared_in(self.architecture(model).name, without)

    def shared_in(self, architecture: str, without: FederatedCallback | None = None) -> tuple[str, ...]:
        """Return the names that travel of a model of an architecture, whether or not the server has one.

        Args:
            architecture: Its name.
            without: A callback that is not asked.
        """
        own = self.architectures[architecture]
        if not self._choosers and own.name in self._unchosen:
            return self._unchosen[own.name]
        names = list(own.kinds)
        for callback in self._choosers:
            answer = None if callback is without else callback.shared_names(self, own.module)
            if answer is not None:
                chosen = set(expand(answer, own.kinds))
                names = [name for name in names if name in chosen]
        if self.float_buffers == "local":
            names = [name for name in names if own.kinds[name] in ("trainable", "frozen")]
        travelling = set(names)
        found = tuple(name for name in names if own.tied.get(name, travelling) <= travelling)
        self._unchosen[own.name] = found
        return found

    def returned_names(self, *, model: str = GLOBAL) -> tuple[str, ...]:
        """Return the shared names that an ordinary visit sends back; without buffers where those are the server's."""
        return self._without_server_buffers(self.shared_names(model=model), self.architecture(model))

    def _without_server_buffers(self, names: tuple[str, ...], own: Architecture) -> tuple[str, ...]:
        if self.float_buffers != "server":
            return names
        return tuple(name for name in names if own.kinds[name] in ("trainable", "frozen"))

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

    def global_module(self, client: str | None = None) -> LightningModule | None:
        """Return the model of stage G; by default there is one exactly when every entry of the model travels.

        Args:
            client: For whom. `None`: for all; of clients with models of several architectures each has its own.
        """
        owner = self.callbacks.role("global_module")
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
        """Build the model of stage G with other entries, such as those of a selected checkpoint.

        Args:
            state: Entries of the model of stage G, which may be another module than the clients'.
            model: Key of the model that they are of.
        """
        has_own = model == GLOBAL and self.callbacks.role("global_module") is not None
        module = self.global_module(None) if has_own else None
        if module is None:
            return self.module_with(state, model)
        load_state(module, state)
        return module

    def weight(self, update: Update) -> float:
        """Return an update's weight before normalisation; 0 for an update without a real step."""
        if update.steps == 0:
            return 0.0
        return self.callbacks.weight(self, update)
