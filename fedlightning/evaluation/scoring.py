"""Scores of one module on one loader, by the module's own ``validation_step`` and ``test_step``."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from fedlightning.attached import detached_copy, trainer_of
from fedlightning.fast.evaluation import evaluate, refusal
from fedlightning.fast.trainer import NotInFastLoop
from fedlightning.quiet import quiet


class Scorer:
    """Runs ``Trainer.validate`` and ``Trainer.test`` quietly; one Lightning Trainer serves every model.

    Every process scores the whole loader on one device (no distributed sampler, hence no padding), so a score is the
    same on any number of devices.

    Args:
        trainer_arguments: Lightning Trainer arguments of the run (accelerator, precision, limits ...).
        fast: go round the Trainer where the scores are provably the same.
    """

    def __init__(self, trainer_arguments: dict[str, Any], fast: bool = True) -> None:
        self._arguments = trainer_arguments
        self._trainer: Trainer | None = None
        self._catch = _LossOutputs()
        self.fast = fast
        self._refused: WeakSet[Any] = WeakSet()
        self._tried: set[tuple[Any, bool]] = set()

    @property
    def trainer(self) -> Trainer:
        """The evaluating Trainer, made when first needed."""
        if self._trainer is None:
            dropped = ("strategy", "devices", "num_nodes", "sync_batchnorm", "profiler", "max_epochs", "max_steps")
            arguments = {key: copy.deepcopy(v) for key, v in self._arguments.items() if key not in dropped}
            with quiet():
                self._trainer = Trainer(
                    **arguments | {"use_distributed_sampler": False},
                    devices=1,
                    logger=False,
                    callbacks=[self._catch],
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
        return self._trainer

    @property
    def precision(self) -> Any:
        """Lightning's precision plugin (autocast contexts)."""
        return self.trainer.precision_plugin

    @property
    def converts(self) -> bool:
        """Whether :meth:`convert` changes anything."""
        return isinstance(self.precision, DoublePrecision | HalfPrecision)

    def convert(self, module: LightningModule) -> LightningModule:
        """Bring a module to the run's "true" precision, as Lightning does for a fit: states keep it between visits."""
        if self.converts:
            self.precision.convert_module(module)
        return module

    @property
    def device(self) -> torch.device:
        """Where scores and probes are computed."""
        return self.trainer.strategy.root_device

    def score(self, module: LightningModule, loader: DataLoader[Any], split: str) -> dict[str, float]:
        """What ``module`` logs on ``loader``; afterwards its parameters, modes and device are as before.

        ``split="test"`` runs ``test_step`` where the module has one, else ``validation_step``. A module that logs
        nothing but returns a loss (or a single tensor) from its step is scored by its sample-weighted mean under
        ``loss``. A module with neither step has no scores.
        """
        testing = split == "test" and is_overridden("test_step", module)
        if not testing and not is_overridden("validation_step", module):
            return {}
        home = module.device
        before = trainer_of(module)
        logged = self._fast(module, loader, testing)
        if logged is None:
            self._catch.reset()
            with quiet():
                run = self.trainer.test if testing else self.trainer.validate
                results = run(module, dataloaders=loader, verbose=False)
            logged = {name: value for result in results for name, value in result.items()}
        module.to(home)
        module.trainer = before
        return {name: float(value) for name, value in logged.items()} or self._catch.result()

    def _fast(self, module: LightningModule, loader: Any, testing: bool) -> dict[str, Any] | None:
        """The same scores at a fraction of the cost; ``None`` where only Lightning's Trainer can find them."""
        kind = type(module)
        if not self.fast or kind in self._refused or refusal(module, loader, self.trainer, testing) is not None:
            return None
        # The first of its class is a copy: should it turn out to need the Trainer, its metrics hold nothing yet.
        scored = module if (kind, testing) in self._tried else detached_copy(module)
        self._catch.reset()
        try:
            mode = bool(self._arguments.get("inference_mode", True))
            logged = evaluate(scored, loader, self.trainer, testing, self._catch.add, mode)
        except NotInFastLoop:
            self._refused.add(kind)
            for child in module.modules():
                if isinstance(child, Metric):
                    child.reset()
            return None
        self._tried.add((kind, testing))
        return logged


def loss_of(outputs: Any) -> Tensor | None:
    """The loss in what an evaluation step returned: a single number, or an entry ``loss``; ``None`` if there is none."""
    loss = outputs
    if isinstance(outputs, dict):
        loss = outputs.get("loss", next(iter(outputs.values())) if len(outputs) == 1 else None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


class _LossOutputs(Callback):
    """Collects the loss that an evaluation step returns, for modules that log nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def result(self) -> dict[str, float]:
        return {"loss": self.total / self.count} if self.count else {}

    def add(self, outputs: Any, batch: Any) -> None:
        """Note the output of a step."""
        loss = loss_of(outputs)
        if loss is not None:
            size = extract_batch_size(batch) or 1
            self.total += float(loss) * size
            self.count += size

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.add(outputs, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.add(outputs, batch)
