"""Gradients of single records or groups, clipped and covered with noise: one fit's part of DP-SGD, by Opacus' hooks."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from fedlightning.algorithm import detached_copy, missing_package, probes
from fedlightning.callbacks.shared.poisson_batches import PoissonBatches
from fedlightning.callbacks.shared.secret_noise import digest_of, normal, uniform
from fedlightning.tensors import as_reals, narrow

CLOSE = 1e-3
"""Relative difference up to which two ways to the same gradient agree in float32."""
COARSE = 5e-2
"""The same in bfloat16."""
ROUNDING = 1e-5
"""By how much less than the bound a clipped gradient is long, so that no rounding takes it beyond."""
MIN_LENGTH = 1e-13
"""Length of a factor below which single precision loses the squares that it is made of: it counts as so long."""
CHUNK = 4096
"""Numbers whose squares are added up in single precision: of more, the length would come out too short."""
TRIED = 3
"""Records of a batch whose gradients are compared with those that each has alone."""
HUGE = 1e15
"""Length of a factor beyond which the product of two, cut to the bound, could lose more than that to single precision."""


@dataclass(frozen=True)
class Samples:
    """Gradients of the records of a batch for one parameter.

    Those of an `nn.Linear` that sees one row of each record are outer products, which are never multiplied out: their lengths
    and sums follow from the factors (Goodfellow, "Efficient per-example gradient computations", 2015, arXiv:1510.01799).

    16-bit numbers are widened here: rounded lengths and sums would let a record move more than the bound.

    Attributes:
        left: Gradients, shape (records, ...), or their first factors, shape (records, outputs).
        right: The second factors, shape (records, inputs); `None`: they are multiplied out.
    """

    left: Tensor
    right: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.left)

    def lengths(self) -> Tensor:
        """Return the length of each record's gradient, in float64; infinity where a factor is beyond what sums can hold."""
        left = _lengths(_rows(self.left))
        if self.right is None:
            return left
        right = _lengths(_wide(self.right))
        product = left.clamp(min=MIN_LENGTH) * right.clamp(min=MIN_LENGTH)
        return torch.where(left.maximum(right) > HUGE, math.inf, product)

    def total(self, factor: Tensor) -> Tensor:
        """Return the sum of the gradients times a factor of each record; those of factor 0 have no part, even if infinite."""
        there, shape = factor != 0, self.left.shape[1:]
        chosen = slice(None) if there.all() else there
        left, factor = _rows(self.left[chosen]), factor[chosen]
        if self.right is None:
            return (factor.to(left) @ left).reshape(shape)
        return (left * factor.to(left)[:, None]).T @ _wide(self.right[chosen])

    def dense(self, most: int | None = None) -> Tensor:
        """Return the gradients, shape (records, ...), of the first records if need be."""
        left = _wide(self.left[:most])
        return left if self.right is None else left[:, :, None] * _wide(self.right[:most])[:, None, :]


def _rows(samples: Tensor) -> Tensor:
    """Return what each record has in a row of its own."""
    return _wide(samples).reshape(len(samples), samples.shape[1:].numel())


def _lengths(rows: Tensor) -> Tensor:
    """Return the lengths of rows, in float64."""
    whole = rows.shape[1] // CHUNK * CHUNK
    if not whole:
        return rows.norm(dim=1).double()
    parts = rows[:, :whole].unflatten(1, (-1, CHUNK)).norm(dim=2)
    return torch.cat([parts, rows[:, whole:].norm(dim=1, keepdim=True)], dim=1).double().norm(dim=1)


@dataclass(eq=False, repr=False)
class RecordGradients:
    """Per-record gradients of a module, and the private gradient that is made of them.

    Args:
        module: The module, to which Opacus' hooks are attached until :meth:`close`; it stays what it is.
        sampler: What has drawn the batches.
        clip: The most that a record's gradient may be long.
        noise_multiplier: Standard deviation of the noise over `clip`.
        secret: What nobody else knows.
        address: What the noise is for.
        room: Steps for which the budget has room.
        began: What the fit began with (:func:`all_of`); `None`: as the module is now.
    """

    module: LightningModule
    sampler: PoissonBatches
    clip: float
    noise_multiplier: float
    secret: str
    address: str
    room: int
    began: InitVar[Began | None] = None

    def __post_init__(self, began: Began | None) -> None:
        self.steps = self.size = 0
        self._due = False
        self._owners: np.ndarray | None = None
        self._place = (0, 0)  # epoch and batch: after a resume in the middle of an epoch batch_idx says something else
        self._looked_at: set[int] = set()
        self._tried_epoch = -1  # the last epoch of which a batch was tried
        self._after_step, self._before = began or all_of(self.module)  # the first is what the last step has left
        self._hooks = hooks_on(self.module)
        self._released = hashlib.sha256(self.secret.encode())

    @property
    def released(self) -> str:
        """A name of all that the steps have released: the same for the same bits."""
        return self._released.hexdigest()[:24]

    @property
    def counted(self) -> tuple[float, float, int]:
        """Noise multiplier, rate and number of the steps taken."""
        return self.noise_multiplier, self.sampler.rate, self.steps

    def begin(self) -> None:
        """Take note of the batch whose step begins, and forget the gradients of the last one."""
        epoch, place = self._place
        place = place if epoch == self.sampler.epoch else 0
        if self.sampler.epoch != epoch + (place == 0):
            raise ValueError(
                f"The training batches of {type(self.module).__name__} were iterated beside its steps, and noise covers "
                "steps only: weights of classes or statistics made of them would tell of records. Make these of other data."
            )
        self.size, self._place, self._due = self.sampler.sizes[place], (self.sampler.epoch, place + 1), True
        self._owners = self.sampler.owners[place] if self.sampler.owners else None
        self._hooks.set_grad_sample_to_none()
        self.refuse_moved()

    def try_batch(self, batch: Any, owner: str, share: float) -> None:
        """Try records of one random batch of an epoch: a step may begin to mix them later, or where they are many.

        Args:
            batch: The batch whose step begins.
            owner: Who asks.
            share: Probability with which an epoch has such a batch.

        Raises:
            ValueError: If it mixes them.
        """
        epoch, place = self._place
        coins = uniform(self.secret, f"{self.address}|tried in epoch {epoch}", 2)
        first = coins[0] * min(self.sampler.batches, self.room)
        if self._tried_epoch == epoch or place <= first or self.size < 2 or coins[1] > share:
            return
        self._tried_epoch = epoch
        self.close()  # a module with hooks cannot be copied
        refuse_mixed_records(self.module, batch, owner, trainer=self.module.trainer)
        self._hooks = hooks_on(self.module)

    def end(self) -> None:
        """See that the batch that ends was covered.

        Raises:
            ValueError: If a step went past Lightning's hooks.
        """
        self._after_step = trained_by(self.module)
        if self._due:
            raise ValueError(
                f"A batch ended without the step that is covered with noise: optimizer_step of {type(self.module).__name__} "
                "goes past Lightning's hooks, or training_step returned no loss. Call optimizer.step(closure) for each batch."
            )

    def refuse_moved(self) -> None:
        """Refuse what has moved parameters since the last step, or buffers since the first: they would tell of records.

        Raises:
            ValueError: With the name of one.
        """
        moved = (name for name, now, before in self._after_step if not torch.equal(now, before.to(now.device)))
        if name := next(moved, None):
            raise ValueError(
                f"'{name}' has moved without a step of the optimizer, and noise covers steps only: a hook of "
                f"{type(self.module).__name__} or a callback writes into it. Leave that to the optimizer."
            )
        refuse_changed(self.module, self._before)

    @torch.no_grad()
    def privatise(self, optimizer: Any) -> None:
        """Put the private gradient in place of the gradient of everything that the optimizer trains.

        Raises:
            ValueError: If the budget has no room for it, it is the second one of a batch, or the gradient has parts that are
                of no single record.
        """
        if not self._due:
            raise ValueError(
                f"{type(optimizer).__name__} asked for a second gradient of one batch (LBFGS, SAM): a batch is drawn, and "
                "counted, for one. Use an optimizer that takes one."
            )
        self._due = False
        self.refuse_moved()
        if self.steps >= self.room:
            raise ValueError(f"The budget has room for {self.room} steps of this fit, and this is one more.")
        chosen = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        records = max(self.size, 1)
        samples = [_samples_of(self._hooks, parameter, records) for parameter in chosen]
        fresh = {id(parameter) for parameter in chosen} - self._looked_at  # a callback may unfreeze some later
        if fresh and self.size:
            refuse_other_parts(self.module, chosen, samples)
            self._looked_at |= fresh
        samples = [self._by_unit(gradients) for gradients in samples]
        norms = torch.stack([gradients.lengths() for gradients in samples] or [torch.zeros(1)])
        factor = _factors(norms.square().sum(0).sqrt(), self.clip, self.size)
        self._cover(chosen, [gradients.total(factor) for gradients in samples])
        self._hooks.set_grad_sample_to_none()
        self.steps += 1

    def _by_unit(self, samples: Samples) -> Samples:
        """Return the mean gradient of each group of the batch, instead of those of records."""
        if self._owners is None or not self.size:
            return samples
        of_records = samples.dense()
        owners = torch.from_numpy(self._owners).to(of_records.device)
        counts = torch.bincount(owners).to(of_records).reshape(-1, *[1] * (of_records.dim() - 1))
        return Samples(torch.zeros_like(of_records[: len(counts)]).index_add(0, owners, of_records) / counts)

    def _cover(self, chosen: list[nn.Parameter], sums: list[Tensor]) -> None:
        """Add the noise, which is bound to what it covers: two sums never share theirs."""
        digest = digest_of(sums)
        address = f"{self.address}|step {self.steps}|{digest}"
        self._released.update(address.encode())
        expected = self.sampler.units * self.sampler.rate
        for index, (parameter, total) in enumerate(zip(chosen, sums, strict=True)):
            noise = normal(self.secret, f"{address}|{index}", total.shape).mul_(self.noise_multiplier * self.clip)
            parameter.grad = narrow(noise.to(total.device).add_(total).div_(expected), parameter)

    def close(self) -> None:
        """Take the hooks off the module."""
        self._hooks.cleanup()


def refuse_other_parts(module: LightningModule, chosen: Sequence[nn.Parameter], samples: Sequence[Samples]) -> None:
    """Refuse a gradient that is not the mean of the gradients of records: the rest would be lost.

    Raises:
        ValueError: With the name of the parameter.
    """
    for parameter, rows in zip(chosen, samples, strict=True):
        whole = as_reals(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        mean = rows.total(torch.full((len(rows),), 1.0 / len(rows), device=whole.device)).to(rows.left.dtype)
        if not _close(mean, whole):
            name = next(name for name, value in module.named_parameters() if value is parameter)
            raise ValueError(
                f"The gradient of '{name}' has a part that is of no single record, and would be lost: a penalty on weights "
                "(use weight_decay of the optimizer), a parameter that is used outside of its layer, or a second model."
            )


def trained_by(module: LightningModule) -> list[tuple[str, nn.Parameter, Tensor]]:
    """Return names of the parameters that train, themselves, and copies of them."""
    return [(name, p, p.detach().clone()) for name, p in module.named_parameters() if p.requires_grad]


Began = tuple[list[tuple[str, nn.Parameter, Tensor]], dict[str, Tensor]]


def all_of(module: LightningModule) -> Began:
    """Return what trains, and copies of the buffers."""
    return trained_by(module), {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def refuse_changed(module: LightningModule, before: dict[str, Tensor]) -> None:
    """Refuse buffers that a step changes: what they know of records has no noise.

    Raises:
        ValueError: With the name of the buffer.
    """
    for name, buffer in module.named_buffers():
        pair = (torch.nan_to_num(values.to(buffer)) for values in (before.get(name, buffer), buffer))
        if not torch.equal(*pair):
            raise ValueError(
                f"Training changes the buffer '{name}', and noise covers gradients only: what the buffer has of records "
                "would leave as it is. Leave it out, or, if it counts steps only, make it an attribute that is not a buffer."
            )


def hooks_on(module: LightningModule) -> Any:
    """Attach Opacus' hooks to a module.

    Raises:
        ValueError: If a layer mixes records, or Opacus is not there.
    """
    try:
        from opacus.grad_sample import functorch
        from opacus.grad_sample.grad_sample_module import GradSampleHooks
        from opacus.validators import ModuleValidator
        from opacus.validators.errors import UnsupportedModuleError
    except ImportError as error:
        raise ValueError(missing_package("Gradients of single records are made by Opacus", "privacy")) from error
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of the first layer, whose hook is right
    was_training, module.training = module.training, True
    try:
        problems = ModuleValidator.validate(module, strict=False)
    finally:
        module.training = was_training
    renormed = [name for name, part in module.named_modules() if getattr(part, "max_norm", None) is not None]
    if renormed:
        raise ValueError(
            f"'{renormed[0]}' has max_norm: it changes the rows that a batch looks up, which tells who was in it, without "
            "noise. Leave max_norm out."
        )
    kernels = _right_for_options(GradSampleHooks.GRAD_SAMPLERS, functorch.ft_compute_per_sample_gradient)

    class Hooks(GradSampleHooks):
        factors: ClassVar[Factors] = {}
        GRAD_SAMPLERS = kernels | {nn.Linear: _in_factors(kernels[nn.Linear], factors, _of_one_layer(module))}

        def set_grad_sample_to_none(self) -> None:
            self.factors.clear()
            super().set_grad_sample_to_none()

    try:
        if problems:
            raise problems[0]
        # Else Opacus passes over them; parts that are not trained stay in the mode that they are in.
        for layer in filter(_is_trained, module.modules()):
            layer.training = True
        for layer in filter(_has_other_options, module.modules()):
            functorch.prepare_layer(layer)  # before it keeps what it has seen, which cannot be copied
        return Hooks(module, loss_reduction="mean", strict=True)
    except (NotImplementedError, UnsupportedModuleError) as error:
        raise ValueError(
            f"SampleDP needs the gradient of each record, and Opacus cannot tell them apart: {error} "
            "(opacus.validators.ModuleValidator.fix(module) may replace such layers)."
        ) from error


def _is_trained(layer: nn.Module) -> bool:
    """Return whether parameters of a layer's own are trained."""
    return any(parameter.requires_grad for parameter in layer.parameters(recurse=False))


def _has_other_options(layer: nn.Module) -> bool:
    """Return whether Opacus' kernel for such a layer, if it trains, is wrong for its options; its `forward` is right."""
    if not _is_trained(layer):
        return False
    if isinstance(layer, nn.LayerNorm):
        return layer.bias is None
    return getattr(layer, "padding_mode", "zeros") != "zeros"


Factors = dict[Tensor, list[tuple[Tensor, Tensor]]]
"""For the weight of each `nn.Linear`, gradients of its outputs and its inputs, for each of its calls in a step."""


def _of_one_layer(module: nn.Module) -> set[Tensor]:
    """Return the parameters that are in one layer only, and real."""
    places = [p for layer in module.modules() for p in layer.parameters(recurse=False)]
    return {p for p in places if not p.is_complex() and sum(p is other for other in places) == 1}


def _in_factors(kernel: Callable[..., Any], factors: Factors, of_one_layer: set[Tensor]) -> Callable[..., Any]:
    """Return a kernel of `nn.Linear` that keeps the factors of a weight's gradients, and tells Opacus how many there are."""

    def of_linear(layer: nn.Linear, inputs: Sequence[Tensor], outputs: Tensor) -> dict[Tensor, Tensor]:
        if layer.weight not in of_one_layer or not layer.weight.requires_grad:
            samples: dict[Tensor, Tensor] = kernel(layer, inputs, outputs)
            return samples
        factors.setdefault(layer.weight, []).append((outputs, inputs[0].to(outputs.dtype)))
        samples = {layer.weight: outputs.new_zeros(len(outputs), 0)}
        if layer.bias is not None and layer.bias.requires_grad:
            samples[layer.bias] = outputs.flatten(1, -2).sum(1) if outputs.dim() > 2 else outputs
        return samples

    return of_linear


def _right_for_options(kernels: dict[Any, Any], by_forward: Callable[..., Any]) -> dict[Any, Any]:
    """Return Opacus' kernels by type of layer, right where they pass over an option of the layer.

    Args:
        kernels: Opacus' own.
        by_forward: What takes the gradients of records by a layer's `forward`: slower, and right for all options.
    """

    def of_embedding(layer: nn.Embedding, *inputs: Any) -> dict[nn.Parameter, Tensor]:
        samples: dict[nn.Parameter, Tensor] = kernels[nn.Embedding](layer, *inputs)
        for rows in samples.values() if layer.padding_idx is not None else ():
            rows[:, layer.padding_idx] = 0.0  # torch gives this row no gradient
        return samples

    def of_layer(layer: nn.Module, *inputs: Any) -> Any:
        return (by_forward if _has_other_options(layer) else kernels[type(layer)])(layer, *inputs)

    kinds = dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm), of_layer)
    return {**kernels, **kinds, nn.Embedding: of_embedding}


def refuse_mixed_records(
    module: LightningModule, batch: Any, owner: str, alone: Sequence[Any] | None = None, trainer: Trainer | None = None
) -> None:
    """See that the gradient of a record in a batch is that of the record alone.

    A loss over pairs of records, a sum instead of a mean, or a batch that is not the first dimension would each make
    clipping meaningless.

    Args:
        module: The module; nothing of it is changed.
        batch: A batch on its device.
        owner: Who asks.
        alone: The first records, each as a batch of its own; default: cut from the batch.
        trainer: The Trainer of a fit that goes on, which the module may ask for its epoch.

    Raises:
        ValueError: Saying what differs.
    """
    count = extract_batch_size(batch) or 1
    tried = _moved_a_little(module)
    if trainer is not None:
        tried.trainer = trainer
    trainable = [parameter for parameter in tried.parameters() if parameter.requires_grad]
    _, before = all_of(tried)
    try:
        with torch.enable_grad(), probes.probing(tried, Precision(), 0, "records"):
            hooks = hooks_on(tried)
            most = min(count, TRIED if alone is None else len(alone))
            together = _gradients(tried, hooks, trainable, batch, count, most)
            refuse_other_parts(tried, trainable, [_samples_of(hooks, parameter, count) for parameter in trainable])
            refuse_changed(tried, before)
            for place in range(most):
                one_record = apply_to_collection(batch, Tensor, _cut, place, count) if alone is None else alone[place]
                single = _gradients(tried, hooks, trainable, one_record, 1, 1)
                scale = max(float(gradient.norm()) for gradient in single)
                if any(float((a[place] - b[0]).norm()) > CLOSE * scale for a, b in zip(together, single, strict=True)):
                    raise ValueError(
                        f"{owner} clips the gradient of each record, and {type(module).__name__}.training_step gives one "
                        "another gradient in a batch than alone. Its loss must be the mean over records, in the first "
                        "dimension, of what each gives by itself; collate_fn must not mix them, nor pad what the loss sees."
                    )
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"Opacus cannot take the gradients of single records of {type(module).__name__} apart: {error} Parameters have "
            "to be in layers of torch.nn, each called in the step; one that a wrapper changes stands in an nn.Sequential."
        ) from error


def _moved_a_little(module: LightningModule) -> LightningModule:
    """Return a copy in training mode without dropout, with other parameters: two equal ones, or zeros, would hide a term."""
    moved = detached_copy(module)
    if not moved.training:  # else its parts are in the modes of training already, which need not be the same
        moved.train()
    for part in moved.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.requires_grad:
                numbers = as_reals(parameter)
                numbers.add_(0.01 * torch.randn(numbers.shape, generator=draw).to(numbers))
    return moved


def _gradients(
    module: LightningModule, hooks: Any, trainable: list[nn.Parameter], batch: Any, count: int, most: int
) -> list[Tensor]:
    """Return the gradients of the first records of a batch."""
    hooks.set_grad_sample_to_none()
    module.zero_grad()
    probes.training_loss(module, batch).backward()
    return [_samples_of(hooks, parameter, count).dense(most).clone() for parameter in trainable]


def _cut(values: Tensor, place: int, count: int) -> Tensor:
    return values[place : place + 1] if values.dim() and len(values) == count else values


def _samples_of(hooks: Any, parameter: nn.Parameter, records: int) -> Samples:
    """Return the gradients of the records for a parameter, in real numbers; zeros if the step has not used it.

    Raises:
        ValueError: If there are not as many as records.
    """
    grad_sample = getattr(parameter, "grad_sample", None)
    if isinstance(grad_sample, list):
        raise ValueError("A step went backward several times. Gradients of single records need one backward pass.")
    if grad_sample is not None and len(grad_sample) != records:
        raise ValueError(
            f"A layer has seen {len(grad_sample)} rows in a step of {records} records. Gradients of single records need "
            "layers whose first dimension is the batch: keep sequences in the second."
        )
    if grad_sample is None:
        return Samples(torch.zeros(records, *as_reals(parameter).shape, device=parameter.device))
    factors = hooks.factors.get(parameter, ())
    if len(factors) == 1 and factors[0][0].dim() == 2:
        return Samples(*factors[0])
    products = [torch.einsum("n...i,n...j->nij", left, right) for left, right in factors]
    return Samples(sum(products[1:], start=products[0]) if products else as_reals(grad_sample))


def _wide(values: Tensor) -> Tensor:
    """Return 16-bit numbers in float32."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _factors(norms: Tensor, clip: float, size: int) -> Tensor:
    """Return by what each record's gradient is multiplied: 0 for one that is not finite, and in a batch of nobody."""
    if not size:
        return torch.zeros_like(norms)
    bound = clip * (1.0 - ROUNDING)
    factor = torch.where(torch.isfinite(norms), bound / norms.clamp(min=bound), 0.0)
    return factor.masked_fill(factor < torch.finfo(torch.float32).tiny, 0.0)  # which single precision would round away


def _close(first: Tensor, second: Tensor) -> bool:
    limit = COARSE if torch.bfloat16 in (first.dtype, second.dtype) else CLOSE
    difference = float((_wide(first) - _wide(second)).norm())
    return not difference > limit * max(float(_wide(second).norm()), 1e-6)  # NaN: the update is refused elsewhere
