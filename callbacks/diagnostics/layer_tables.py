"""The rows of `layers.csv`, made from what the clients send about their layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlightning.callbacks.diagnostics.layer_rows import ALL, LayerRow
from fedlightning.callbacks.diagnostics.sensitivity_terms import Sensitivity
from fedlightning.callbacks.diagnostics.similarity import pairwise_cka

METHODS = {"sensitivity_online": "online", "sensitivity": "mean_gradient"}
"""The two sensitivities and where their gradients come from; they are not the same quantity."""
SUMS = ("grad_var_samples", "hessian_trace")
"""Sums over a layer's parameters: they are also given per parameter, as the sensitivity is."""


@dataclass(frozen=True)
class StageTable:
    """The measurements of one client at one stage.

    Attributes:
        client: The client's id.
        stage: `L1` or `L2`.
        layers: Names of the layers in order.
        num_parameters: Number of parameters that count in each layer.
        values: By quantity, `(num_layers, 2)`: the number and its standard error, NaN where there is none.
        grams: Unit Gram matrices `(num_layers, n, n)`, or `None`.

    Example:
        >>> table = StageTable("0", "L2", ["body"], [4], {"hessian_trace": torch.tensor([[8.0, 1.0]])})
        >>> [(row.quantity, row.value, row.std_error) for row in table.rows(1)]
        [('hessian_trace', 8.0, 1.0), ('hessian_trace_per_parameter', 2.0, 0.25)]
    """

    client: str
    stage: str
    layers: list[str]
    num_parameters: list[int]
    values: dict[str, Tensor]
    grams: Tensor | None = None

    def rows(self, number: int) -> Iterator[LayerRow]:
        """Give the client's own rows of round `number`, with the quantities that follow from what it sent."""
        for quantity, table in self.values.items():
            if quantity in METHODS:
                yield from sensitivity_rows(self.sensitivity(quantity), quantity, number, self.stage, self.client)
                continue
            yield from self._rows(number, quantity, table)
            if quantity in SUMS:
                counts = torch.tensor(self.num_parameters, dtype=table.dtype).clamp_min(1)
                yield from self._rows(number, f"{quantity}_per_parameter", table / counts[:, None])

    def _rows(self, number: int, quantity: str, table: Tensor) -> Iterator[LayerRow]:
        for index, (layer, (value, error)) in enumerate(zip(self.layers, table.tolist(), strict=True), 1):
            yield LayerRow(number, self.stage, self.client, index, layer, quantity, value, error)

    def sensitivity(self, quantity: str) -> Sensitivity:
        """Return one of the two sensitivities, with F, the ratios and the transition."""
        return Sensitivity(self.layers, self.num_parameters, self.values[quantity][:, 0].tolist(), METHODS[quantity])


def sensitivity_rows(found: Sensitivity, quantity: str, number: int, stage: str, client: str) -> Iterator[LayerRow]:
    """Give `I_l`, `F_l` (`_cumulative`) and `F_{l+1} / F_l` (`_ratio`, at layer l) as rows.

    Example:
        >>> found = Sensitivity(["body", "head"], [2, 2], [1.0, 3.0])
        >>> [(row.quantity, row.layer, row.value) for row in sensitivity_rows(found, "I", 1, "L2", "0")][2:]
        [('I_cumulative', 'body', 1.0), ('I_cumulative', 'head', 4.0), ('I_ratio', 'body', 4.0)]
    """
    parts = {"": found.sensitivity, "_cumulative": found.cumulative, "_ratio": found.ratios}
    for suffix, values in parts.items():
        for index, (layer, value) in enumerate(zip(found.layers, values, strict=False), 1):  # one ratio less
            yield LayerRow(number, stage, client, index, layer, quantity + suffix, value)


def round_rows(number: int, tables: Sequence[StageTable]) -> list[LayerRow]:
    """Return all rows of a round: each client's, the sums of the sensitivities, CKA between the clients.

    If clients meet the layers in different orders, sums are left out: F is cumulative, so its order is part of it.

    Example:
        >>> values = {"sensitivity": torch.tensor([[1.0, math.nan], [3.0, math.nan]])}
        >>> tables = [StageTable(client, "L2", ["body", "head"], [4, 4], values) for client in "01"]
        >>> [row.value for row in round_rows(1, tables) if (row.client, row.quantity) == (ALL, "sensitivity_cumulative")]
        [2.0, 8.0]
    """
    rows = [row for table in tables for row in table.rows(number)]
    for stage in dict.fromkeys(table.stage for table in tables):
        members = [table for table in tables if table.stage == stage]
        first = members[0]
        rows += [
            LayerRow(number, stage, ALL, index, layer, "num_parameters", float(count))
            for index, (layer, count) in enumerate(zip(first.layers, first.num_parameters, strict=True), 1)
        ]
        if all(table.layers == first.layers for table in members):
            for quantity in (name for name in METHODS if any(name in table.values for table in members)):
                total = Sensitivity.sum([table.sensitivity(quantity) for table in members if quantity in table.values])
                rows += sensitivity_rows(total, quantity, number, stage, ALL)
        rows += cka_rows(number, stage, [table for table in members if table.grams is not None])
    return rows


def cka_rows(number: int, stage: str, tables: Sequence[StageTable]) -> Iterator[LayerRow]:
    """Give each client's mean CKA with the others, per layer, and the mean over all pairs; layers are paired by name."""
    if len(tables) < 2:
        return
    grams = [dict(zip(table.layers, table.grams, strict=True)) for table in tables if table.grams is not None]
    for index, layer in enumerate(tables[0].layers, 1):
        there = [of_layer[layer] for of_layer in grams if layer in of_layer]
        if len(there) < len(tables) or any(bool(gram.isnan().any()) for gram in there):
            continue
        between = pairwise_cka(there)
        between.fill_diagonal_(0)
        scores = (between.sum(dim=1) / (len(there) - 1)).tolist()
        for table, score in zip(tables, scores, strict=True):
            yield LayerRow(number, stage, table.client, index, layer, "cka", score)
        yield LayerRow(number, stage, ALL, index, layer, "cka", math.fsum(scores) / len(scores))
