"""The terms of federation sensitivity: what is added up over steps, what comes of it, and where it jumps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlightning.algorithm import ForwardOrder, Layer, ordered_layers, pieces


@dataclass
class Sensitivity:
    r"""Sensitivity of each layer, in order.

    Elhussein, Gürsoy, "PLayer-FL", 2025, equations 2-3: ``I_k = (1/n_k) sum_{p in k} (theta_p grad_p)^2`` and the
    cumulative ``F_l = sum_{k<=l} I_k``.

    Attributes:
        layers: names; num_parameters: ``n_k`` counted in.
        sensitivity: ``I_k``.
        method: where the gradients came from; weights_only: whether biases were left out. Numbers of
            different methods are not the same quantity.
    """

    layers: list[str]
    num_parameters: list[int]
    sensitivity: list[float]
    method: str = "online"
    weights_only: bool = False

    @property
    def cumulative(self) -> list[float]:
        """``F_1 .. F_L``, non-decreasing."""
        total, out = 0.0, []
        for term in self.sensitivity:
            total += term
            out.append(total)
        return out

    @property
    def ratios(self) -> list[float]:
        """``F_{l+1} / F_l`` for l = 1..L-1; NaN where both are 0, infinity where only ``F_l`` is."""
        f = self.cumulative
        return [b / a if a > 0 else (math.inf if b > 0 else math.nan) for a, b in itertools.pairwise(f)]

    def transition(self, threshold: float) -> int:
        """``p = min{l : F_{l+1} / F_l > t}``, the number of federated layers; L if there is none.

        A layer without parameters that count (frozen) cannot be where the ratio jumps from 0.

        Raises:
            ValueError: unless ``threshold > 1``, since F is cumulative.
        """
        if not threshold > 1.0:
            raise ValueError(f"threshold={threshold} must be above 1: F is cumulative, so every ratio is at least 1.")
        for index, ratio in enumerate(self.ratios):
            if ratio > threshold and (math.isfinite(ratio) or self.num_parameters[index] > 0):
                return index + 1
        return len(self.layers)

    @staticmethod
    def of(
        layers: Sequence[Layer],
        of_pieces: Mapping[str, float],
        counted: Mapping[str, Tensor],
        method: str = "online",
        weights_only: bool = False,
    ) -> Sensitivity:
        """``I_k`` of ``layers`` from ``sum_p (theta_p grad_p)^2`` of their pieces and the parameters that count."""
        counts = [sum(counted[name].numel() for name in layer.parameters if name in counted) for layer in layers]
        sums = [math.fsum(of_pieces[piece] for piece in layer.pieces) for layer in layers]
        terms = [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
        return Sensitivity([layer.name for layer in layers], counts, terms, method, weights_only)

    @staticmethod
    def sum(parts: Sequence[Sensitivity]) -> Sensitivity:
        """The unweighted sum over clients.

        Raises:
            ValueError: for parts with different layers or of different methods, or none.
        """
        if not parts:
            raise ValueError("There is no sensitivity to sum: no client answered.")
        first = parts[0]
        if any(part.layers != first.layers for part in parts):
            raise ValueError("Sensitivities of different layers, or in different order, cannot be summed.")
        if any((part.method, part.weights_only) != (first.method, first.weights_only) for part in parts):
            raise ValueError("Sensitivities of different methods are not the same quantity and cannot be summed.")
        terms = [math.fsum(part.sensitivity[k] for part in parts) for k in range(len(first.layers))]
        return Sensitivity(first.layers, first.num_parameters, terms, first.method, first.weights_only)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with ``cumulative`` and ``ratios`` for a reader (``None`` for NaN and infinity)."""
        ratios = [ratio if math.isfinite(ratio) else None for ratio in self.ratios]
        return asdict(self) | {"cumulative": self.cumulative, "ratios": ratios}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Sensitivity:
        """The inverse of :meth:`to_dict`."""
        names = ("layers", "num_parameters", "sensitivity", "method", "weights_only")
        return Sensitivity(**{name: values[name] for name in names})

    def plot(self, threshold: float | None = None, path: str | Path | None = None, split: int | None = None) -> Any:
        """F over the layers, the ratio curve, and p as a function of t.

        Args:
            threshold: marked in the figure.
            path: where to save it; ``None``: only return the figure.
            split: how many layers were federated, where that is not what ``threshold`` says.
        """
        from fedlightning.callbacks.diagnostics.sensitivity_figure import draw

        return draw(self, threshold, path, split)


def counted_parameters(module: nn.Module, weights_only: bool = False) -> dict[str, nn.Parameter]:
    """The parameters that count: those that train, with ``weights_only`` all but biases (the authors' code)."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not (weights_only and is_bias(name))
    }


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias by its own name (``bias``, ``bias_ih_l0``, ``in_proj_bias``)."""
    parts = name.split(".")
    own = parts[parts.index("parametrizations") + 1] if "parametrizations" in parts[:-1] else parts[-1]
    return own == "bias" or own.startswith("bias_") or own.endswith("_bias")


class SensitivityAccumulator:
    """Adds up ``(theta_p grad_p)^2`` over steps: one number a parameter tensor, no tensor is kept.

    Args:
        module: whose parameters and gradients are read.
        weights_only: leave biases out (the authors' code).
        order: names of the layers; ``None``: as they are called until :meth:`stop_watching`.
    """

    def __init__(self, module: nn.Module, weights_only: bool = False, order: Sequence[str] | None = None) -> None:
        self.module = module
        self.weights_only = weights_only
        self.counted = counted_parameters(module, weights_only)
        self.sums = dict.fromkeys(self.counted, 0.0)
        self.steps = dict.fromkeys(self.counted, 0)
        self.order = order
        self._watch = ForwardOrder(module) if order is None else None

    def stop_watching(self) -> None:
        """The first batch is through: the order in which it met the layers is known."""
        if self._watch is not None:
            self.order, self._watch = self._watch.names(), None

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor], scale: float = 1.0, stepped: Iterable[str] | None = None) -> None:
        """One step's gradients by parameter name, times ``scale``. With a non-finite one the step does not count.

        ``stepped`` are the parameters that the step was for (``None``: all); one without a gradient adds zero.
        """
        if not gradients:
            return
        parameters = dict(self.module.named_parameters())
        terms = [_squares(parameters[name], gradient) for name, gradient in gradients.items()]
        values = torch.stack([term.to(terms[0].device) for term in terms]).tolist()  # one transfer a step
        if all(map(math.isfinite, values)):
            found = dict(zip(gradients, values, strict=True))
            for name in self.counted if stepped is None else stepped:
                if name in self.counted:
                    self.sums[name] += found.get(name, 0.0) / scale**2
                    self.steps[name] += 1

    def add_step(self, optimizer: Optimizer | None = None, scale: float = 1.0) -> None:
        """One step's gradients as they stand in ``.grad``, of ``optimizer``'s parameters or of all."""
        own = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = {name: p for name, p in self.module.named_parameters() if own is None or id(p) in own}
        self.add({name: p.grad for name, p in mine.items() if p.grad is not None}, scale, mine)

    def state_dict(self) -> dict[str, Any]:
        """What has been added up, as plain values; the order once it is known."""
        return {"sums": dict(self.sums), "steps": dict(self.steps), "order": self.order and list(self.order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same module."""
        self.sums, self.steps = dict(state["sums"]), dict(state["steps"])
        if state["order"] is not None:
            self.stop_watching()
            self.order = state["order"]

    def of_pieces(self) -> dict[str, float]:
        """Per piece (:func:`fedlightning.layers.pieces`) the sum over its parameters of the mean over the steps."""
        means = {name: self.sums[name] / steps for name, steps in self.steps.items() if steps}
        return {p.name: math.fsum(means.get(name, 0.0) for name in p.parameters) for p in pieces(self.module)}

    def result(self, method: str = "online") -> Sensitivity:
        """``I_k``, with the mean over steps in the place of ``(theta_p grad_p)^2``."""
        self.stop_watching()
        layers = ordered_layers(self.module, self.order)
        return Sensitivity.of(layers, self.of_pieces(), self.counted, method, self.weights_only)


def _squares(parameter: Tensor, gradient: Tensor) -> Tensor:
    wide = torch.float32 if parameter.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    return (parameter.to(wide) * gradient.to(wide)).square().sum()
