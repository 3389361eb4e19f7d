"""SGD, Adam and AdamW on a stack of clients.

These rules treat every number of a parameter alone, so they are the same with a client axis as without. What may differ
from client to client is the learning rate (a schedule over epochs of unequal length) and the number of steps taken
(momentum, bias correction): these become columns, one number for each row. The arithmetic is that of `torch.optim`,
operation for operation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedlightning.fast.optimizer_steps import hooks_of
from fedlightning.stacked.stack import Rows, column, put, take
from fedlightning.tensors import momentum_step

Settings = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A group of `optimizer.param_groups` at the moment of a step: one for all clients, or one for each."""


def refuse(optimizer: Optimizer) -> str | None:
    """Return the reason why an optimizer cannot work on a stack, or `None` if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in RULES:
        return (
            f"configure_optimizers returns {name}; the optimizers of a stack are {', '.join(k.__name__ for k in RULES)}"
        )
    if any(hooks_of(optimizer)):
        return f"{name} has hooks around its step, which a stack does not take"
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor) or group.get("capturable") or group.get("differentiable"):
            return f"{name} has a tensor as learning rate, or is capturable or differentiable"
    return None


class StackedOptimizer(ABC):
    """The state of one optimizer for all clients of a stack.

    Args:
        parameters: By name, the stacked parameters `(size, ...)`.
        size: Number of clients.

    Attributes:
        parameters: By name, the stacked parameters.
        state: By name of the parameter and of the buffer, a stacked tensor.
        steps: By name, the steps that each client has taken, where a rule counts them.
    """

    def __init__(self, parameters: dict[str, Tensor], size: int) -> None:
        self.parameters = parameters
        self.state: dict[str, dict[str, Tensor]] = {}
        self.steps = {name: np.zeros(size, dtype=np.int64) for name in parameters}

    def step(self, name: str, rows: Rows, gradient: Tensor, groups: Settings) -> None:
        """Move one parameter of some clients. Call it under `torch.no_grad`."""
        whole = self.parameters[name]
        parameter = whole if rows == slice(0, len(whole)) else take(whole, rows)
        if first_of(groups).get("maximize"):
            gradient = -gradient
        self.rule(name, rows, parameter, gradient, groups)
        put(whole, rows, parameter)

    @abstractmethod
    def rule(self, name: str, rows: Rows, parameter: Tensor, gradient: Tensor, groups: Settings) -> None:
        """Edit `parameter` in place. A rule that needs the number of steps calls :meth:`counted` once."""

    def gradient_weights(self, row: int, lr_sums: Mapping[str, float]) -> dict[str, float]:
        """Return, by name, the sum of the weights with which one client's gradients went into its movement."""
        return {}

    def counted(self, name: str, rows: Rows, groups: Settings) -> list[tuple[Mapping[str, Any], int]]:
        """Count a step. Return each client's group and number of steps; a single pair where all are equal."""
        self.steps[name][rows] += 1
        steps = self.steps[name][rows]
        if isinstance(groups, Mapping):
            if bool((steps == steps[0]).all()):
                return [(groups, int(steps[0]))]
            groups = [groups] * len(steps)
        return list(zip(groups, steps.tolist(), strict=True))

    def buffer(self, name: str, key: str, rows: Rows) -> Tensor:
        """Return rows of a part of the state, which starts at zero."""
        buffers = self.state.setdefault(name, {})
        if key not in buffers:
            buffers[key] = torch.zeros_like(self.parameters[name])
        return take(buffers[key], rows)


def first_of(groups: Settings) -> Mapping[str, Any]:
    """Return the group of the first client. Values that no schedule changes are equal in all groups."""
    return groups if isinstance(groups, Mapping) else groups[0]


def _noted(groups: Settings) -> Settings:
    """Return what a step of SGD with momentum was taken with, which a schedule may change after it."""
    keys = ("lr", "momentum", "dampening", "nesterov")
    if isinstance(groups, Mapping):
        return {key: groups[key] for key in keys}
    return [{key: group[key] for key in keys} for group in groups]


def per_row(groups: Settings, key: str, like: Tensor) -> float | Tensor:
    """Return a setting of a group: a number, or a column where clients differ."""
    if isinstance(groups, Mapping):
        return float(groups[key])
    return column([float(group[key]) for group in groups], like)


class StackedSGD(StackedOptimizer):
    """:class:`torch.optim.SGD` on a stack, with momentum, dampening, Nesterov and weight decay."""

    def __init__(self, parameters: dict[str, Tensor], size: int) -> None:
        super().__init__(parameters, size)
        self._moves: dict[str, list[tuple[Rows, Settings]]] = {name: [] for name in parameters}
        self._extra: list[tuple[list[tuple[Rows, Settings]], np.ndarray]] = []

    def gradient_weights(self, row: int, lr_sums: Mapping[str, float]) -> dict[str, float]:
        """Return the sums of learning rates, and what momentum adds to them."""
        return {name: total + float(self._extra_weight(name)[row]) for name, total in lr_sums.items()}

    def _extra_weight(self, name: str) -> np.ndarray:
        """Return, by row, how much further than its learning rates SGD goes along gradients that are all 1.

        Parameters that moved in the same steps share it.
        """
        moves = self._moves[name]
        for earlier, extra in self._extra:
            if earlier == moves:
                self._moves[name] = earlier  # the next comparison is one of identity
                return extra
        extra, velocity, moving = (np.zeros(len(self.parameters[name]), dtype=t) for t in (float, float, bool))
        for rows, groups in moves:
            each = [groups] if isinstance(groups, Mapping) else groups
            lr, momentum, dampening = (
                np.array([float(group[key]) for group in each]) for key in ("lr", "momentum", "dampening")
            )
            later = momentum_step(velocity[rows], 1.0, momentum, dampening, nesterov=False)[1]
            step_length = np.where(moving[rows], later, 1.0)
            velocity[rows], moving[rows] = step_length, True
            extra[rows] += lr * (momentum * step_length if each[0]["nesterov"] else step_length - 1.0)
        self._extra.append((moves, extra))
        return extra

    def rule(self, name: str, rows: Rows, parameter: Tensor, gradient: Tensor, groups: Settings) -> None:
        decay, lr = per_row(groups, "weight_decay", parameter), per_row(groups, "lr", parameter)
        if isinstance(decay, Tensor):
            gradient = gradient + parameter * decay
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        momentum = per_row(groups, "momentum", parameter)
        if isinstance(momentum, Tensor) or momentum:
            buffer = self.buffer(name, "momentum_buffer", rows)
            # the first step takes the gradient as it is, without dampening
            pairs = self.counted(name, rows, groups) if first_of(groups)["dampening"] else [({}, 1)]
            share = column([1.0 if step == 1 else 1.0 - group["dampening"] for group, step in pairs], parameter)
            buffer.mul_(momentum)
            if isinstance(share, Tensor):
                buffer.add_(gradient * share)
            else:
                buffer.add_(gradient, alpha=share)
            put(self.state[name]["momentum_buffer"], rows, buffer)
            self._moves[name].append((rows, _noted(groups)))
            if not first_of(groups)["nesterov"]:
                gradient = buffer
            elif isinstance(momentum, Tensor):
                gradient = gradient + buffer * momentum
            else:
                gradient = gradient.add(buffer, alpha=momentum)
        if isinstance(lr, Tensor):
            parameter.sub_(gradient * lr)
        else:
            parameter.add_(gradient, alpha=-lr)


class StackedAdam(StackedOptimizer):
    """:class:`torch.optim.Adam` on a stack, also with AMSGrad and with decoupled weight decay."""

    decoupled = False

    def rule(self, name: str, rows: Rows, parameter: Tensor, gradient: Tensor, groups: Settings) -> None:
        decay, lr = per_row(groups, "weight_decay", parameter), per_row(groups, "lr", parameter)
        if isinstance(decay, Tensor) or decay:
            if self.decoupled or first_of(groups).get("decoupled_weight_decay"):
                parameter.mul_(1 - lr * decay)
            else:
                gradient = gradient + parameter * decay
        pairs = self.counted(name, rows, groups)
        beta1, beta2 = (column([group["betas"][i] for group, _ in pairs], parameter) for i in (0, 1))
        mean, square = self.buffer(name, "exp_avg", rows), self.buffer(name, "exp_avg_sq", rows)
        mean.lerp_(gradient, 1 - beta1) if not isinstance(beta1, Tensor) else mean.add_((gradient - mean) * (1 - beta1))
        square.mul_(beta2).add_(gradient * gradient * (1 - beta2))
        put(self.state[name]["exp_avg"], rows, mean)
        put(self.state[name]["exp_avg_sq"], rows, square)
        if first_of(groups).get("amsgrad"):
            largest = self.buffer(name, "max_exp_avg_sq", rows)
            torch.maximum(largest, square, out=largest)
            put(self.state[name]["max_exp_avg_sq"], rows, largest)
            square = largest
        size = column([g["lr"] / (1 - g["betas"][0] ** step) for g, step in pairs], parameter)
        root = column([math.sqrt(1 - g["betas"][1] ** step) for g, step in pairs], parameter)
        denominator = (square.sqrt() / root).add_(first_of(groups)["eps"])
        if isinstance(size, Tensor):
            parameter.sub_(mean / denominator * size)
        else:
            parameter.addcdiv_(mean, denominator, value=-size)


class StackedAdamW(StackedAdam):
    """:class:`torch.optim.AdamW` on a stack."""

    decoupled = True


RULES: dict[type[Optimizer], type[StackedOptimizer]] = {SGD: StackedSGD, Adam: StackedAdam, AdamW: StackedAdamW}
