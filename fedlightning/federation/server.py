"""The server: the global models, its own state, and how updates become the next model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.datamodules.base import in_order
from fedlightning.hooks import POOLED, CallbackList, FederatedCallback, Job
from fedlightning.layers import expand
from fedlightning.messages import Message, Update, check_extras
from fedlightning.seeding import generator
from fedlightning.tensors import State, clone, entry_kinds, load_state, module_state, tied_names

GLOBAL = "global"


class Server:
    """The server of one federation.

    Attributes:
        round: the present round, from 0; max_rounds: how many there will be.
        clients: all clients' ids in order; num_samples: training samples of each.
        models: per model key (``"global"`` unless an algorithm keeps several) the full state, on the CPU.
        state: per callback key, what lives from round to round: tensors (replaced, never edited) and plain values.
        checkpoints: per callback key, selected global models and their scores.
        kinds: kind of every entry of the model, fixed before anything is frozen.
        float_buffers: ``"average"`` | ``"local"`` | ``"server"``: what happens to running statistics.
        run_dir: the run's folder, or ``None`` when nothing is written.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        num_samples: Mapping[str, int],
        *,
        max_rounds: int,
        participation: float | int = 1.0,
        float_buffers: str = "average",
        run_dir: Path | None = None,
    ) -> None:
        self.blueprint = blueprint
        self.callbacks: CallbackList = blueprint.callbacks
        self.max_rounds = max_rounds
        self.participation = participation
        self.float_buffers = float_buffers
        self._choosers = [callback for callback in self.callbacks if callback.claims("shared_names")]
        self._unchosen: tuple[str, ...] | None = None
        self.run_dir = run_dir
        self.round = 0
        self.clients = in_order(num_samples)
        self.num_samples = {client: num_samples[client] for client in self.clients}
        self.module = blueprint.build("server")
        self.kinds = entry_kinds(self.module)
        self._tied = tied_names(self.module)
        self.shapes = {name: value.shape for name, value in module_state(self.module).items()}
        self.models: dict[str, State] = {GLOBAL: clone(module_state(self.module))}
        self.state: dict[str, dict[str, Any]] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.bytes_up = 0
        self.bytes_down = 0
        self.steps = 0
        self.scores: dict[tuple[str, str, str, str], dict[str, tuple[float, int]]] = {}

    # -- what algorithms ask for ---------------------------------------------------------------------------------
    @property
    def model(self) -> State:
        """The global model's state."""
        return self.models[GLOBAL]

    def rng(self, purpose: str) -> torch.Generator:
        """A generator addressed by (seed, round, server, purpose)."""
        return generator(self.blueprint.settings.seed, self.round, "server", purpose)

    @property
    def trainable(self) -> list[str]:
        """Names of the trainable parameters: the only entries server optimizers and noise may touch."""
        return [name for name, kind in self.kinds.items() if kind == "trainable"]

    def participants(self) -> list[str]:
        """This round's clients: a uniform sample without replacement, in client order."""
        wanted = self.participation
        count = (
            wanted if isinstance(wanted, int) and not isinstance(wanted, bool) else round(wanted * len(self.clients))
        )
        count = min(max(count, 1), len(self.clients))
        if count == len(self.clients):
            return list(self.clients)
        picked = torch.randperm(len(self.clients), generator=self.rng("participation"))[:count]
        return [self.clients[index] for index in sorted(picked.tolist())]

    def score(self, metric: str, *, stage: str = "G", split: str = "val") -> dict[str, tuple[float, int]]:
        """This round's (value, evaluated samples) per client on its own data; empty if it was not evaluated."""
        return self.scores.get((stage, "local", split, metric), {})

    def module_with(self, state: State) -> LightningModule:
        """A fresh module holding ``state``."""
        module = self.blueprint.build("server")
        load_state(module, state)
        return module

    # -- messages ------------------------------------------------------------------------------------------------
    def shared_names(self, without: FederatedCallback | None = None) -> tuple[str, ...]:
        """What travels this round: the callbacks' answers (but that of ``without``), intersected; every entry by default.

        An entry that is tied under several names travels only if all of its names do: one of them private, all are.
        """
        if not self._choosers and self._unchosen is not None:
            return self._unchosen
        names = list(self.kinds)
        for callback in self._choosers:
            answer = None if callback is without else callback.shared_names(self, self.module)
            if answer is not None:
                chosen = set(expand(answer, self.kinds))
                names = [name for name in names if name in chosen]
        if self.float_buffers == "local":
            names = [name for name in names if self.kinds[name] in ("trainable", "frozen")]
        travelling = set(names)
        self._unchosen = tuple(name for name in names if self._tied.get(name, travelling) <= travelling)
        return self._unchosen

    def returned_names(self) -> tuple[str, ...]:
        """What an ordinary visit sends back this round: the shared names, without buffers where those are the server's."""
        return self._without_server_buffers(self.shared_names())

    def _without_server_buffers(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if self.float_buffers != "server":
            return names
        return tuple(name for name in names if self.kinds[name] in ("trainable", "frozen"))

    def message(self, job: Job) -> Message:
        """The message for one job: state, names to return and every callback's extras, checked against ``wire``."""
        shared = self.shared_names()
        everything = tuple(self.kinds)
        down = job.down if job.down is not None else (everything if job.client == POOLED else shared)
        returns = job.returns
        if returns is None:
            returns = (
                () if job.work == 0 else self._without_server_buffers(everything if job.client == POOLED else shared)
            )
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
                check_extras(callback.key, extras, callback.wire(self.module).down, self.shapes)
        return message

    def global_module(self, client: str | None = None) -> LightningModule | None:
        """The model of stage G; by default there is one exactly when every entry of the model travels."""
        owner = self.callbacks.role("global_module")
        if owner is not None:
            return owner.global_module(self, client)
        if len(self.shared_names()) < len(self.kinds):
            return None
        return self.module_with(self.model)

    def weight(self, update: Update) -> float:
        """The update's weight before normalisation; 0 for an update without a real step."""
        if update.steps == 0:
            return 0.0
        return self.callbacks.weight(self, update)
