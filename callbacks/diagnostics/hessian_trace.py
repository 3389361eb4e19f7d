"""Trace of the loss's Hessian, layer by layer, by Hutchinson's estimator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedlightning.algorithm import generator, probes
from fedlightning.callbacks.diagnostics.layer_values import (
    LayerRecorder,
    LayerValues,
    Reduce,
    at_rest,
    first_and_all,
    layer_order,
)
from fedlightning.callbacks.diagnostics.sensitivity_terms import counted_parameters, counts_of
from fedlightning.layers import Layer, ordered_layers
from fedlightning.ranges import Range, checked
from fedlightning.tensors import widen


class HessianTrace(LayerRecorder):
    r"""A recorder of the Hessian trace of each layer, with its standard error; works in any plain `lightning` Trainer.

    The Hessian is that of the mean loss over some fixed training batches at the parameters of the epoch's end. The trace
    of its diagonal block `H_i` of layer i is the sum of the block's eigenvalues. Hutchinson: :math:`z' H_i z` with
    independent signs z on the layer's own coordinates has the trace as its mean; the result is the mean over
    `num_probes` draws, with the standard error of that mean. (PLayer-FL's code sums the singular values of one product
    with a random unit vector, which is not a trace.) A trace may be negative: plot it on a linear or a symlog axis.

    A draw costs one backward pass of second order per layer and batch. A block that is diagonal has no error at all.

    Args:
        num_probes: Number of draws, 2 or more.
        num_batches: Number of training batches. `None` takes an epoch.
        per_parameter: Divides by the number of parameters (PLayer-FL's figures).
        weights_only: Leaves biases out.
        every_n_epochs: Records after every so many epochs.
        seed: Address of the draws, and of the batches that a shuffled loader gives.

    Raises:
        ValueError: If a number is too small.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning.pytorch.plugins.precision import Precision
        >>> from fedlightning.callbacks import HessianTrace
        >>> batch = torch.zeros(1, 32)  # leaves mean(b^2) of the two biases b, whose Hessian is the identity
        >>> class Squares(BoringModel):
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        >>> HessianTrace().measure(Squares(), [batch], Precision(), reduce=lambda value: value).values
        [2.0]
    """

    @checked
    def __init__(
        self,
        num_probes: Annotated[int, Range("[2, inf)", "Two make a standard error.")] = 10,
        num_batches: int | None = 1,
        per_parameter: bool = False,
        weights_only: bool = False,
        every_n_epochs: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(num_batches, every_n_epochs, weights_only, seed)
        self.num_probes = num_probes
        self.per_parameter = per_parameter

    def measure(
        self, module: LightningModule, batches: Iterable[Any], precision: Precision, reduce: Reduce
    ) -> LayerValues:
        """Return the traces of `module` on `batches`, which are on its device."""
        order, draws = hutchinson(
            module, batches, precision, self.seed, num_probes=self.num_probes, weights_only=self.weights_only
        )
        layers = ordered_layers(module, order)
        traces, errors = mean_and_error(reduce(draws))
        counts = counts_of(layers, counted_parameters(module, self.weights_only))
        if self.per_parameter:
            traces, errors = (
                [v / max(n, 1) for v, n in zip(values, counts, strict=True)] for values in (traces, errors)
            )
        return LayerValues(
            "hessian_trace" + ("_per_parameter" if self.per_parameter else ""),
            [layer.name for layer in layers],
            counts,
            traces,
            errors,
            settings={"weights_only": self.weights_only, "num_probes": self.num_probes},
        )


def mean_and_error(draws: Tensor) -> tuple[list[float], list[float]]:
    """Return the mean over draws `(num_probes, num_layers)` for each layer, and its standard error.

    Example:
        >>> mean_and_error(torch.tensor([[1.0], [3.0]]))
        ([2.0], [1.0])
    """
    error = draws.std(dim=0, correction=1) / math.sqrt(len(draws))
    return draws.mean(dim=0).tolist(), error.tolist()


def hutchinson(
    module: LightningModule,
    batches: Iterable[Any],
    precision: Precision,
    *seed: object,
    num_probes: int,
    weights_only: bool = False,
    order: list[str] | None = None,
) -> tuple[list[str], Tensor]:
    """Return draws of `z' H_i z` for each layer i, where H is the Hessian of the mean loss over `batches`.

    The module is in eval mode, attention in its plain form (fused kernels have no second derivative). Parameters,
    `.grad` fields, buffers and generators are afterwards as before. A draw has the same signs on every batch and on
    every device.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> order, draws = hutchinson(BoringModel(), [torch.ones(4, 32)], Precision(), "seed", num_probes=3)
        >>> order, tuple(draws.shape)
        (['layer'], (3, 1))
    """
    first, batches = first_and_all(batches)
    if order is None:
        order = layer_order(module, first, precision, *seed)
    layers = ordered_layers(module, order)
    counted = counted_parameters(module, weights_only)
    blocks = [{name: counted[name] for name in layer.parameters if name in counted} for layer in layers]
    total = widen(torch.zeros(num_probes, len(layers), device=module.device))
    samples = 0
    with at_rest(module), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        for index, batch in enumerate(batches):
            size = extract_batch_size(batch) or 1
            samples += size
            with probes.probing(module, precision, *seed, index):
                loss = probes.training_loss(module, batch, index)
                total += size * _draws(loss, layers, blocks, num_probes, *seed)
    return order, total / samples


def _draws(
    loss: Tensor, layers: Sequence[Layer], blocks: Sequence[Mapping[str, nn.Parameter]], num_probes: int, *seed: object
) -> Tensor:
    """`z' H_i z` of one loss: the graph of its gradient is made once, and differentiated for each layer and draw."""
    parameters = {name: parameter for block in blocks for name, parameter in block.items()}
    gradients: dict[str, Tensor | None] = dict.fromkeys(parameters)
    if parameters:
        derivatives = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
        gradients = dict(zip(parameters, derivatives, strict=True))
    draws = widen(loss.new_zeros(num_probes, len(layers)))
    for column, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        curved = {n: g for n in block if (g := gradients[n]) is not None and g.requires_grad}  # others are constant
        for row in range(num_probes if curved else 0):
            z = _signs({name: block[name] for name in curved}, *seed, "signs", layer.name, row)
            products = _second_derivative(list(curved.values()), [block[name] for name in curved], list(z.values()))
            curvatures = [
                (widen(p) * widen(s)).sum() for p, s in zip(products, z.values(), strict=True) if p is not None
            ]
            if curvatures:
                draws[row, column] = torch.stack(curvatures).sum()
    return draws


def _second_derivative(
    gradients: list[Tensor], parameters: list[nn.Parameter], z: list[Tensor]
) -> tuple[Tensor | None, ...]:
    try:
        return torch.autograd.grad(gradients, parameters, grad_outputs=z, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "derivative" not in str(error) and "double backward" not in str(error):
            raise
        raise ValueError(
            f"The Hessian trace needs second derivatives, which an operation of this module does not have: "
            f"{str(error).rstrip('.')}. Leave the Hessian trace out, or use an implementation that has them."
        ) from error


def _signs(parameters: Mapping[str, nn.Parameter], *seed: object) -> dict[str, Tensor]:
    """Independent signs shaped as `parameters`, drawn on the CPU: the same on every device."""
    draw = generator(*seed)
    return {
        name: (2 * torch.randint(2, p.shape, generator=draw) - 1).to(device=p.device, dtype=p.dtype)
        for name, p in parameters.items()
    }
