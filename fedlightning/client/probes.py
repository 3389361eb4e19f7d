"""Losses and gradients at given parameters, outside the optimizer's loop, without a trace.

Every probe mutes the module's logging and metrics, restores what a step changes beside what trains (buffers, attributes, a
momentum encoder), and draws its randomness from its own address. So a run with a probe and one without train the same
model.

Outputs of a module over a loader, of teachers and of predictions that travel, are taken in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlightning.client.kept import Kept, moved_by_steps
from fedlightning.compat.lazy_clones import lazy_clone
from fedlightning.compat.lightning_runs import detached_copy, takes_index
from fedlightning.datamodules.public import PairedBatch
from fedlightning.seeding import isolated
from fedlightning.tensors import State, clone, dense, load_state, module_state
from fedlightning.wrappers.muting import evaluating, frozen_buffers, muted

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that a batch goes through on its way to the device."""


class NoLossError(ValueError):
    """A `training_step` returned no loss."""


def move_batch(module: LightningModule, batch: Any) -> Any:
    """Return a batch on the module's device, moved by its own transfer hooks, which see nothing of paired targets."""
    if isinstance(batch, PairedBatch):
        return PairedBatch(move_batch(module, batch.batch), batch.targets.to(module.device))
    batch = module.on_before_batch_transfer(batch, 0)
    batch = module.transfer_batch_to_device(batch, module.device, 0)
    return module.on_after_batch_transfer(batch, 0)


def training_loss(module: LightningModule, batch: Any, batch_idx: int = 0) -> Tensor:
    """Return the loss that `module.training_step` returns for `batch`.

    Args:
        module: The module.
        batch: Batch on its device.
        batch_idx: Index that the step is given.

    Raises:
        NoLossError: If the step returns no loss (manual optimization, or a skipped batch).
    """
    output = module.training_step(batch, *((batch_idx,) if takes_index(module.training_step) else ()))
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise NoLossError(
            f"{type(module).__name__}.training_step returned {type(output).__name__}, not a loss. "
            "This algorithm needs a training_step that returns the loss (automatic optimization)."
        )
    return loss


@contextmanager
def probing(
    module: LightningModule, precision: Precision, *seed: object, update_buffers: bool = False
) -> Iterator[None]:
    """Within the block, a module may run without a trace: muted, what it keeps restored, randomness addressed.

    Args:
        module: The module.
        precision: That of training.
        *seed: Address of the randomness.
        update_buffers: Let its buffers move, and all else that its steps keep: it trains.
    """
    restored = nullcontext() if update_buffers else untouched(module)
    with isolated(*seed), muted(module), restored, precision.train_step_context():
        yield


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Within the block steps of a module may run: what they change of it beside what trains is put back afterwards.

    Example:
        >>> module = nn.BatchNorm1d(1)
        >>> with untouched(module):
        ...     _ = module(torch.ones(3, 1))
        ...     module.seen = 3
        >>> module.running_mean, hasattr(module, "seen")
        (tensor([0.]), False)
    """
    attributes = Kept(module, of_step=True, buffers=False)
    try:
        with frozen_buffers(module):  # on clones: a backward pass may still follow
            yield
    finally:
        attributes.put_back()


def followers(module: nn.Module) -> State:
    """Return copies of the frozen parameters that may follow trained ones, as a mean teacher's do, by name."""
    moved = {id(parameter) for parameter in moved_by_steps(module)}
    return {name: lazy_clone(entry) for name, entry in module.named_parameters() if id(entry) in moved}


def repeats(module: LightningModule, batch: Any) -> bool:
    """Return whether a training step, taken twice by a copy with the same random draws, gives the same loss."""
    module, losses = detached_copy(module).train(), list[Tensor]()
    for _ in range(2):
        with torch.no_grad(), isolated("twice"), muted(module):
            losses.append(training_loss(module, move_batch(module, batch)))
    return torch.equal(*losses)


def mean_loss(module: LightningModule, batches: Iterable[Any], precision: Precision, *seed: object) -> float:
    """Return the sample-weighted mean training loss, in eval mode and without gradients; NaN if there is no batch.

    A batch that the step skips counts no more than in training.

    Raises:
        NoLossError: If it skips all of them.
    """
    total, count, skipped = 0.0, 0, None
    with evaluating(module), torch.no_grad(), probing(module, precision, *seed):
        for index, batch in enumerate(batches):
            size = extract_batch_size(batch) or 1
            try:
                loss = training_loss(module, move_batch(module, precision.convert_input(batch)), index)
            except NoLossError as error:
                skipped = error
                continue
            total += float(loss) * size
            count += size
    if skipped is not None and not count:
        raise skipped
    return total / count if count else float("nan")


def sample_losses(
    module: LightningModule, batches: Iterable[Any], precision: Precision, *seed: object, gaps: bool = False
) -> Tensor:
    """Return the training loss of each sample, in eval mode and without gradients.

    The step sees one sample at a time, so any `training_step` will do: a loss that is a mean over the batch has no
    other way to tell them apart.

    Raises:
        NoLossError: If the step skips samples: all of them, where there may be gaps, which are NaN.
    """
    losses: list[Tensor] = []
    skipped = None
    with evaluating(module), torch.no_grad(), probing(module, precision, *seed):
        for index, batch in enumerate(batches):
            batch = move_batch(module, precision.convert_input(batch))
            for place in range(extract_batch_size(batch) or 1):
                sample = apply_to_collection(batch, Tensor, _sample, place)
                try:
                    losses.append(training_loss(module, sample, index).detach().reshape(()))
                except NoLossError as error:
                    losses.append(torch.tensor(torch.nan, device=module.device))
                    skipped = error
    stacked = torch.stack(losses).cpu().double() if losses else torch.empty(0, dtype=torch.float64)
    if skipped is not None and not (gaps and stacked.isfinite().any()):
        raise skipped
    return stacked


def _sample(values: Tensor, place: int) -> Tensor:
    """Cut one sample out of a batch; a number for the whole batch stays."""
    return values[place : place + 1] if values.dim() else values


def loss_scale(precision: Precision) -> float:
    """Return the present loss scale of the gradient scaler; 1.0 if there is none."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def batch_gradient(
    module: LightningModule,
    batch: Any,
    precision: Precision,
    *seed: object,
    update_buffers: bool = False,
    batch_idx: int = 0,
) -> tuple[Tensor, State]:
    """Return loss and gradient of one batch at the module's present parameters.

    Gradients are unscaled and in the parameter's dtype; the `.grad` fields are not touched. Under fp16 the loss is
    scaled for the backward pass as the run's scaler does.
    """
    trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    with torch.enable_grad(), probing(module, precision, *seed, update_buffers=update_buffers):
        loss = training_loss(module, batch, batch_idx)
        factor = loss_scale(precision)
        gradients = torch.autograd.grad(loss * factor, list(trainable.values()), allow_unused=True)
    return loss.detach(), {
        name: gradient / factor if factor != 1.0 else gradient
        for name, gradient in zip(trainable, map(dense, gradients), strict=True)
        if gradient is not None
    }


def mean_gradient(module: LightningModule, batches: Iterable[Any], precision: Precision, *seed: object) -> State:
    """Return the sample-weighted mean gradient at the module's present parameters, by name, in fp32 or a wider type.

    A batch that the step skips counts no more than in training.

    Raises:
        NoLossError: If it skips all of them.
    """
    total: State = {}
    count, skipped = 0, None
    for index, batch in enumerate(batches):
        size = extract_batch_size(batch) or 1
        batch = move_batch(module, precision.convert_input(batch))
        try:
            _, gradients = batch_gradient(module, batch, precision, *seed, index, batch_idx=index)
        except NoLossError as error:
            skipped = error
            continue
        for name, gradient in gradients.items():
            term = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)) * size
            total[name] = total[name] + term if name in total else term
        count += size
    if skipped is not None and not count:
        raise skipped
    return {name: value / count for name, value in total.items()}


def normalisation_statistics(
    module: LightningModule, batches: Iterable[Any], precision: Precision, *seed: object
) -> tuple[State, int]:
    """Return the mean of every BatchNorm layer's batch statistics, and the number of batches. Leaves no trace.

    All other layers are in eval mode. A batch of one sample has no variance and is left out.
    """
    layers = {
        path: layer
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    }
    if not layers:
        return {}, 0
    momenta = {path: layer.momentum for path, layer in layers.items()}
    count = 0
    try:
        with evaluating(module), untouched(module), torch.no_grad():
            for layer in layers.values():
                layer.train()
                layer.reset_running_stats()
                layer.momentum = None  # cumulative
            for index, batch in enumerate(batches):
                if extract_batch_size(batch) > 1:
                    with probing(module, precision, *seed, index, update_buffers=True):
                        training_loss(module, move_batch(module, precision.convert_input(batch)), index)
                    count += 1
            names = ("running_mean", "running_var")
            return {f"{path}.{name}": getattr(layers[path], name).cpu() for path in layers for name in names}, count
    finally:
        for path, layer in layers.items():
            layer.momentum = momenta[path]


@contextmanager
def at_state(
    module: LightningModule, state: Mapping[str, Tensor] | None, device: torch.device
) -> Iterator[LightningModule]:
    """Within the block the module is on a device and holds `state` (`None`: its own); afterwards it is as before."""
    home = module.device
    module.to(device)
    before = {} if state is None else clone({name: module_state(module)[name] for name in state})
    try:
        if state is not None:
            load_state(module, state)
        yield module
    finally:
        if state is not None:
            load_state(module, before)
        module.to(home)


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module; the CPU if it holds no tensor.

    Example:
        >>> device_of(nn.Linear(1, 1))
        device(type='cpu')
    """
    tensor = next(module.parameters(), next(module.buffers(), None))
    return torch.device("cpu") if tensor is None else tensor.device


def outputs(
    module: ModuleT,
    loader: Iterable[Any],
    forward: Callable[[ModuleT, Any], Tensor],
    device: torch.device,
    precision: Precision,
    *seed: object,
) -> Tensor:
    """Return the rows that `forward` gives for every batch, in eval mode and without gradients. Leaves no trace.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader, net = DataLoader(torch.ones(5, 2), 2), nn.Flatten()
        >>> rows = outputs(net, loader, lambda net, x: net(x), torch.device("cpu"), Precision())
        >>> rows.shape
        torch.Size([5, 2])
    """
    home, row_blocks = device_of(module), list[Tensor]()
    try:
        module.to(device)
        with (
            isolated(*seed), evaluating(module), muted(module), untouched(module), torch.no_grad(),
            precision.forward_context(),
        ):  # fmt: skip
            for batch in loader:
                batch = precision.convert_input(batch)
                if isinstance(module, LightningModule):
                    batch = move_batch(module, batch)
                else:
                    batch = move_data_to_device(batch, device)
                rows = forward(module, batch)
                if not isinstance(rows, Tensor) or rows.ndim == 0:
                    what = "a single number" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
                    raise ValueError(
                        f"outputs(forward=...) returned {what}; return a tensor with a row for each sample."
                    )
                row_blocks.append(rows.to("cpu", torch.promote_types(rows.dtype, torch.float32)))
    finally:
        module.to(home)
    return torch.cat(row_blocks) if row_blocks else torch.empty(0)
