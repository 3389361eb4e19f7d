"""Step sizes: what algorithms ask of local optimizers, and the server's step towards the clients' mean."""

from __future__ import annotations

from torch.optim import Optimizer

from fedlightning.algorithm import Server, State, interpolate


def largest_lr(optimizer: Optimizer) -> float:
    """Return the largest learning rate of an optimizer's parameter groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return True for SGD without momentum: its steps are the gradients times the learning rate."""
    return type(optimizer).__name__ == "SGD" and not optimizer.defaults.get("momentum")


def step_to_mean(server: Server, old: State, reduced: State, server_lr: float) -> State:
    """Return ``w + server_lr (mean - w)`` on trainable parameters; every other entry is the clients' mean.

    Args:
        server: The server, which knows what is trainable.
        old: The global entries ``w``.
        reduced: The clients' mean, of the same names.
        server_lr: Size of the step: 1 is the mean itself.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> server, w, mean = SimpleNamespace(trainable=["w"]), {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> step_to_mean(server, w, mean, server_lr=0.5)["w"]
        tensor([0.5000])
    """
    names = [name for name in server.trainable if name in reduced]
    return {**reduced, **interpolate({n: reduced[n] for n in names}, {n: old[n] for n in names}, server_lr)}
