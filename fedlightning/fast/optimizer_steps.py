"""Steps of optimizers without what torch and Lightning do around them, which costs more than a small network's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

from fedlightning.tensors import momentum_step

Closure = Callable[[], Tensor | None]


def drop_gradients(optimizer: Optimizer) -> None:
    """Do `optimizer.zero_grad()` without the profiler record that torch makes in every call."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


_RECORDED = Optimizer.profile_hook_step(lambda *_: None).__code__
"""Code of the function that torch wraps around the `step` of every optimizer class."""


def hooks_of(optimizer: Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks before and after an optimizer's step; torch keeps them in private attributes only."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def unrecorded_step(optimizer: Optimizer) -> Callable[[Closure], Any]:
    """Return `optimizer.step` without the profiler record, which is a tenth of a small network's step.

    torch wraps the `step` of every optimizer class in a function that opens the record and runs the hooks before and
    after. It shows the inner `step` as `__wrapped__`; the hooks for all optimizers stand in private names only. Left to
    torch are hooks before a step, hooks for all optimizers, a running profiler, and a `step` that was replaced on the
    object or on its class (a scheduler that counts, a user at any time).
    """
    kind = type(optimizer)
    outer = kind.step
    inner = getattr(outer, "__wrapped__", None)
    if inner is None or getattr(outer, "__code__", None) is not _RECORDED:  # functools.wraps copies `hooked`
        return lambda closure: optimizer.step(closure=closure)  # type: ignore[arg-type]
    pre, post = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    plain = is_plain_sgd(optimizer)
    before, after = hooks_of(optimizer)

    def step(closure: Closure) -> Any:
        replaced = kind.step is not outer or "step" in vars(optimizer)
        if replaced or before or pre or post or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return optimizer.step(closure=closure)  # type: ignore[arg-type]
        if plain:
            result = closure()
            update_by_sgd(optimizer)
        else:
            result = inner(optimizer, closure=closure)
        for hook in after.values():
            hook(optimizer, (optimizer,), {"closure": closure})
        return result

    return step


def count_steps(optimizer: Any, clock: dict[str, Any]) -> None:
    """Count the steps that a manual module takes through Lightning's optimizer wrapper.

    Lightning's loop counts by the same private attribute: the wrapper has no public one.
    """

    def stepped() -> None:
        clock["global_step"] += 1

    optimizer._on_after_step = stepped


# -- SGD without torch's calls around its update, which cost more than a small one -------------------------------------
def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return True if :func:`update_by_sgd` equals `optimizer.step()`: torch's own SGD, in its form for single tensors."""
    if type(optimizer) is not SGD or not _is_torch_own(SGD.step):
        return False
    for group in optimizer.param_groups:
        if group["differentiable"] or group["fused"] or group["foreach"] or isinstance(group["weight_decay"], Tensor):
            return False
        if any(parameter.device.type != "cpu" for parameter in group["params"]):
            return False
    return all(not isinstance(group["lr"], Tensor) for group in optimizer.param_groups)


def _is_torch_own(step: Any) -> bool:
    """Return True if `step` is torch's own (inside torch's profiler record of it), not a replacement."""
    inner = getattr(step, "__wrapped__", step)
    # where the decorator that torch puts on it stands
    return bool(inner.__code__.co_filename == torch_optimizer.__file__)


def update_by_sgd(optimizer: Optimizer) -> None:
    """Move the parameters by the operations of `torch.optim.sgd` in its order, so that the bits are the same."""
    with torch.set_grad_enabled(False):  # what `no_grad()` does, in a third of its time
        for group in optimizer.param_groups:
            lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if group["maximize"]:
                    gradient = -gradient
                if decay != 0:
                    gradient = gradient.add(parameter, alpha=decay)
                if momentum != 0:
                    state, options = optimizer.state[parameter], (momentum, group["dampening"], group["nesterov"])
                    gradient, buffer = momentum_step(state.get("momentum_buffer"), gradient, *options)
                    state["momentum_buffer"] = buffer
                parameter.add_(gradient, alpha=-lr)
