"""Federation sensitivity: how strongly each layer's loss reacts to its own weights (PLayer-FL, equation 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlightning import probes
from fedlightning.layers import Layer, forward_order, ordered_layers

Method = Literal["online", "mean_gradient", "one_batch"]


@dataclass
class Sensitivity:
    r"""Sensitivity of each layer, in order.

    Elhussein, Gürsoy, "PLayer-FL", 2025, equations 2-3: ``I_k = (1/n_k) sum_{p in k} (theta_p grad_p)^2`` and the
    cumulative ``F_l = sum_{k<=l} I_k``.

    Attributes:
        layers: names; num_parameters: ``n_k`` counted in.
        sensitivity: ``I_k``.
        method: where the gradients came from; weights_only: whether biases and normalisation were left out. Numbers of
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
        return [b / a if a > 0 else (math.inf if b > 0 else math.nan) for a, b in zip(f, f[1:], strict=False)]

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
    def sum(parts: Sequence[Sensitivity]) -> Sensitivity:
        """The unweighted sum over clients.

        Raises:
            ValueError: for parts with different layers, or none.
        """
        if not parts:
            raise ValueError("There is no sensitivity to sum: no client answered.")
        first = parts[0]
        if any(part.layers != first.layers for part in parts):
            raise ValueError("Sensitivities of different layers, or in different order, cannot be summed.")
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

    def plot(self, threshold: float | None = None, path: str | Path | None = None) -> Any:
        """F over the layers, the ratio curve, and p as a function of t.

        Args:
            threshold: marked in the figure.
            path: where to save it; ``None``: only return the figure.
        """
        from fedlightning.callbacks.sensitivity_figure import draw

        return draw(self, threshold, path)


class SensitivityAccumulator:
    """Adds up ``(theta_p grad_p)^2`` over steps: one float64 number a parameter tensor, no tensor is kept.

    Args:
        module: whose parameters and gradients are read.
        layers: its layers in order (:func:`fedlightning.layers.ordered_layers`).
        weights_only: count only tensors of two or more dimensions (the authors' code: no biases, no normalisation).
    """

    def __init__(self, module: nn.Module, layers: Sequence[Layer], weights_only: bool = False) -> None:
        self.layers = list(layers)
        self.weights_only = weights_only
        parameters = dict(module.named_parameters())
        self.counted = {
            name: parameters[name]
            for layer in self.layers
            for name in layer.parameters
            if name in parameters
            and parameters[name].requires_grad
            and (not weights_only or parameters[name].dim() > 1)
        }
        self.sums = dict.fromkeys(self.counted, 0.0)
        self.steps = dict.fromkeys(self.counted, 0)

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """One step's gradients by parameter name, unscaled. A step with a non-finite one is not counted at all."""
        terms = {
            name: float((self.counted[name].double() * gradient.double()).square().sum())
            for name, gradient in gradients.items()
            if name in self.counted
        }
        if all(math.isfinite(term) for term in terms.values()):
            for name, term in terms.items():
                self.sums[name] += term
                self.steps[name] += 1

    def add_step(self, optimizer: Optimizer | None = None) -> None:
        """One step's gradients as they stand in ``.grad``, of ``optimizer``'s parameters or of all."""
        own = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.add(
            {
                name: parameter.grad
                for name, parameter in self.counted.items()
                if parameter.grad is not None and (own is None or id(parameter) in own)
            }
        )

    def result(self, method: str = "online") -> Sensitivity:
        """``I_k``, with the mean over steps in the place of ``(theta_p grad_p)^2``."""
        counts, terms = [], []
        for layer in self.layers:
            names = [name for name in layer.parameters if name in self.counted]
            count = sum(self.counted[name].numel() for name in names)
            total = math.fsum(self.sums[name] / self.steps[name] for name in names if self.steps[name])
            counts.append(count)
            terms.append(total / count if count else 0.0)
        return Sensitivity([layer.name for layer in self.layers], counts, terms, method, self.weights_only)


class FederationSensitivity(Callback):
    """Records the sensitivity of a training run; works in any plain ``lightning.pytorch.Trainer``.

    Args:
        method: ``"online"``: from the gradients training computes anyway in the recorded epoch, mean over its steps of
            ``(theta_p grad_p)^2``, no extra pass; ``"mean_gradient"``: at the epoch's end, from the mean gradient over the
            training set (one extra pass, in the module's training mode); ``"one_batch"``: from one batch, then.
        weights_only: leave biases and normalisation out.
        epoch: which epoch to record, from 0.

    Attributes:
        result: the :class:`Sensitivity`, ``None`` before the epoch has ended. It is the callback's Lightning state.
    """

    def __init__(self, method: Method = "online", weights_only: bool = False, epoch: int = 0) -> None:
        if method not in ("online", "mean_gradient", "one_batch"):
            raise ValueError(f"method={method!r} is unknown. Use 'online', 'mean_gradient' or 'one_batch'.")
        self.method = method
        self.weights_only = weights_only
        self.epoch = epoch
        self.result: Sensitivity | None = None
        self._accumulator: SensitivityAccumulator | None = None

    @property
    def state_key(self) -> str:
        """Unique by options, so that several methods may record one run."""
        return f"{type(self).__name__}(method={self.method}, weights_only={self.weights_only}, epoch={self.epoch})"

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """On the first batch: the order in which a forward pass meets the layers."""
        if trainer.current_epoch != self.epoch or self._accumulator is not None:
            return

        def run() -> object:
            with torch.no_grad(), probes.probing(pl_module, trainer.precision_plugin, "layer order"):
                return probes.training_loss(pl_module, batch)

        layers = ordered_layers(pl_module, forward_order(pl_module, run))
        self._accumulator = SensitivityAccumulator(pl_module, layers, self.weights_only)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """One more step of the recorded epoch (gradients are unscaled here)."""
        if self.method == "online" and trainer.current_epoch == self.epoch and self._accumulator is not None:
            self._accumulator.add_step(optimizer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The extra pass, where the method wants one; the result."""
        if trainer.current_epoch != self.epoch or self._accumulator is None:
            return
        if self.method != "online":
            loader: Any = trainer.train_dataloader
            batches = iter(loader) if self.method == "mean_gradient" else iter([next(iter(loader))])
            self._accumulator.add(probes.mean_gradient(pl_module, batches, trainer.precision_plugin, "sensitivity"))
        self.result = self._accumulator.result(self.method)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the module."""
        self._accumulator = None

    def state_dict(self) -> dict[str, Any]:
        """The result, as plain values."""
        return {} if self.result is None else {"result": self.result.to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring back the result of an earlier run."""
        self.result = Sensitivity.from_dict(state_dict["result"]) if "result" in state_dict else None
