"""Gradient variance of each layer, in both senses in which the term is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from fedlightning.algorithm import State, probes
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
from fedlightning.ranges import checked
from fedlightning.tensors import widen

Definition = Literal["grad_var_samples", "grad_var_params"]


class GradientVariance(LayerRecorder):
    r"""A recorder of the gradient variance of each layer; works in any plain `lightning.pytorch.Trainer`.

    Two quantities have that name; do not mix them in one plot. With mini-batch gradients g_b at the parameters of the
    epoch's end and their mean g (both weighted by samples, which changes nothing for equal batches):

    * `"grad_var_samples"`: :math:`\frac1B \sum_b \|g_b - g\|^2` over the layer's coordinates: the noise of the
      gradient (Jiang et al., "Fantastic generalization measures and where to find them", 2019). It falls with the
      batch size.
    * `"grad_var_params"`: :math:`\frac1n \sum_j (g_j - \bar g)^2` over the n entries of the layer's mean gradient:
      how uneven it is (Elhussein and Gürsoy, "PLayer-FL", 2025, equation A.1; the population variance).

    Scaling the loss by s scales both by s^2.

    Args:
        definition: `"grad_var_samples"` or `"grad_var_params"`.
        per_parameter: Divides by the number of parameters (the mean over coordinates of the first; for the second what
            PLayer-FL's text, not its equation, says).
        num_batches: Number of training batches. `None` takes an epoch.
        weights_only: Leaves biases out.
        every_n_epochs: Records after every so many epochs.
        seed: Address of the batches that a shuffled loader gives.

    Raises:
        ValueError: If `definition` is unknown, or a number is below 1.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning.pytorch.plugins.precision import Precision
        >>> from fedlightning.callbacks import GradientVariance
        >>> twice = [torch.ones(1, 32)] * 2  # equal batches have equal gradients
        >>> GradientVariance().measure(BoringModel(), twice, Precision(), reduce=lambda value: value).values
        [0.0]
    """

    @checked
    def __init__(
        self,
        definition: Definition = "grad_var_samples",
        per_parameter: bool = False,
        num_batches: int | None = None,
        weights_only: bool = False,
        every_n_epochs: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(num_batches, every_n_epochs, weights_only, seed)
        self.definition: Definition = definition
        self.per_parameter = per_parameter

    def measure(
        self, module: LightningModule, batches: Iterable[Any], precision: Precision, reduce: Reduce
    ) -> LayerValues:
        """Return the variances of `module` on `batches`, which are on its device."""
        moments = gradient_moments(module, batches, precision, self.seed, weights_only=self.weights_only).over(reduce)
        layers = ordered_layers(module, moments.order)
        values = moments.over_params(layers) if self.definition == "grad_var_params" else moments.over_samples(layers)
        layer_values = LayerValues(
            self.definition + ("_per_parameter" if self.per_parameter else ""),
            [layer.name for layer in layers],
            counts_of(layers, moments.mean),
            values,
            settings={"weights_only": self.weights_only, "batches": moments.batches},
        )
        if self.per_parameter:
            layer_values.values = layer_values.per_parameter
        return layer_values


@dataclass
class GradientMoments:
    """Mean and spread of mini-batch gradients at one point, both weighted by samples.

    Attributes:
        order: Pieces of the module as a forward pass calls them.
        mean: Mean gradient by parameter name, in float64, on the module's device.
        spread: `sum_b w_b ||g_b - mean||^2 / sum_b w_b` by parameter name.
        batches: Number of batches in this process.
    """

    order: list[str]
    mean: State
    spread: dict[str, Tensor]
    batches: int

    def over(self, reduce: Reduce) -> GradientMoments:
        """Return the moments of the batches of all processes, each of which has as many samples."""
        mean = {name: reduce(value.clone()) for name, value in self.mean.items()}
        between = {name: (value - mean[name]).square().sum() for name, value in self.mean.items()}
        spread = {name: reduce(value + between[name]) for name, value in self.spread.items()}
        return GradientMoments(self.order, mean, spread, self.batches)

    def over_samples(self, layers: Sequence[Layer]) -> list[float]:
        """Return `grad_var_samples` of each layer."""
        return [sum(float(self.spread[name]) for name in self._counted(layer)) for layer in layers]

    def over_params(self, layers: Sequence[Layer]) -> list[float]:
        """Return `grad_var_params` of each layer; 0 where nothing trains."""
        return [_population_variance([self.mean[name] for name in self._counted(layer)]) for layer in layers]

    def _counted(self, layer: Layer) -> list[str]:
        return [name for name in layer.parameters if name in self.mean]


def _population_variance(parts: Sequence[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).var(correction=0)) if parts else 0.0


def gradient_moments(
    module: LightningModule,
    batches: Iterable[Any],
    precision: Precision,
    *seed: object,
    weights_only: bool = False,
    order: list[str] | None = None,
) -> GradientMoments:
    """Return the moments of the gradients of `batches` at the module's present parameters; leaves no trace.

    One pass, by Welford's recursion: no difference of large numbers, and equal batches have a spread of exactly 0.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> module = BoringModel()
        >>> moments = gradient_moments(module, [torch.ones(1, 32), -torch.ones(1, 32)], Precision())
        >>> moments.batches, {name: tuple(mean.shape) for name, mean in moments.mean.items()}
        (2, {'layer.weight': (2, 32), 'layer.bias': (2,)})
    """
    first, batches = first_and_all(batches)
    if order is None:
        order = layer_order(module, first, precision, *seed)
    counted = counted_parameters(module, weights_only)
    mean = {name: torch.zeros_like(widen(parameter.detach())) for name, parameter in counted.items()}
    spread = {name: value.new_zeros(()) for name, value in mean.items()}
    samples, index = 0, -1
    with at_rest(module):
        for index, batch in enumerate(batches):
            size = extract_batch_size(batch) or 1
            samples += size
            _, gradients = probes.batch_gradient(module, batch, precision, *seed, index, batch_idx=index)
            _add(mean, spread, gradients, size, samples)
    return GradientMoments(order, mean, {name: value / samples for name, value in spread.items()}, index + 1)


def _add(mean: State, spread: dict[str, Tensor], gradients: Mapping[str, Tensor], size: int, samples: int) -> None:
    """Add a batch of `size` samples; a parameter that its loss does not reach has gradient 0."""
    for name, before in mean.items():
        gradient = widen(gradients[name]) if name in gradients else torch.zeros_like(before)
        away = gradient - before
        mean[name] = before + away * (size / samples)
        spread[name] = spread[name] + size * (away * (gradient - mean[name])).sum()
