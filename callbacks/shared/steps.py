"""Step sizes: what algorithms ask of local optimizers, and the server's step towards the clients' mean."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from fedlightning.algorithm import GLOBAL, Change, FederatedCallback, Server, Setup, State, requires
from fedlightning.tensors import interpolate


def largest_lr(optimizer: Optimizer) -> float:
    """Return the largest learning rate of an optimizer's parameter groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return True for SGD without momentum: its steps are the gradients times the learning rate."""
    return type(optimizer).__name__ == "SGD" and not optimizer.defaults.get("momentum")


class SeveralSteps(requires.Requirement):
    """Visits leave the model that the server has sent, at which the term that an option (`of`) weighs is 0."""

    usual = "Set more local_steps or local_epochs, or remove it."
    advises = True

    def fault(self, owner: Any, setup: Setup) -> str:
        weight = getattr(owner, self.of)
        if not weight or not _one_step(setup) or any(map(_moves, setup.callbacks)):
            return ""
        at = "a visit is one step, which is taken at the model that was sent, where the term is 0"
        return f"({self.of}={weight}) does nothing here: {at}"


def _one_step(setup: Setup) -> bool:
    """Return True if every visit is one step."""
    if setup.run.local_steps is not None:
        return setup.run.local_steps == 1
    window = setup.run.trainer_arguments.get("accumulate_grad_batches") or 1
    return setup.run.local_epochs == 1 and all(setup.data.num_batches(client) <= window for client in setup.run.clients)


def _moves(callback: FederatedCallback) -> bool:
    """Return True if a callback lets visits begin elsewhere than at the anchor, or have steps beside the trainer's."""
    declared = {Change.START, Change.WORK} & set(callback.facts.changes)
    return bool(declared) or callback.claims("on_receive") or callback.claims("local_phases")


def _model(server: Server) -> str:
    return getattr(server, "combining", GLOBAL)  # a stand-in for a server, as in examples, has one model


def memory(server: Server, key: str) -> dict[str, Any]:
    """Return what a server optimizer has kept for the model whose updates are being combined; empty at first."""
    optimizer_state: dict[str, Any] = server.state.get(key, {})
    if _model(server) == GLOBAL:
        return {name: value for name, value in optimizer_state.items() if name != "models"}
    kept: dict[str, Any] = optimizer_state.get("models", {}).get(_model(server), {})
    return kept


def remember(server: Server, key: str, values: dict[str, Any]) -> None:
    """Keep what a server optimizer needs for the next step of the model whose updates are being combined.

    Models do not share moments: those of another architecture have other shapes under the same names.

    Example:
        >>> from types import SimpleNamespace
        >>> server = SimpleNamespace(state={}, combining="global")
        >>> remember(server, "FedAvgM", {"vel": 1})
        >>> server.combining = "deep"
        >>> memory(server, "FedAvgM")
        {}
        >>> remember(server, "FedAvgM", {"vel": 2})
        >>> server.state
        {'FedAvgM': {'vel': 1, 'models': {'deep': {'vel': 2}}}}
    """
    optimizer_state = server.state.get(key, {})
    models = optimizer_state.get("models", {})
    if _model(server) == GLOBAL:
        server.state[key] = {**values, **({"models": models} if models else {})}
    else:
        server.state[key] = {**optimizer_state, "models": {**models, _model(server): values}}


def step_to_mean(server: Server, old: State, reduced: State, server_lr: float) -> State:
    """Return ``w + server_lr (mean - w)`` on trainable parameters; every other entry is the clients' mean.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> server, w, mean = SimpleNamespace(trainable=["w"]), {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> step_to_mean(server, w, mean, server_lr=0.5)["w"]
        tensor([0.5000])
    """
    names = [name for name in server.trainable if name in reduced]
    return {**reduced, **interpolate({n: reduced[n] for n in names}, {n: old[n] for n in names}, server_lr)}
