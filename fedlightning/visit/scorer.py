"""Scores of one module on one loader: :class:`Scorer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.blueprint.evaluator import names_of
from fedlightning.compat.attached import detached_copy, to_device, trainer_of
from fedlightning.compat.quiet import quiet
from fedlightning.datamodules.own_generators import read_for_scores
from fedlightning.visit.fast import refusals
from fedlightning.visit.fast.errors import NotInFastLoop
from fedlightning.visit.fast.evaluation import Evaluation, evaluate, may_stay_open, module_refusal
from fedlightning.visit.kept import Kept
from fedlightning.visit.log_rules import NotOneNumberError, numbers
from fedlightning.visit.lost_batches import refuse_lost_batches
from fedlightning.visit.surroundings import ClientData
from fedlightning.visit.undefined import nan_where_undefined
from fedlightning.wrappers import user_class


class Scorer:
    """Scores modules by their own `validation_step` and `test_step`.

    It runs `Trainer.validate` and `Trainer.test` quietly; the one Trainer of the blueprint serves every model. Every
    process scores the whole loader on one device (no distributed sampler, hence no padding), so a score is the same on
    any number of devices.

    Args:
        blueprint: Holds the evaluating Trainer.
        source: The user's data module; `None` if there are loaders only.
        loader_of: Gives the loader of a client (empty: of any) and a split.

    Attributes:
        client: Client whose loaders modules find in `self.trainer.datamodule` while they are scored.
        fitted: Modules that a fit has set up.
        fast: Whether the Trainer is bypassed where the scores are provably the same (unless `local_loop="trainer"`).
    """

    def __init__(
        self,
        blueprint: Blueprint,
        source: Any = None,
        loader_of: Callable[[str, str], Any] = lambda client, split: None,
    ) -> None:
        self._blueprint, self.client = blueprint, ""
        self._datamodule = None if source is None else ClientData(source, lambda split: loader_of(self.client, split))
        self.fitted: WeakSet[LightningModule] = WeakSet()
        self.fast = blueprint.settings.local_loop != "trainer"
        self._refused: WeakSet[Any] = WeakSet()
        self._tried: set[tuple[Any, bool]] = set()

    def score(self, module: LightningModule, loader: DataLoader[Any], split: str) -> dict[str, float]:
        """Return what a module logs on a loader. Afterwards its parameters, modes and device are as before.

        A module that logs nothing but returns a loss (or a single tensor) from its step is scored by the
        sample-weighted mean of it, under `loss`. A module with neither step has no scores.
        """
        testing = split == "test" and is_overridden("test_step", module)
        if not testing and not is_overridden("validation_step", module):
            return {}
        home = module.device
        before = trainer_of(module)
        losses = self._blueprint.losses
        self.set_up(module)
        with read_for_scores(loader):
            logged = self._fast(module, loader, testing)
            if logged is None:
                logged = self._by_trainer(module, loader, testing)
        to_device(module, home)
        module.trainer = before
        return numbers(logged, module) or losses.result()

    def _by_trainer(self, module: LightningModule, loader: DataLoader[Any], testing: bool) -> dict[str, Any]:
        self._blueprint.losses.reset()
        trainer, kept = self._blueprint.trainer, Kept(module)
        try:
            with quiet(), nan_where_undefined(module):
                run = trainer.test if testing else trainer.validate
                results = run(module, dataloaders=loader, verbose=False)
        except ValueError as error:
            if "a single element" in str(
                error
            ):  # Lightning's words of self.log, and of a metric whose name it does not tell
                numbers(trainer.callback_metrics, module)
                text = " ".join(str(error).split()).rstrip(".")
                raise NotOneNumberError(
                    f"{user_class(module).__name__}: {text}. {NotOneNumberError.WAY_OUT}"
                ) from error
            raise
        finally:
            kept.put_back()
        step, loop = ("test_step", trainer.test_loop) if testing else ("validation_step", trainer.validate_loop)
        refuse_lost_batches(loop, step, module, loader, sum(loop.max_batches), fitting=False)
        return {name: value for result in results for name, value in result.items()}

    def score_each(
        self,
        module: LightningModule,
        loaders: Iterable[DataLoader[Any]],
        split: str,
        start: Callable[[int], None],
        found: list[dict[str, float]],
    ) -> None:
        """Score one module on each of many loaders, as :meth:`score` would, at less cost for each.

        It ends early, perhaps before the first loader, where the next one must be scored by :meth:`score`.
        """
        testing = split == "test" and is_overridden("test_step", module)
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
            self._refused.add(type(module))
        finally:
            to_device(module, home)
            module.trainer = before

    def set_up(self, module: LightningModule) -> None:
        """Show the data module, and call the `setup` of a fit where a module may rest on it and had none.

        In Lightning the same object is trained and scored.
        """
        vars(self._blueprint.trainer)["datamodule"] = self._datamodule
        if module in self.fitted or not is_overridden("setup", module):
            return
        module.trainer = self._blueprint.trainer
        try:
            module.setup("fit")
        except Exception:  # it needs what only a fit has, and the evaluation tells of what is missing there
            return

    def _fast(self, module: LightningModule, loader: Any, testing: bool) -> dict[str, Any] | None:
        """Return the same scores at a fraction of the cost, or `None` if only Lightning's Trainer can compute them."""
        kind, trainer = type(module), self._blueprint.trainer
        limit = names_of(testing).limit(trainer)
        if self._refusal(module) is not None or refusals.of_loader(loader, limit) is not None:
            return None
        # The first module of a class is scored on a copy: if it turns out to need the Trainer, its own metrics are unused.
        try:
            scored = module if (kind, testing) in self._tried else detached_copy(module)
        except Exception:  # something in it cannot be copied
            self._refused.add(kind)
            return None
        losses = self._blueprint.losses
        losses.reset()
        try:
            logged = evaluate(scored, loader, trainer, testing, losses.add, self._inference_mode)
        except NotInFastLoop:
            self._refused.add(type(module))
            return None
        self._tried.add((kind, testing))
        return logged

    @property
    def _inference_mode(self) -> bool:
        return bool(self._blueprint.settings.trainer_arguments.get("inference_mode", True))

    def _refusal(self, module: LightningModule) -> str | None:
        if not self.fast or type(module) in self._refused:
            return "the Trainer was asked for, or has been needed before"
        return module_refusal(module, self._blueprint.trainer)
