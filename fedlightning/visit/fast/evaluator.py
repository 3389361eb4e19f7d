"""The evaluator of the fast loop: the same scores at a fraction of the cost, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.blueprint.evaluator import names_of
from fedlightning.compat.attached import detached_copy, to_device, trainer_of
from fedlightning.datamodules.own_generators import read_for_scores
from fedlightning.visit.fast import refusals
from fedlightning.visit.fast.errors import NotInFastLoop
from fedlightning.visit.fast.evaluation import Evaluation, evaluate, may_stay_open, module_refusal
from fedlightning.visit.logged_numbers import numbers


class FastEvaluator:
    """Bypasses the Trainer where the scores are provably the same, unless `local_loop="trainer"`.

    Args:
        blueprint: Holds the evaluating Trainer.

    Attributes:
        refused: Classes of modules that have needed the Trainer.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self.refused: WeakSet[Any] = WeakSet()
        self._tried: set[tuple[Any, bool]] = set()

    def evaluate(self, module: LightningModule, loader: Any, testing: bool) -> dict[str, Any] | None:
        """Return what a module logs, or `None` if only Lightning's Trainer can compute it."""
        kind, trainer = type(module), self._blueprint.trainer
        limit = names_of(testing).limit(trainer)
        if self._refusal(module) is not None or refusals.of_loader(loader, limit) is not None:
            return None
        # The first module of a class is scored on a copy: if it turns out to need the Trainer, its own metrics are unused.
        try:
            scored = module if (kind, testing) in self._tried else detached_copy(module)
        except Exception:  # something in it cannot be copied
            self.refused.add(kind)
            return None
        losses = self._blueprint.losses
        losses.reset()
        try:
            logged = evaluate(scored, loader, trainer, testing, losses.add, self._inference_mode)
        except NotInFastLoop:
            self.refused.add(kind)
            return None
        self._tried.add((kind, testing))
        return logged

    def evaluate_each(
        self,
        module: LightningModule,
        loaders: Iterable[DataLoader[Any]],
        testing: bool,
        start: Callable[[int], None],
        found: list[dict[str, float]],
    ) -> None:
        """Append the scores on each loader, up to the first one that must be scored alone."""
        known = (type(module), testing) in self._tried and may_stay_open(module)
        if not known or self._refusal(module) is not None:
            return
        home, before, trainer = module.device, trainer_of(module), self._blueprint.trainer
        losses, limit = self._blueprint.losses, names_of(testing).limit(trainer)
        try:
            with Evaluation(module, trainer, testing, losses.add, self._inference_mode) as evaluation:
                for place, loader in enumerate(loaders):
                    if refusals.of_loader(loader, limit) is not None:
                        break
                    start(place)
                    losses.reset()
                    with read_for_scores(loader):
                        logged = evaluation.run(loader)
                    found.append(numbers(logged, module) or losses.result())
        except NotInFastLoop:
            self.refused.add(type(module))
        finally:
            to_device(module, home)
            module.trainer = before

    @property
    def _inference_mode(self) -> bool:
        return bool(self._blueprint.settings.trainer_arguments.get("inference_mode", True))

    def _refusal(self, module: LightningModule) -> str | None:
        if self._blueprint.settings.local_loop == "trainer" or type(module) in self.refused:
            return "the Trainer was asked for, or has been needed before"
        return module_refusal(module, self._blueprint.trainer)
