"""The training of a stack of clients: their batches, seeds and optimizers, then their steps together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from fedlightning.client.fit import start_fit
from fedlightning.client.phases import only_training
from fedlightning.client.probes import TRANSFERS, move_batch
from fedlightning.client.requests import Fit
from fedlightning.client.runtime import LocalRunner
from fedlightning.client.trainer_context import address_of
from fedlightning.compat.attached import on_device
from fedlightning.contract import Phase
from fedlightning.stacked.batches import Gatherer, LoaderSource, resident
from fedlightning.stacked.fit import StackedFit
from fedlightning.stacked.planning import Clock, configure
from fedlightning.stacked.stack import Stack
from fedlightning.stacked.trainees import Recipe, Trainee
from fedlightning.stacked.vectorizable import Finding


class StackedTraining:
    """Trains clients of one architecture in one stack.

    Args:
        runner: The client side of the federation.
        watching: Watches what is done for one client alone.
    """

    def __init__(self, runner: LocalRunner, watching: Callable[[list[str]], AbstractContextManager[None]]) -> None:
        self.runner = runner
        self._watching = watching
        self._device = runner.blueprint.device
        self._gatherer = Gatherer(self._device, runner.blueprint.precision.convert_input)

    def trainees(self, fits: Sequence[Fit], template: LightningModule) -> list[Trainee]:
        """Return the clients' batches and optimizers."""
        first, shared = fits[0], None
        by_rows = self._plain_transfer(template)
        trainees = []
        for fit in fits:
            module = template if fit.client.is_unbuilt else fit.client.module
            loader = fit.loader if fit.loader is not None else self.runner.loader(fit.message, "train")
            start_fit(self.runner, fit, loader)
            batches = self._batches(loader)
            in_epochs = (fit.phase.unit or self.runner.settings.unit) == "epochs"
            epochs, steps = (fit.work, None) if in_epochs else (None, fit.work)
            clock = Clock(epochs, steps, batches)
            recipe = shared or configure(module, self.runner.settings, fit.phase, fit.client.round, clock)
            if fit is first and not recipe.schedules and not clock.looked:
                shared = recipe
            seed = partial(self._seed, fit)
            source = resident(loader, batches, seed) if by_rows else None
            trainees.append(
                Trainee(
                    fit.client,
                    source or LoaderSource(loader, partial(self._convert, module), seed),
                    batches,
                    recipe,
                    max_epochs=epochs,
                    max_steps=steps,
                )
            )
        return trainees

    def fit(
        self, phase: Phase, module: LightningModule, trainees: Sequence[Trainee], recipe: Recipe, found: Finding
    ) -> Stack:
        """Train clients in a stack and return it."""
        runner = self.runner
        stack = Stack(module, len(trainees), self._device)
        if trainees[0].client.is_unbuilt:
            stack.fill([trainee.client.entries for trainee in trainees])
        else:
            for row, trainee in enumerate(trainees):
                stack.pull(row, trainee.client.module)
        with (
            nullcontext() if phase.train is None else only_training(module, phase.train),
            on_device(module, self._device),
        ):
            StackedFit(
                runner, phase, found, module, stack, trainees, recipe.optimizer, self._gatherer, self._watching
            ).run()
        return stack

    def _batches(self, loader: Any) -> int:
        """Return the batches of an epoch, as Lightning counts them under `limit_train_batches`."""
        return self.runner.settings.train_batches(len(loader))

    def _seed(self, fit: Fit, epoch: int) -> tuple[object, ...]:
        return self.runner.settings.seed, fit.client.visit, fit.client.id, address_of(fit.phase), epoch

    def _convert(self, module: LightningModule, batch: Any) -> Any:
        return move_batch(module, self.runner.blueprint.precision.convert_input(batch))

    @staticmethod
    def _plain_transfer(module: LightningModule) -> bool:
        return not any(is_overridden(hook, module) for hook in TRANSFERS)
