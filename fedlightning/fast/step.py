"""One training step of the fast loop: forward, backward, clipping and the optimizer, with the hooks between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

from fedlightning.compat.attached import class_takes_index
from fedlightning.fast.errors import NotInFastLoop
from fedlightning.fast.hooks import Hooks
from fedlightning.fast.log_sheet import LogCollector
from fedlightning.fast.trainer import FastTrainer

Closure = Callable[[], Tensor | None]


class FastStep:
    """One training step: all between a batch that is on the device and `on_train_batch_end`.

    Args:
        trainer: Stand-in for the Trainer, with its optimizers.
        collector: Collects what the module logs.
        hooks: Hooks that are overridden.
        reports: Whether a hook needs the outputs of each step.
    """

    def __init__(self, trainer: FastTrainer, collector: LogCollector, hooks: Hooks, reports: bool) -> None:
        module, precision = trainer.lightning_module, trainer.precision_plugin
        self.trainer, self.collector, self.module, self.clock = trainer, collector, module, vars(trainer)
        self.precision, self.scaler = precision, getattr(precision, "scaler", None)
        self.step_context: Callable[[], AbstractContextManager[Any]] | None = (
            None if type(precision) is Precision else precision.train_step_context
        )
        self.wants_index = class_takes_index(type(module), "training_step")
        self.before_zero_grad = hooks.find("on_before_zero_grad")
        self.before_backward, self.after_backward = hooks.find("on_before_backward"), hooks.find("on_after_backward")
        self.before_step = hooks.find("on_before_optimizer_step")
        self.zero_grad = module.optimizer_zero_grad if hooks.overridden("optimizer_zero_grad") else None
        self.backward = module.backward if hooks.overridden("backward") else None
        self.clips = hooks.overridden("configure_gradient_clipping") or hooks.overridden("clip_gradients")
        # Lightning's optimizer wrapper is left out where it would do nothing.
        self.direct = self.scaler is None and not hooks.overridden("optimizer_step")
        self.keeps_outputs = reports or not self.direct
        if module.automatic_optimization and trainer.optimizers:
            self.optimizer: Optimizer = trainer.optimizers[0]
            self.step = unrecorded_step(self.optimizer) if self.direct else self._through_lightning
        self.batch, self.index, self.window = None, 0, 1
        self.outputs: dict[str, Any] = {}

    def automatic(self, batch: Any, index: int, window_done: bool) -> dict[str, Any]:
        """Take a step under automatic optimization and return the outputs for `on_train_batch_end`."""
        self.batch, self.index, self.window = batch, index, self.clock["accumulate_grad_batches"]
        self.outputs = {}
        if window_done:
            self.step(self._passes_and_hooks)
            self.clock["global_step"] += 1
        else:
            self._passes_with_gradients()
        self.collector.enter(None)
        self.batch = None
        return self.outputs

    def manual(self, batch: Any, index: int, window_done: bool) -> dict[str, Any]:
        """Take a step of a module that optimizes manually; only the steps of its optimizers are counted."""
        for optimizer in self.trainer.strategy._lightning_optimizers:
            count_steps(optimizer, self.clock)
        output = self._training_step(batch, index)
        self.collector.enter(None)
        if output is not None and not isinstance(output, Mapping | Tensor):
            raise NotInFastLoop(f"training_step returns {type(output).__name__}")
        outputs: dict[str, Any] = {"loss": output} if isinstance(output, Tensor) else dict(output or {})
        if "loss" in outputs:
            outputs["loss"] = outputs["loss"].detach()
        return outputs

    # -- what an optimizer calls, once or more often ---------------------------------------------------------------
    def _passes_and_hooks(self) -> Tensor | None:
        result = self._passes() if torch.is_grad_enabled() else self._passes_with_gradients()
        if self.before_step is not None:
            self.before_step(self.optimizer)
        limit = self.clock["gradient_clip_val"]
        if limit is not None or self.clips:
            self._clip(limit)
        return result

    def _passes_with_gradients(self) -> Tensor | None:
        """Run the passes with gradients on, because the module may have switched them off."""
        with torch.enable_grad():
            return self._passes()

    def _passes(self) -> Tensor | None:
        """Run a forward and a backward pass."""
        output = self._training_step(self.batch, self.index)
        loss = output if output is None or isinstance(output, Tensor) else loss_in(output)
        outputs = self.outputs
        outputs.clear()
        if loss is not None:
            loss = loss / self.window if self.window != 1 else loss
            if self.keeps_outputs:
                outputs["loss"] = loss.detach().clone()
            if loss is not output and isinstance(output, Mapping):
                outputs.update((key, value) for key, value in output.items() if key != "loss")
        if self.index % self.window == 0:
            if self.before_zero_grad is not None:
                self.before_zero_grad(self.optimizer)
            if self.zero_grad is None:
                drop_gradients(self.optimizer)
            else:
                self.collector.enter("optimizer_zero_grad")
                self.zero_grad(self.trainer.current_epoch, self.index, self.optimizer)
        if loss is None:
            return None
        self._backward(loss)
        return outputs["loss"] if self.keeps_outputs else loss.detach()

    def _training_step(self, batch: Any, index: int) -> Any:
        self.collector.enter("training_step")
        step = self.module.training_step
        if self.step_context is None:
            return step(batch, index) if self.wants_index else step(batch)
        with self.step_context():
            return step(batch, index) if self.wants_index else step(batch)

    def _backward(self, loss: Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self.before_backward is not None:
            self.before_backward(loss)
        if self.backward is None:
            loss.backward()
        else:
            self.collector.enter("backward")
            self.backward(loss)
        if self.after_backward is not None:
            self.after_backward()

    def _clip(self, limit: float | None) -> None:
        self.collector.enter("configure_gradient_clipping")
        how = self.trainer.gradient_clip_algorithm
        self.module.configure_gradient_clipping(self.optimizer, gradient_clip_val=limit, gradient_clip_algorithm=how)

    def _through_lightning(self, closure: Closure) -> None:
        wrapped = self.module.optimizers()
        first = wrapped[0] if isinstance(wrapped, list) else wrapped
        self.collector.enter("optimizer_step")
        self.module.optimizer_step(self.trainer.current_epoch, self.index, first, self._passes_with_gradients)


def loss_in(output: Any) -> Tensor:
    """Return the loss in a `training_step`'s output that is neither a tensor nor `None`."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(loss, Tensor):
        raise NotInFastLoop(f"training_step returns {type(output).__name__} without a loss")
    return loss


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
    everywhere = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    plain = is_plain_sgd(optimizer)
    before, after = hooks_of(optimizer)

    def step(closure: Closure) -> Any:
        replaced = kind.step is not outer or "step" in vars(optimizer)
        if replaced or before or any(everywhere) or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
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
    return bool(
        inner.__code__.co_filename == torch_optimizer.__file__
    )  # where the decorator that torch puts on it stands


def update_by_sgd(optimizer: Optimizer) -> None:
    """Move the parameters by the operations of `torch.optim.sgd` in its order, so that the bits are the same."""
    with torch.no_grad():
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
                    gradient = _with_momentum(optimizer.state[parameter], gradient, group)
                parameter.add_(gradient, alpha=-lr)


def _with_momentum(state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> Tensor:
    momentum, buffer = group["momentum"], state.get("momentum_buffer")
    if buffer is None:
        buffer = state["momentum_buffer"] = gradient.detach().clone()
    else:
        buffer.mul_(momentum).add_(gradient, alpha=1 - group["dampening"])
    return gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
