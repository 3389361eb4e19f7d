"""Scores of one module on one loader: :class:`Scorer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakSet

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.kept import Kept
from fedlightning.client.logged_numbers import NotOneNumberError, numbers
from fedlightning.client.trainer_context import ClientData
from fedlightning.client.undefined_metrics import nan_where_undefined
from fedlightning.compat.attached import to_device, trainer_of
from fedlightning.compat.quiet import quiet
from fedlightning.datamodules.own_generators import read_for_scores
from fedlightning.wrappers import user_class


class Evaluator(Protocol):
    """Scores modules as Lightning's Trainer does, bit for bit, and refuses what it cannot."""

    def evaluate(self, module: LightningModule, loader: Any, testing: bool) -> dict[str, Any] | None:
        """Return what a module logs on a loader; `None`: only another one can say."""

    def evaluate_each(
        self,
        module: LightningModule,
        loaders: Iterable[DataLoader[Any]],
        testing: bool,
        start: Callable[[int], None],
        found: list[dict[str, float]],
    ) -> None:
        """Append the scores of one module on each of many loaders, as :meth:`Scorer.score_each` does."""


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
        evaluators: Asked before Lightning's Trainer to score, in this order.
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
        self.evaluators: list[Evaluator] = [make(blueprint) for make in blueprint.parts.evaluators]

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
            answers = (evaluator.evaluate(module, loader, testing) for evaluator in self.evaluators)
            logged = next((answer for answer in answers if answer is not None), None)
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
        for check in self._blueprint.parts.loop_checks:
            check(loop, step, module, loader, sum(loop.max_batches), fitting=False)
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
        for evaluator in self.evaluators:
            if not found:
                evaluator.evaluate_each(module, loaders, testing, start, found)

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
