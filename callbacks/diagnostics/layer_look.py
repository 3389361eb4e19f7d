"""One measurement of a client's module: everything that LayerDiagnostics records at a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from fedlightning.algorithm import Client, probes
from fedlightning.callbacks.diagnostics.gradient_variance import gradient_moments
from fedlightning.callbacks.diagnostics.hessian_trace import hutchinson, mean_and_error
from fedlightning.callbacks.diagnostics.layer_similarity import common_samples, layer_grams
from fedlightning.callbacks.diagnostics.layer_values import full_precision, layer_order
from fedlightning.callbacks.diagnostics.sensitivity_terms import SensitivityAccumulator, counted_parameters, counts_of
from fedlightning.layers import ordered_layers

if TYPE_CHECKING:
    from fedlightning.callbacks.diagnostics.layer_diagnostics import LayerDiagnostics

Quantity = Literal["sensitivity_online", "sensitivity", "grad_var_samples", "grad_var_params", "hessian_trace", "cka"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
COUNTS = "num_parameters"
SENT: tuple[str, ...] = (COUNTS, *(name for name in QUANTITIES if name != "cka"))
"""Quantities of which a client sends one number per layer, in this order."""
OF_GRADIENTS = ("sensitivity", "grad_var_samples", "grad_var_params")
"""Quantities that one pass over training batches gives."""
Columns = tuple[Sequence[float], ...]
"""One number per layer, and its standard error where there is one."""


class LayerLook:
    """A measurement of a client's module, which is on the device; leaves no trace.

    Args:
        options: The callback with its options.
        client: The client.
        stage: `L1` or `L2`.
        seed: Address of the randomness of the passes.
        order: Pieces in order; `None` takes them as a training batch calls them.
        online: The online sensitivity of the visit, if it was recorded.

    Attributes:
        order: The pieces in order.
        layers: The layers in order.
    """

    def __init__(
        self,
        options: LayerDiagnostics,
        client: Client,
        stage: str,
        seed: int,
        order: list[str] | None,
        online: SensitivityAccumulator | None,
    ) -> None:
        self.options, self.client, self.stage, self.seed, self.online = options, client, stage, seed, online
        self.module, self.precision = client.module, full_precision(client.precision)
        if order is None:
            order = layer_order(self.module, client.next_batch("layer order"), self.precision, seed)
        self.order, self.layers = order, ordered_layers(self.module, order)
        self.how: dict[str, Any] = {"weights_only": options.weights_only, "order": order}

    def values(self) -> Tensor:
        """Return the numbers and their standard errors, `(num_quantities, num_layers, 2)`; NaN where there are none."""
        asked = self.options.quantities
        counts = counts_of(self.layers, counted_parameters(self.module, self.options.weights_only))
        found: dict[str, Columns] = {COUNTS: ([float(count) for count in counts],)}
        if any(name in asked for name in OF_GRADIENTS):
            found |= self._gradients()
        if self.stage == "L2" and self.online is not None and any(self.online.steps.values()):
            self.online.order = self.order
            found["sensitivity_online"] = (self.online.result().sensitivity,)
        if "hessian_trace" in asked:
            found["hessian_trace"] = self._hessian()
        values = torch.full((len(SENT), len(counts), 2), torch.nan, dtype=torch.float64)
        for name, columns in found.items():
            if name == COUNTS or name in asked:
                values[SENT.index(name), :, : len(columns)] = torch.tensor(columns, dtype=torch.float64).T
        return values

    def _gradients(self) -> dict[str, Columns]:
        batches = self._batches("gradients", self.options.num_batches)
        moments = gradient_moments(self.module, batches, self.precision, self.seed, **self.how)
        at_mean = SensitivityAccumulator(self.module, **self.how)
        at_mean.add(moments.mean)
        return {
            "sensitivity": (at_mean.result("mean_gradient").sensitivity,),
            "grad_var_samples": (moments.over_samples(self.layers),),
            "grad_var_params": (moments.over_params(self.layers),),
        }

    def _hessian(self) -> Columns:
        batches, probes = self._batches("hessian", self.options.hessian_batches), self.options.hessian_probes
        _, draws = hutchinson(self.module, batches, self.precision, self.seed, num_probes=probes, **self.how)
        return mean_and_error(draws)

    def grams(self) -> Tensor:
        """Return the layers' unit Gram matrices `(num_layers, n, n)`; empty if CKA is not asked for."""
        if "cka" not in self.options.quantities:
            return torch.empty(0)
        batch, count = common_samples(self.client, self.options.cka_samples)
        batch, address = probes.move_batch(self.module, batch), ("layer similarity", self.client.round)
        debiased = self.options.cka_debiased
        return layer_grams(self.module, batch, count, self.layers, self.precision, *address, debiased=debiased)

    def _batches(self, purpose: str, count: int | None) -> Iterator[Any]:
        """`count` training batches, at most an epoch."""
        loader = self.client.loader("train")
        assert loader is not None
        for _ in range(min(count or len(loader), len(loader))):
            yield self.client.next_batch(f"layer diagnostics {self.stage} {purpose}")
