"""What methods share that keep several models on the server: one per client, or one per cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    GLOBAL,
    Change,
    Facts,
    FederatedCallback,
    Job,
    Message,
    Need,
    Newcomers,
    Server,
    ServerModels,
    Setup,
    State,
    Update,
    contributors,
    detached_copy,
    facts,
    isolated,
    requires,
)
from fedlightning.tensors import WeightedMean, as_reals, clone, entry_kinds, equal, module_state, select


def reported_module(server: Server, entries: State) -> LightningModule | None:
    """Return the global model with other entries; `None` where a part of the model stays with the clients."""
    if len(server.shared_names()) < len(server.kinds):
        return None
    return server.module_with({**server.model, **entries})


def send_reported(job: Job, message: Message, entries: State) -> None:
    """Put other entries into a message to a client that is evaluated: it deploys the reported model."""
    if job.work == 0:
        message.state = {**message.state, **select(entries, message.state)}


NO_SERVER_STEP = Need("keeps several models at the server, and no mean of all", ("server_step", "on_reduced"))
"""Nothing can work on the one model that the clients' mean gives."""


def one_visit(what: str, instead: str, when: Callable[[Setup], bool] = facts.always) -> Need:
    """Return the need of a method that lets a client train twice in a round: that it keeps nothing both would train."""
    return Need(f"{what}, so that what a client keeps would train in both visits", (Change.KEEPS,), instead, when)


def no_model(why: str = "lets no model travel") -> list[Need]:
    """Return the needs of a method that lets no model travel: that nothing works on one, or keeps a part beside it."""
    return [Need(why, facts.WORKS_ON_THE_MODEL), Need(f"{why}, and each client's own model is whole", (Change.KEEPS,))]


class ModelPerArchitecture(ServerModels):
    """Base of methods that keep a whole model at the server for each architecture that clients have, by its name.

    That of the global model's architecture is the global one.
    """

    def make_all_models(self, server: Server) -> None:
        """Make the models before round 1.

        Raises:
            ValueError: If models are not whole at the server, or a held-out client would have none.
        """
        if server.models.float_buffers == "local":
            raise ValueError(
                f"{self.key} makes teachers of whole models, and float_buffers='local' keeps a part of each at its client. "
                "Use float_buffers='average'."
            )
        self.make_models(server, server.clients)
        for client in server.held_out:
            if self.model_of(server, client) not in server.models:
                raise ValueError(
                    f"{self.key} has no model for the held-out client '{client}': nobody who trains has its architecture "
                    f"'{server.architecture_of(client).name}'. Assign it another one."
                )

    def make_models(self, server: Server, clients: Sequence[str]) -> None:
        """Make a model for every architecture that nobody had so far."""
        for client in clients:
            if (key := self.model_of(server, client)) not in server.models:
                server.models.add(key, key)

    def model_of(self, server: Server, client: str) -> str:
        """Return the model of the client's architecture."""
        architecture = server.architecture_of(client)
        return GLOBAL if architecture is server.architecture() else architecture.name


class NoWeightings(requires.Requirement):
    """Nothing weighs clients in a mean, where a method has weights of its own; else users are warned."""

    usual = "Remove it if it is there for that only."
    advises = True

    def fault(self, owner: Any, setup: Setup) -> str:
        other = next((part for part in setup.callbacks if part is not owner and part.weighting is not None), None)
        what = f"weighting={other.weighting!r} of {other.key}" if other else ""
        return f"combines the clients' models with weights of its own, and {what} does nothing" if what else ""


class NoAnchors(requires.Requirement):
    """Nothing refers to a model that is for all (by the methods `of`), where a method sends none; else users are warned."""

    advises = True

    def fault(self, owner: Any, setup: Setup) -> str:
        names = [other.key for other in setup.callbacks if other is not owner and any(map(other.claims, self.of))]
        there = f"so there is no anchor that {', '.join(names)} could refer to: terms that need one do nothing"
        return f"sends no model for all, {there}" if names else ""


class DifferentStarts(requires.Requirement):
    """Several models begin different: the module can be initialised anew (options `num_clusters`, `init`)."""

    def fault(self, owner: Any, setup: Setup) -> str:
        if owner.num_clusters == 1:
            return ""
        if owner.init == 0:
            setup.warn(
                f"{owner.key}(init=0) starts all centres from one model: they never separate, all clients choose 0."
            )
        elif equal(module_state(setup.module), another_start(setup.module, owner.init, 0, owner.key)):
            name, way = type(setup.template).__name__, f"{owner.key}(init=0.1): noise on its parameters"
            return f"cannot initialise {name} anew: no submodule has reset_parameters(). Use {way}"
        return ""


class SharesPredictions(FederatedCallback):
    """Base of methods in which clients share predictions, prototypes or features, and no entry of a model travels."""

    facts = Facts(
        needs=no_model(),
        mixes_architectures=True,
        newcomers=Newcomers(no_model="lets no model travel, and has none for a client that never trained", join=True),
    )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return nothing: no weight travels."""
        return []


class KeepsClientModels(ServerModels):
    """Base of methods in which the server keeps every client's model and sends each client another one.

    ``server.state[key]["models"]`` holds what each client sent last; a client that never sent anything counts with
    ``w^0``. Models are replaced when the round is over: all that goes down in a round is made from the models at its
    start, whoever is visited first. Memory at the server is O(N * model), by definition of these methods. There is no
    global model.

    Example:
        >>> from types import SimpleNamespace
        >>> server = SimpleNamespace(state={}, clients=["a", "b"], model={"w": torch.zeros(1)})
        >>> base, update = KeepsClientModels(), Update(0, "a", {"w": torch.ones(1)}, contributed=True)
        >>> base.reduce(server, [update]), base.models(server)
        ({}, {'a': {'w': tensor([1.])}, 'b': {'w': tensor([0.])}})
    """

    @property
    def facts(self) -> Facts:
        """Whole models of clients are mixed, and none is for all."""
        why = "makes a client's model out of what this client has sent before, and has none for one that never trained"
        needs = [NO_SERVER_STEP, facts.WHOLE_UPDATES]
        return Facts(needs=needs, requires=[NoWeightings()], newcomers=Newcomers(no_model=why))

    def models(self, server: Server) -> dict[str, State]:
        """Return each client's last model, in client order."""
        stored = server.state.get(self.key, {}).get("models", {})
        return {client: {**server.model, **stored.get(client, {})} for client in server.clients}

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Keep the models that came. Nothing is averaged into a global model."""
        server_state = server.state.get(self.key, {})
        server.state[self.key] = {**server_state, "models": {**server_state.get("models", {}), **sent_models(updates)}}
        return {}

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return ``None``: the server's models are the clients' own."""
        return None


def sent_models(updates: Iterable[Update]) -> dict[str, State]:
    """Return the models of the clients that took a step, by client."""
    return {update.client: dict(update.state) for update in contributors(updates) if update.state}


def another_start(module: LightningModule, init: float | Literal["random"], *address: object) -> State:
    """Return the state of ``module`` initialised anew, or with noise on its parameters. Frozen entries stay."""
    kinds, old = entry_kinds(module), module_state(module)
    fresh = detached_copy(module)
    with isolated(*address), torch.no_grad():
        for child in reversed(list(fresh.modules())):  # as constructors do: what contains comes after what it contains
            trained = [parameter for parameter in child.parameters(recurse=False) if parameter.requires_grad]
            if init != "random":
                for parameter in trained:
                    numbers = as_reals(parameter)
                    numbers.add_(torch.randn_like(numbers), alpha=init)
            elif trained:
                for name in ("reset_parameters", "_reset_parameters"):
                    getattr(child, name, lambda: None)()
    return clone({name: old[name] if kinds[name] == "frozen" else value for name, value in module_state(fresh).items()})


def parameter_names(server: Server, state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the trainable parameters in ``state``, each once (not again under names it is tied to)."""
    names = (name for name, parameter in server.module.named_parameters() if server.kinds[name] == "trainable")
    return [name for name in names if name in state]


def combine(base: Mapping[str, Tensor], parts: Iterable[tuple[float, Mapping[str, Tensor]]]) -> State:
    """Return ``sum_j a_j w_j / sum_j a_j``, in float64.

    Integer entries are ``base``'s, and so are all entries where every weight is 0.

    Example:
        >>> base = {"w": torch.tensor([1.0]), "steps": torch.tensor(3)}
        >>> combine(base, [(3.0, base), (1.0, {"w": torch.tensor([5.0]), "steps": torch.tensor(8)})])
        {'w': tensor([2.]), 'steps': tensor(3)}
    """
    mean = WeightedMean()
    for weight, state in parts:
        mean.add(select(state, base), weight)
    return {**base, **{name: value for name, value in mean.result().items() if not _is_integer(value)}}


def _is_integer(value: Tensor) -> bool:
    """Return True for integer and boolean entries."""
    return not (value.is_floating_point() or value.is_complex())
