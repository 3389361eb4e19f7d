"""Federation sensitivity: the result with its transition, and the sums over steps that it is made of."""

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

from fedlightning.layers import ForwardOrder, Layer, ordered_layers, pieces
from fedlightning.tensors import as_reals, widen


@dataclass
class Sensitivity:
    r"""Sensitivity of each layer, in order.

    Elhussein, Gürsoy, "PLayer-FL", 2025, equations 2-3: `I_k = (1/n_k) sum_{p in k} (theta_p grad_p)^2` and the
    cumulative `F_l = sum_{k<=l} I_k`.

    Attributes:
        layers: Names of the layers.
        num_parameters: Number `n_k` of parameters that count in each layer.
        sensitivity: `I_k` of each layer.
        method: Where the gradients came from. Numbers of different methods are not the same quantity.
        weights_only: Whether biases were left out.

    Example:
        >>> found = Sensitivity(["conv1", "conv2", "fc"], [10, 20, 30], [1.0, 0.25, 2.5])
        >>> found.cumulative, found.ratios
        ([1.0, 1.25, 3.75], [1.25, 3.0])
        >>> found.transition(threshold=2.0)
        2
    """

    layers: list[str]
    num_parameters: list[int]
    sensitivity: list[float]
    method: str = "online"
    weights_only: bool = False

    @property
    def cumulative(self) -> list[float]:
        """`F_1 .. F_L`, non-decreasing."""
        return list(itertools.accumulate(self.sensitivity, initial=0.0))[1:]

    @property
    def ratios(self) -> list[float]:
        """`F_{l+1} / F_l` for l = 1..L-1; NaN where both are 0, infinity where only `F_l` is."""
        f = self.cumulative
        return [b / a if a > 0 else (math.inf if b > 0 else math.nan) for a, b in itertools.pairwise(f)]

    def transition(self, threshold: float) -> int:
        """Return `p = min{l : F_{l+1} / F_l > t}`, the number of federated layers; L if there is none.

        A layer without parameters that count (a frozen one) cannot be where the ratio jumps from 0.

        Args:
            threshold: The threshold `t > 1`.

        Raises:
            ValueError: If `threshold` is not above 1: F is cumulative, so every ratio is at least 1.
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
        """Return `I_k` of `layers`.

        Args:
            layers: The layers in order.
            of_pieces: `sum_p (theta_p grad_p)^2` of each piece of a layer.
            counted: The parameters that count, by name.
            method: Where the gradients came from.
            weights_only: Whether biases were left out.
        """
        counts = counts_of(layers, counted)
        sums = [math.fsum(of_pieces[piece] for piece in layer.pieces) for layer in layers]
        means = [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
        return Sensitivity([layer.name for layer in layers], counts, means, method, weights_only)

    @staticmethod
    def of_sent(module: nn.Module, piece_sums: Tensor, order: Tensor, weights_only: bool = False) -> Sensitivity:
        """Return `I_k` from what `SensitivityAccumulator.to_send` gave.

        Args:
            module: The module that was measured, or a copy.
            piece_sums: `(num_pieces,)`, the terms of its pieces.
            order: `(num_pieces,)`, the order of its pieces.
            weights_only: Whether biases were left out.
        """
        of_pieces = dict(zip((piece.name for piece in pieces(module)), piece_sums.tolist(), strict=True))
        counted = counted_parameters(module, weights_only)
        return Sensitivity.of(layers_sent(module, order), of_pieces, counted, "online", weights_only)

    @staticmethod
    def sum(parts: Sequence[Sensitivity]) -> Sensitivity:
        """Return the unweighted sum over clients.

        Raises:
            ValueError: If the parts are of different layers or methods, or there is none.
        """
        if not parts:
            raise ValueError("There is no sensitivity to sum: no client answered.")
        first = parts[0]
        if any(part.layers != first.layers for part in parts):
            raise ValueError("Sensitivities of different layers, or in different order, cannot be summed.")
        if any((part.method, part.weights_only) != (first.method, first.weights_only) for part in parts):
            raise ValueError("Sensitivities of different methods are not the same quantity and cannot be summed.")
        sums = [math.fsum(part.sensitivity[k] for part in parts) for k in range(len(first.layers))]
        return Sensitivity(first.layers, first.num_parameters, sums, first.method, first.weights_only)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with `cumulative` and `ratios` for a reader (`None` for NaN and infinity)."""
        ratios = [ratio if math.isfinite(ratio) else None for ratio in self.ratios]
        return asdict(self) | {"cumulative": self.cumulative, "ratios": ratios}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Sensitivity:
        """Return the sensitivity that :meth:`to_dict` described."""
        names = ("layers", "num_parameters", "sensitivity", "method", "weights_only")
        return Sensitivity(**{name: values[name] for name in names})

    def plot(self, threshold: float | None = None, path: str | Path | None = None, split: int | None = None) -> Any:
        """Draw F over the layers, the ratio curve, and p as a function of t.

        Args:
            threshold: Threshold to show in the figure.
            path: File to save it to. `None` only returns the figure.
            split: How many layers were federated, if `threshold` says something else.

        Returns:
            The matplotlib figure.
        """
        from fedlightning.callbacks.diagnostics.sensitivity_figure import draw

        return draw(self, threshold, path, split)


def counted_parameters(module: nn.Module, weights_only: bool = False) -> dict[str, nn.Parameter]:
    """Return the parameters that count: those that train, with `weights_only` all but biases (the authors' code).

    Example:
        >>> list(counted_parameters(nn.Linear(2, 3), weights_only=True))
        ['weight']
    """
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not (weights_only and is_bias(name))
    }


def counts_of(layers: Sequence[Layer], counted: Mapping[str, Tensor]) -> list[int]:
    """Return how many parameters count in each layer.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> counts_of(ordered_layers(module), counted_parameters(module))
        [9, 4]
    """
    return [sum(as_reals(counted[name]).numel() for name in layer.parameters if name in counted) for layer in layers]


def is_bias(name: str) -> bool:
    """Return True if a parameter is a bias by its own name.

    Example:
        >>> is_bias("net.lstm.bias_ih_l0"), is_bias("net.bias_free.weight")
        (True, False)
    """
    parts = name.split(".")
    own_name = parts[parts.index("parametrizations") + 1] if "parametrizations" in parts[:-1] else parts[-1]
    return own_name == "bias" or own_name.startswith("bias_") or own_name.endswith("_bias")


def order_to_send(module: nn.Module, order: Iterable[str]) -> Tensor:
    """Return names of pieces of `module` (:func:`fedlightning.layers.pieces`) as their numbers in registration order.

    Example:
        >>> order_to_send(nn.ModuleDict({"head": nn.Linear(1, 1), "body": nn.Linear(1, 1)}), ["body", "head"])
        tensor([1, 0])
    """
    names = [piece.name for piece in pieces(module)]
    return torch.tensor([names.index(name) for name in order])


def layers_sent(module: nn.Module, order: Tensor) -> list[Layer]:
    """Return the layers of `module` in the order of :func:`order_to_send`.

    Example:
        >>> module = nn.ModuleDict({"head": nn.Linear(1, 1), "body": nn.Linear(1, 1)})
        >>> [layer.name for layer in layers_sent(module, torch.tensor([1, 0]))]
        ['body', 'head']
    """
    names = [piece.name for piece in pieces(module)]
    return ordered_layers(module, [names[index] for index in order.tolist()])


class SensitivityAccumulator:
    """Sums of `(theta_p grad_p)^2` over steps: one number per parameter, no tensor is kept.

    Args:
        module: The module whose parameters and gradients are read.
        weights_only: Leaves biases out (the authors' code).
        order: Names of the layers. `None` watches in which order they are called, until :meth:`stop_watching`.

    Attributes:
        counted: The parameters that count, by name.
        sums: Sum over the steps by parameter.
        steps: Number of steps by parameter.

    Example:
        >>> module = nn.Linear(1, 1, bias=False)
        >>> accumulator = SensitivityAccumulator(module, order=["weight"])
        >>> for gradient in (1.0, 3.0):
        ...     accumulator.add({"weight": gradient / module.weight.detach()})
        >>> round(accumulator.result().sensitivity[0], 5)
        5.0
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
        """Take the order in which layers have been called; call it after the first batch."""
        if self._watch is not None:
            self.order, self._watch = self._watch.names(), None

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor], scale: float = 1.0, stepped: Iterable[str] | None = None) -> None:
        """Add one step. A step with a non-finite gradient does not count."""
        if not gradients:
            return
        parameters = dict(self.module.named_parameters())
        squares = [_squares(parameters[name], gradient) for name, gradient in gradients.items()]
        values = torch.stack([term.to(squares[0].device) for term in squares]).tolist()  # one transfer a step
        self.add_terms(dict(zip(gradients, values, strict=True)), self.counted if stepped is None else stepped, scale)

    def add_terms(self, squares: Mapping[str, float], stepped: Iterable[str], scale: float = 1.0) -> None:
        """Add one step, given `sum (theta_p grad_p)^2` of each parameter that has a gradient."""
        if all(map(math.isfinite, squares.values())):
            for name in stepped:
                if name in self.counted:
                    self.sums[name] += squares.get(name, 0.0) / scale**2
                    self.steps[name] += 1

    def add_step(self, optimizer: Optimizer | None = None, scale: float = 1.0) -> None:
        """Add one step whose gradients are in `.grad`."""
        ids = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = {name: p for name, p in self.module.named_parameters() if ids is None or id(p) in ids}
        self.add({name: p.grad for name, p in mine.items() if p.grad is not None}, scale, mine)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far as plain values, and the order if it is known."""
        return {"sums": dict(self.sums), "steps": dict(self.steps), "order": self.order and list(self.order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same module."""
        self.sums, self.steps = dict(state["sums"]), dict(state["steps"])
        if state["order"] is not None:
            self.stop_watching()
            self.order = state["order"]

    def of_pieces(self) -> dict[str, float]:
        """Return for each piece (:func:`fedlightning.layers.pieces`) the sum over its parameters of the steps' means."""
        means = {name: self.sums[name] / steps for name, steps in self.steps.items() if steps}
        return {p.name: math.fsum(means.get(name, 0.0) for name in p.parameters) for p in pieces(self.module)}

    def to_send(self) -> dict[str, Tensor]:
        """Return the terms of the pieces as registered, `(num_pieces,)`, and their order as called, `(num_pieces,)`."""
        sum_by_piece = self.of_pieces()
        return {
            "sensitivity": torch.tensor(list(sum_by_piece.values()), dtype=torch.float64),
            "order": order_to_send(self.module, dict.fromkeys([*(self.order or ()), *sum_by_piece])),
        }

    def result(self, method: str = "online") -> Sensitivity:
        """Return `I_k`, with the mean over the steps instead of `(theta_p grad_p)^2`."""
        self.stop_watching()
        layers = ordered_layers(self.module, self.order)
        return Sensitivity.of(layers, self.of_pieces(), self.counted, method, self.weights_only)


def _squares(parameter: Tensor, gradient: Tensor) -> Tensor:
    return (widen(parameter) * widen(gradient)).square().sum()
