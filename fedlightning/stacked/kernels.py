"""Linear layers and losses of a whole stack, by the kernels that are fast for it.

Under :func:`torch.func.vmap` a loss such as cross entropy is decomposed into many small operations, and a linear layer
becomes a batched product in an arbitrary layout. Within :class:`StackKernels` these functions step out of the map, work
on the stacked tensors `(clients, batch, ...)`, and step back in. Values and gradients are those of the plain functions
up to the rounding of sums in another order. Cases without a rule are left to `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedlightning.stacked.map import on_stack

REGISTER = 16
"""Single-precision numbers in a CPU's widest register. Kernels fill registers along the last axis of their result."""


def padding(length: int) -> float:
    """Return the factor by which an axis grows when it is filled up to whole registers: 1 is best."""
    return -(-length // REGISTER) * REGISTER / max(length, 1)


class StackLinear(torch.autograd.Function):
    """`x @ weight^T + bias` for a stack.

    On a CPU the result lies in memory as `(clients, out, m)` where that fills registers better. The gradient of the
    weight is taken in the weight's own layout, which for few outputs is four times as fast as autograd's transposed
    one.

    Shapes:
        x: `(clients, m, in)`.
        weight: `(clients, out, in)`.
        bias: `(clients, out)`, or `None`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cpu" and padding(weight.shape[1]) > padding(x.shape[1]):
            factors, axis = (weight, x.transpose(1, 2)), 2
        else:
            factors, axis = (x, weight.transpose(1, 2)), 1
        out = torch.bmm(*factors) if bias is None else torch.baddbmm(bias.unsqueeze(axis), *factors)
        return out.transpose(1, 2) if axis == 2 else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if of_x else None,
            torch.bmm(grad.transpose(1, 2), x) if of_weight else None,
            grad.sum(1) if of_bias else None,
        )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Apply :func:`torch.nn.functional.linear`; not under autocast, whose casts a backward would have to repeat."""
    alike = input.dtype == weight.dtype and (bias is None or bias.dtype == input.dtype)
    if input.dim() < 2 or not alike or torch.is_autocast_enabled(input.device.type):
        return None

    def act(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = StackLinear.apply(x.flatten(1, -2), weight, bias)
        return out.unflatten(1, x.shape[1:-1]) if x.dim() > 3 else out

    return on_stack(act, (input, weight) if bias is None else (input, weight, bias))


def class_loss(
    function: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    **options: Any,
) -> Tensor | None:
    """Apply a loss for class numbers: cross entropy or negative log-likelihood.

    `function` gives every sample's loss, natively. The mean of a client divides by the weights of its samples that
    count.
    """
    plain = reduction in ("none", "mean", "sum") and not target.is_floating_point()
    if input.dim() < 2 or not plain or torch.is_autocast_enabled(input.device.type):
        return None

    def act(x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        options["weight"] = weight
        if x.dim() == 3 and narrow(x, 2):
            losses = function(x.transpose(1, 2), target, ignore_index=ignore_index, reduction="none", **options)
        else:
            each = function(
                x.flatten(0, 1), target.flatten(0, 1), ignore_index=ignore_index, reduction="none", **options
            )
            losses = each.view(target.shape)
        if reduction == "none":
            return losses
        total = losses.flatten(1).sum(1)
        if reduction == "sum":
            return total
        counts = (target != ignore_index).flatten(1)
        if weight is None:
            return total / counts.sum(1)
        weights = weight[target.flatten(1).where(counts, 0)]
        return total / (weights * counts).sum(1)

    return on_stack(act, (input, target), () if weight is None else (weight,))


def narrow(x: Tensor, axis: int) -> bool:
    """Return True if rows along the last axis are so short that one sweep over all rows is faster than one for each."""
    return axis in (x.dim() - 1, -1) and x.device.type == "cpu" and x.shape[-1] < REGISTER


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Apply :func:`torch.nn.functional.cross_entropy`; probabilities as targets are left to `vmap`."""
    if size_average is not None or reduce is not None:
        return None
    return class_loss(F.cross_entropy, input, target, weight, ignore_index, reduction, label_smoothing=label_smoothing)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor | None:
    """Apply :func:`torch.nn.functional.nll_loss`."""
    if size_average is not None or reduce is not None:
        return None
    return class_loss(F.nll_loss, input, target, weight, ignore_index, reduction)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor | None:
    """Apply :func:`torch.nn.functional.binary_cross_entropy_with_logits` without weights."""
    if any(option is not None for option in (weight, size_average, reduce, pos_weight)):
        return None
    if reduction not in ("none", "mean", "sum") or torch.is_autocast_enabled(input.device.type):
        return None

    def act(x: Tensor, target: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(x, target, reduction="none")
        if reduction == "none":
            return losses
        return losses.flatten(1).mean(1) if reduction == "mean" else losses.flatten(1).sum(1)

    return on_stack(act, (input, target))


def log_softmax(input: Tensor, dim: int | None = None, *_: Any, **options: Any) -> Tensor | None:
    """Apply :func:`torch.nn.functional.log_softmax` for few classes: all rows of a client in one sweep."""
    if dim is None or input.dim() != 2 or not narrow(input, dim) or options.get("dtype") is not None:
        return None
    return torch.log_softmax(input.t(), 0).t()


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """Apply :func:`torch.nn.functional.embedding` with padding.

    Under torch's own map, the padding row would get no gradient for the first client only.
    """
    if padding_idx is None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    found = F.embedding(input, weight)
    return found.where((input != padding_idx % weight.shape[0]).unsqueeze(-1), found.detach())


RULES: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.linear: linear,
    F.embedding: embedding,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.binary_cross_entropy_with_logits: binary_cross_entropy_with_logits,
    F.log_softmax: log_softmax,
}
"""By function of torch, its rule: returns the result on the whole stack, or `None` to leave the case to `vmap`."""


class StackKernels(TorchFunctionMode):
    """Context in which the functions of :data:`RULES` work on the whole stack of a `vmap` at once."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        result = None if rule is None else rule(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result
