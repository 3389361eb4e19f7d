"""The check of the engine `vectorized`: whether a federation can train in stacks, and the exact reason if it cannot."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from fedlightning.client.data_summary import take_first_batch
from fedlightning.client.kept import Kept
from fedlightning.client.probes import move_batch
from fedlightning.client.runtime import ClientRuntime
from fedlightning.compat.lightning_runs import takes_index
from fedlightning.contract import FederatedCallback, Stackable
from fedlightning.errors import ConfigurationError
from fedlightning.seeding import isolated
from fedlightning.stacked import optimizers as stacked_optimizers
from fedlightning.stacked.planning import Clock, quietly_attached, schedules_in
from fedlightning.stacked.stack import (
    ClientDraws,
    NotATreeError,
    Stack,
    find_held,
    join_tree,
    named_tensors,
    skeleton_key,
    split_tree,
)
from fedlightning.stacked.step import NoLossError, Place, StackedStep, gradients
from fedlightning.tensors import State, module_state
from fedlightning.tensors.entries import optimizers_in
from fedlightning.wrappers.mixing import user_class
from fedlightning.wrappers.twin import DualByHeadMixin

FIT_HOOKS = (
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start"),
    *("on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step"),
)
"""Hooks that Lightning runs inside a fit, on callbacks and on modules."""
MODULE_HOOKS = (
    *FIT_HOOKS,
    *("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping", "lr_scheduler_step"),
    *("configure_callbacks",),
)
PLAIN = {
    "accumulate_grad_batches": 1,
    "num_nodes": 1,
    "devices": 1,
    "strategy": "auto",
    "plugins": None,
    "profiler": None,
    "detect_anomaly": False,
    "sync_batchnorm": False,
    "overfit_batches": 0.0,
    "check_val_every_n_epoch": None,
    "reload_dataloaders_every_n_epochs": 0,
}
"""Trainer arguments of which a stack supports one value only."""
COPIES = 8
"""Copies of a client's tensors in memory: module, message, update, record, stack, gradient, Adam's two means."""


@dataclass
class Finding:
    """Result of the check of a federation.

    Attributes:
        reason: Reason why its clients cannot train in a stack, as a clause. `None` if they can.
        draws: Whether their steps use dropout.
        uses_index: Whether they use the batch's index in a way that cannot be noted (as a factor).
        shares: Whether a stack may hold a frozen network once: no step writes into it.
        bytes_of_step: Memory of a step for each client: its batch and what autograd keeps of it.
        bytes_of_client: Memory of a client in a stack: parameters, gradients, optimizer, its own copies.
    """

    reason: str | None = None
    draws: bool = False
    uses_index: bool = False
    shares: bool = False
    bytes_of_step: int = 0
    bytes_of_client: int = 0


def examine(runner: ClientRuntime) -> Finding:
    """Check settings, callbacks, data and module, and try a step on a stack of two clients."""
    finding = analyse(runner)
    if finding.reason is not None:
        raise ConfigurationError(
            f"engine='vectorized' cannot train this federation: {finding.reason}. Use engine='sequential' or 'processes'."
        )
    return finding


def analyse(runner: ClientRuntime) -> Finding:
    """Check as :func:`examine` does, without raising; a process tries the step of a federation once."""
    tools = runner.blueprint.tools
    if "stack" not in tools:
        tools["stack"] = _analysed(runner)
    finding: Finding = tools["stack"]
    return finding


def _analysed(runner: ClientRuntime) -> Finding:
    if len({runner.blueprint.architecture_of(client) for client in runner.data.client_ids}) > 1:
        return Finding("clients have models of different architectures")
    module = runner.blueprint.build(next(iter(runner.data.client_ids)))
    reason = _of_settings(runner) or _of_callbacks(runner) or _of_data(runner) or _of_module(module)
    if reason is not None:
        return Finding(reason)
    base = {name: value for name, value in named_tensors(module)[0].items() if not value.requires_grad}
    finding = _try_drawing(runner, module, base)
    if base and not finding.shares:
        finding = _try_drawing(runner, module, {})
    shared = base if finding.shares else {}
    finding.bytes_of_client = COPIES * sum(
        value.nbytes for name, value in module_state(module).items() if name not in shared
    )
    return finding


def _try_drawing(runner: ClientRuntime, module: LightningModule, shared: State) -> Finding:
    """Try the step; where it draws random numbers, once more with the clients' own."""
    finding = _try_step(runner, module, None, shared)
    if finding.reason is None or "random" not in finding.reason:
        return finding
    if isinstance(module, DualByHeadMixin) and module.dual_is_twin:
        return Finding(f"{user_class(module).__name__} has dropout, which its twin extractor is to repeat")
    return _try_step(runner, module, ClientDraws(), shared)


def _of_settings(runner: ClientRuntime) -> str | None:
    settings = runner.settings
    for name, plain in PLAIN.items():
        value = settings.trainer_arguments.get(name, plain)
        if value != plain and value is not None:
            return f"{name}={value!r} (a stack knows {plain!r} only)"
    if settings.optimizer_state == "keep":
        return "optimizer_state='keep', but the optimizers of a stack are new in every visit"
    precision = runner.blueprint.precision
    half = type(precision) is MixedPrecision and precision.scaler is None
    if type(precision) not in (Precision, DoublePrecision) and not half:
        return f"precision={precision.precision!r} (a stack knows '32-true', '64-true' and 'bf16-mixed')"
    return None


def _of_callbacks(runner: ClientRuntime) -> str | None:
    for callback in runner.settings.callbacks:
        hook = _first_of(FIT_HOOKS, callback, Callback)
        if hook is not None:
            return f"{type(callback).__name__}.{hook} is a Lightning hook inside each client's own fit"
    for callback in runner.callbacks:
        hook = _first_of(FIT_HOOKS, callback, FederatedCallback)
        if hook is not None and not (isinstance(callback, Stackable) and callback.is_stackable):
            return f"{callback.key}.{hook} works inside each client's own fit"
        if callback.claims("training_loss"):
            return f"{callback.key} adds a term to the loss, from features of one client's model"
        if callback.claims("training_batches"):
            return f"{callback.key} draws the batches of each client's fit"
        if callback.claims("on_build"):
            return f"{callback.key} gives clients models of different shapes"
    return None


def _first_of(hooks: Iterable[str], callback: Callback, base: type[Callback]) -> str | None:
    return next((name for name in hooks if getattr(type(callback), name) is not getattr(base, name)), None)


def _of_data(runner: ClientRuntime) -> str | None:
    alike = runner.data.common_batches is not None  # one client's loader then tells
    for client in runner.data.client_ids[:1] if alike else runner.data.client_ids:
        workers = getattr(runner.data.client_dataloader(client, "train"), "num_workers", 0)
        if workers:
            return f"the loader of client '{client}' has num_workers={workers}, and all clients load at once (use 0)"
    return None


def _of_module(module: LightningModule) -> str | None:
    name = user_class(module).__name__
    if not module.automatic_optimization:
        return f"{name} optimizes manually"
    hook = next((hook for hook in MODULE_HOOKS if is_overridden(hook, module)), None)
    if hook is not None:
        return f"{name}.{hook} is a hook of one client's fit"
    return _of_optimizer(module, name)


def _of_optimizer(module: LightningModule, name: str) -> str | None:
    try:
        with quietly_attached(module, Clock(1, None, 1)):
            configured = module.configure_optimizers()
    except AttributeError as error:
        return f"{name}.configure_optimizers needs a running trainer ({error})"
    optimizers = optimizers_in(configured)
    if len(optimizers) != 1:
        return f"{name}.configure_optimizers returns {len(optimizers)} optimizers (a stack has one)"
    for scheduler, interval, _ in schedules_in(configured):
        if isinstance(scheduler, ReduceLROnPlateau) or interval not in ("epoch", "step"):
            return f"{type(scheduler).__name__} follows a metric, not steps or epochs"
    return stacked_optimizers.refuse(optimizers[0])


def _try_step(runner: ClientRuntime, module: LightningModule, draws: ClientDraws | None, shared: State) -> Finding:
    """Try the step on two clients that have the same batch, and `shared` once."""
    name = user_class(module).__name__
    batch = take_first_batch(runner)
    finding = Finding(draws=draws is not None)
    if batch is None:
        return finding
    try:
        skeleton_key(split_tree(batch)[1])
    except NotATreeError as error:
        finding.reason = str(error)
        return finding
    home = module.device
    module.to(runner.blueprint.device)
    before_step = Kept(module)
    try:
        stack = Stack(module, 2, runner.blueprint.device, shared)
        for row in range(2):
            stack.pull(row, module)
        batch = _twice(move_batch(module, batch))
        names = (*stack.parameters, *stack.buffers)
        trained = [place for place, key in enumerate(names) if key in stack.parameters and key not in stack.shared]
        tensors = [
            stack.shared[key] if key in stack.shared else stack.tensors[key].requires_grad_(key in stack.parameters)
            for key in names
        ]
        before = {
            key: tensor.detach().clone() for key, tensor in zip(names, tensors, strict=True) if key in stack.tensors
        }
        near = 5e-2 if type(runner.blueprint.precision) is MixedPrecision else 1e-2
        step = StackedStep(
            module,
            runner.blueprint.precision.train_step_context,
            takes_index(module.training_step),
            draws,
            stack.shared,
        )
        size = sum(tensor.numel() * tensor.element_size() for tensor in split_tree(batch)[0])

        def kept(tensor: Tensor) -> Tensor:
            nonlocal size
            size += tensor.numel() * tensor.element_size()
            return tensor

        with isolated(runner.settings.seed, "try-a-stack"), step.attached():
            untouched = _outside_tensors(module)
            with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
                result = step(tensors, batch, Place(), [torch.Generator(), torch.Generator()])
            together = [result.losses, *gradients(result.losses, [tensors[place] for place in trained])]

            def alone(index: int) -> list[Tensor | None]:
                entries = [
                    before[key][:1].clone().requires_grad_(place in trained) if key in before else stack.shared[key]
                    for place, key in enumerate(names)
                ]
                step_alone = step(entries, _first(batch), Place(batch=index), [torch.Generator()])
                return [step_alone.losses, *gradients(step_alone.losses, [entries[place] for place in trained])]

            looked = step.watch.looked
            if not _alike(together, alone(0), near):
                moved = [what for what, value in _outside_tensors(module).items() if value != untouched.get(what)]
                cause = (
                    f"it changes {moved[0]}"
                    if moved
                    else "an operation in it gives other numbers under torch.func.vmap"
                )
                finding.reason = (
                    f"{name}.training_step does not do the same for a client alone and in a stack ({cause})"
                )
            elif not looked and not _alike(together, alone(7), near):
                finding.uses_index = True
        finding.bytes_of_step = size // 2
        finding.shares = bool(shared) and stack.find_written() is None
    except NoLossError:
        pass  # only this batch is skipped
    except Exception as error:
        finding.reason = f"{name}.training_step does not run under torch.func.vmap ({_clause(error)}){_hint(module)}"
    finally:
        changed = before_step.put_back()
        module.to(home)
    if finding.reason is None and changed:
        finding.reason = f"{name}.training_step changes {changed[0]}, which a stack does not keep for each client"
    if finding.reason is None and (place := find_held(module)) is not None:
        finding.reason = f"{name} holds parameters or buffers once more in {place}, where a stack does not reach them"
    return finding


def _first(batch: Any) -> Any:
    tensors, skeleton = split_tree(batch)
    return join_tree(skeleton, [tensor[:1] for tensor in tensors])


def _outside_tensors(module: LightningModule) -> dict[str, Any]:
    """Return what a step may change without a stack keeping it for each client: attributes, global generators."""
    attributes: dict[str, Any] = {
        "self." + ".".join(filter(None, (path, key))): value
        for path, child in module.named_modules()
        for key, value in vars(child).items()
        if type(value) in (bool, int, float, str) and key != "_current_fx_name"
    }
    numpy_state = np.random.get_state()
    attributes["the state of Python's random"] = random.getstate()
    attributes["the state of numpy.random"] = (numpy_state[2], numpy_state[1].tobytes())  # type: ignore[index]
    return attributes


def _alike(together: list[Tensor | None], alone: list[Tensor | None], near: float) -> bool:
    """Return True if both rows of two equal clients are what one has alone, up to rounding.

    The losses come first, then gradients. A gradient is small or large in relation to the largest of them.
    """
    scales = [
        0.0 if single is None or not single.numel() else float(single.detach().abs().nan_to_num().max())
        for single in alone
    ]
    scales[1:] = [max(scales[1:], default=0.0)] * (len(scales) - 1)
    for both, single, scale in zip(together, alone, scales, strict=True):
        if both is None or single is None:
            if both is not single:
                return False
        elif not torch.allclose(both, single.expand_as(both), rtol=0.0, atol=near * scale + 1e-6, equal_nan=True):
            return False
    return True


def _twice(batch: Any) -> Any:
    tensors, skeleton = split_tree(batch)
    return join_tree(skeleton, [torch.stack([tensor, tensor]) for tensor in tensors])


def _hint(module: LightningModule) -> str:
    """Return what to check first in a module that holds metric objects; torch's own message does not name them."""
    metric = next((path for path, child in module.named_modules() if isinstance(child, Metric)), None)
    if metric is None:
        return ""
    return (
        f". If it is self.{metric} that it updates: a metric object keeps one state; use torchmetrics.functional there"
    )


def _clause(error: Exception) -> str:
    """Return the first sentence of an error."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".")
