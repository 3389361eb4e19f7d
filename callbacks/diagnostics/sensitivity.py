"""The callback that records federation sensitivity: how strongly the loss reacts to each layer's own weights."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from fedlightning.algorithm import State, probes
from fedlightning.callbacks.diagnostics.layer_values import loader_batches
from fedlightning.callbacks.diagnostics.sensitivity_terms import Sensitivity, SensitivityAccumulator, counted_parameters
from fedlightning.ranges import checked


def write_sensitivity(
    folder: Path, total: Sensitivity, clients: Mapping[str, Sensitivity], threshold: float, split: int
) -> None:
    """Write `sensitivity.json` and `figures/sensitivity.png`.

    Example:
        >>> one = Sensitivity(["body", "head"], [10, 5], [1.0, 3.0])
        >>> write_sensitivity(Path("run"), one, {"0": one}, threshold=1.05, split=1)
        >>> json.loads(Path("run/sensitivity.json").read_text())["cumulative"]
        [1.0, 4.0]
    """
    content = total.to_dict() | {
        "threshold": threshold if math.isfinite(threshold) else None,
        "split": split,
        "clients": {client: sensitivity.sensitivity for client, sensitivity in clients.items()},
    }
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    total.plot(threshold=threshold, path=figures / "sensitivity.png", split=split)
    (folder / "sensitivity.json").write_text(json.dumps(content, indent=1))


Method = Literal["online", "mean_gradient", "one_batch"]


class FederationSensitivity(Callback):
    """A recorder of the sensitivity of a training run; works in any plain `lightning.pytorch.Trainer`.

    PLayer-FL's equation 2; see :class:`Sensitivity`.

    Args:
        method: Where the gradients come from. `"online"`: those that training computes anyway in the recorded epoch, as
            the mean over its steps of `(theta_p grad_p)^2`, without an extra pass. `"mean_gradient"`: the mean gradient
            over the training set at the epoch's end, by one extra pass in the module's training mode. `"one_batch"`:
            the gradient of one batch at the epoch's end.
        weights_only: Leaves biases out.
        epoch: The epoch to record, from 0.

    Attributes:
        result: The :class:`Sensitivity`, `None` before the epoch has ended. It is the callback's Lightning state; a
            checkpoint written in the middle of the epoch holds the sums so far.

    Raises:
        ValueError: If `method` is unknown.

    Example:
        >>> from fedlightning.callbacks import FederationSensitivity
        >>> FederationSensitivity("one_batch", epoch=2).state_key
        'FederationSensitivity(method=one_batch, weights_only=False, epoch=2)'
    """

    @checked
    def __init__(self, method: Method = "online", weights_only: bool = False, epoch: int = 0) -> None:
        self.method = method
        self.weights_only = weights_only
        self.epoch = epoch
        self.result: Sensitivity | None = None
        self._accumulator: SensitivityAccumulator | None = None
        self._resumed: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        """A key that is unique by options, so that several methods may record one run."""
        return f"{type(self).__name__}(method={self.method}, weights_only={self.weights_only}, epoch={self.epoch})"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse an extra pass over a module that optimizes in its step.

        Raises:
            ValueError: If the module optimizes manually and `method` is not `"online"`.
        """
        if self.method != "online" and not pl_module.automatic_optimization:
            raise ValueError(
                f"FederationSensitivity(method={self.method!r}) runs training_step once more, but "
                f"{type(pl_module).__name__} optimizes in it (manual optimization). Use method='online'."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watch in which order the first batch of the recorded epoch meets the layers."""
        if trainer.current_epoch == self.epoch and self._accumulator is None:
            self._accumulator = SensitivityAccumulator(pl_module, self.weights_only)
            if self._resumed is not None:
                self._accumulator.load_state_dict(self._resumed)
                self._resumed = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Add a step of the recorded epoch."""
        if self.method == "online" and trainer.current_epoch == self.epoch and self._accumulator is not None:
            self._accumulator.add_step(optimizer, scale_of(optimizer, trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Stop watching: the order of the layers is known."""
        if self._accumulator is not None:
            self._accumulator.stop_watching()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the extra pass, if the method has one, and store the result."""
        if trainer.current_epoch != self.epoch or self._accumulator is None:
            return
        self._accumulator.stop_watching()
        if self.method != "online":
            self._accumulator.add(extra_gradient(trainer, pl_module, 1 if self.method == "one_batch" else None))
        if any(self._accumulator.steps.values()):
            self.result = self._accumulator.result(self.method)
        else:
            warnings.warn(f"{self.state_key} saw no finite gradient, so it has no result.", stacklevel=2)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the module."""
        if self._accumulator is not None:
            self._accumulator.stop_watching()
        self._accumulator = self._resumed = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the module."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the result as plain values; in the middle of the epoch, the sums so far."""
        if self.result is not None:
            return {"result": self.result.to_dict()}
        return {} if self._accumulator is None else {"partial": self._accumulator.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of an earlier run, or go on in the middle of its epoch."""
        self._resumed = state_dict.get("partial")
        self.result = Sensitivity.from_dict(state_dict["result"]) if "result" in state_dict else None


def scale_of(optimizer: Optimizer, trainer: Trainer) -> float:
    """Return the factor that `.grad` still has before a step: a fused optimizer unscales its gradients itself."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return probes.loss_scale(trainer.precision_plugin) if fused else 1.0


def extra_gradient(trainer: Trainer, module: LightningModule, count: int | None) -> State:
    """Return the mean gradient at the present parameters; leaves no trace."""
    with loader_batches(trainer, count, "sensitivity") as batches:
        gradient = probes.mean_gradient(module, batches, trainer.precision_plugin, "sensitivity")
    return {name: trainer.strategy.reduce(value, reduce_op="mean") for name, value in gradient.items()}


__all__ = ["FederationSensitivity", "Sensitivity", "SensitivityAccumulator", "counted_parameters", "scale_of"]
