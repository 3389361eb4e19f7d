"""Who trains a client's module: a :class:`Fitter`. Lightning's Trainer is one, and others attach that give the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_info

from fedlightning.client.client import Client
from fedlightning.client.settings import LocalSettings, limited
from fedlightning.client.trainer_context import TrainerContext
from fedlightning.client.visit_callback import VisitCallback
from fedlightning.compat.quiet import quiet
from fedlightning.contract import Phase
from fedlightning.datamodules.sampling import AddressedSampler

UNLIMITED = -1
UNKNOWN = float("inf")
OF_MODULE = ("state_dict", LightningModule.CHECKPOINT_HYPER_PARAMS_KEY)
"""Entries of a checkpoint that the module itself has: they are not kept between visits."""


class MemoryCheckpointIO(CheckpointIO):
    """A checkpoint in memory, so that Lightning's own save and resume carry a client's optimizers without a file."""

    def __init__(self, checkpoint: dict[str, Any] | None = None) -> None:
        self.checkpoint = checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.checkpoint = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.checkpoint is not None
        return self.checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        self.checkpoint = None


class LightningFitter:
    """Trains by Lightning's Trainer: the last fitter, which takes everything.

    Args:
        checks: Called with each of the Trainer's loops when it has ended (`ClientParts.loop_checks`).
    """

    name = "trainer"

    def __init__(self, checks: Sequence[Callable[..., None]] = ()) -> None:
        self._checks = checks

    def refusal(self, module: LightningModule, loader: Any) -> None:
        """Refuse nothing."""

    def fit(self, job: FitJob) -> Trainer:
        """Train the client's module in place."""
        client, visit, settings, loader, val_loader = job.client, job.visit, job.settings, job.loader, job.val_loader
        callbacks, inside, phase = job.callbacks, job.inside, job.phase
        record = client.record.lightning[phase.name]
        keep = settings.optimizer_state == "keep"
        arguments = {key: copy.deepcopy(value) for key, value in settings.trainer_arguments.items()}
        memory = MemoryCheckpointIO(_resumable(record.get("checkpoint"), client.module) if keep else None)
        plugins = arguments.pop("plugins", None) or []
        plugins = [*plugins] if isinstance(plugins, list | tuple) else [plugins]
        if keep:
            plugins.append(memory)
        in_epochs = visit.unit == "epochs"
        epochs_before = int(record.get("epochs", 0)) if keep else 0
        limit = visit.work
        if keep:
            horizon = settings.max_rounds * (settings.work if phase.work is None else phase.work)
            limit = max(horizon, int(record.get("epochs" if in_epochs else "steps", 0)) + visit.work)
        if val_loader is None:
            arguments["limit_val_batches"] = 0  # Lightning would take the module's own val_dataloader
        elif not in_epochs and arguments.get("val_check_interval") is None:
            batches = visit.work * arguments.get("accumulate_grad_batches", 1)
            if batches < limited(
                len(loader), arguments.get("limit_train_batches")
            ):  # the visit ends inside its first epoch
                arguments |= {"val_check_interval": batches, "check_val_every_n_epoch": None}
        if inside.folder is not None:
            arguments["default_root_dir"] = inside.folder
        if isinstance(getattr(loader, "sampler", None), AddressedSampler):
            arguments["use_distributed_sampler"] = False  # it shares the batches among ranks itself
        with quiet():
            trainer = Trainer(
                **arguments,
                max_epochs=limit if in_epochs else UNLIMITED,
                max_steps=UNLIMITED if in_epochs else limit,
                plugins=plugins,
                callbacks=callbacks,
                logger=inside.logger,
                enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
            )
            # A visit ends its last epoch, even early. With a step limit Lightning would continue inside that epoch.
            trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]
            job.start_sampler(epochs_before, trainer.global_rank, trainer.world_size)
            vars(trainer)["datamodule"] = inside.datamodule
            client.scratch["trainer"] = trainer
            try:
                trainer.fit(
                    client.module,
                    train_dataloaders=loader,
                    val_dataloaders=val_loader,
                    ckpt_path="memory" if keep and memory.checkpoint is not None else None,
                )
            except BaseException:
                # Lightning stops the profiler of a fit that ends well only. Two of torch's that run at once end the process.
                cast(Any, trainer).profiler.teardown(stage="fit")  # which Trainer sets in a function of its own
                raise
            expected = trainer.num_training_batches if in_epochs and not trainer.should_stop else UNKNOWN
            for check in self._checks:
                check(trainer.fit_loop.epoch_loop, "training_step", client.module, loader, expected)
                check(trainer.fit_loop.epoch_loop.val_loop, "validation_step", client.module, val_loader)
            vars(trainer)["datamodule"] = None  # its hyper-parameters are no part of what the client keeps
            if keep:
                trainer.save_checkpoint("memory")
                record["epochs"], record["steps"] = trainer.current_epoch, trainer.global_step
                record["checkpoint"] = {k: v for k, v in (memory.checkpoint or {}).items() if k not in OF_MODULE}
        left = vars(client.module).get("forward")
        if getattr(left, "__func__", None) is type(client.module).forward:
            del client.module.forward  # under DDP Lightning leaves the bound method on the instance
        return trainer

    def release(self, trainer: Trainer) -> None:
        """Cut the references of a finished Trainer to the client's model.

        A Trainer is full of reference cycles. Without this, the models of many clients stay in memory until Python's
        garbage collector runs.
        """
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
            optimizer.param_groups.clear()
        strategy, fit_loop = trainer.strategy, trainer.fit_loop
        strategy.optimizers, strategy.lr_scheduler_configs = [], []
        strategy.model = strategy._lightning_module = None
        loops = (fit_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        for loop in loops:
            loop._data_source.instance = None
        trainer._data_connector._datahook_selector = None
        getattr(trainer, "callbacks", []).clear()


def _resumable(checkpoint: dict[str, Any] | None, module: LightningModule) -> dict[str, Any] | None:
    """Return a copy of the kept checkpoint with the module's present weights; optimizers edit their state in place."""
    if checkpoint is None:
        return None
    own = (module.state_dict(), dict(module.hparams))
    return copy.deepcopy(checkpoint) | dict(zip(OF_MODULE, own, strict=True))


@dataclass(frozen=True)
class FitJob:
    """What a fitter needs for one fit.

    Attributes:
        client: Its module is trained in place.
        visit: Counts epochs and steps, and ends the fit.
        callbacks: All callbacks of the fit in Lightning's order, `visit` among them.
        settings: How every client trains.
        loader: Training batches.
        start_sampler: Called before the first batch, with the epochs before, the rank and the number of ranks.
        inside: What the trainer shows.
        phase: The part of the visit.
        val_loader: Batches to validate on; `None`: the visit does not.
    """

    client: Client
    visit: VisitCallback
    callbacks: list[Callback]
    settings: LocalSettings
    loader: Any
    start_sampler: Callable[[int, int, int], None]
    inside: TrainerContext
    phase: Phase
    val_loader: Any


class Fitter(Protocol):
    """A local loop. It does what Lightning's Trainer does, bit for bit, and refuses what it cannot."""

    @property
    def name(self) -> str:
        """Its name in `local_loop` and in the summary of a run."""

    def refusal(self, module: LightningModule, loader: Any) -> str | None:
        """Return why it cannot train a module on a loader; `None`: it can."""

    def fit(self, job: FitJob) -> Any:
        """Train, and return the Trainer that did it, or what stands for it."""

    def release(self, trainer: Any) -> None:
        """Cut the references of a finished Trainer to the client's model."""


class FitterChoice:
    """Chooses the fitter of each fit, and reports once why it is not the first.

    Args:
        asked: `local_loop`: the name of a fitter, or `"auto"`.
        fitters: In the order in which they are asked; the last is Lightning's Trainer, which takes everything.

    Attributes:
        reason: Why the first one is not used; `None` if it is.
    """

    def __init__(self, asked: str, fitters: Sequence[Fitter]) -> None:
        names = [fitter.name for fitter in fitters]
        if asked not in ("auto", *names):
            raise ValueError(f"local_loop={asked!r} cannot be used: no such loop is attached, only {', '.join(names)}.")
        self._asked, self.last = asked, fitters[-1]
        self._fitters = [fitter for fitter in fitters if asked in ("auto", fitter.name) or fitter is self.last]
        self.reason: str | None = f"local_loop={asked!r}" if asked == self.last.name else None

    def choose(self, module: LightningModule, loader: Any) -> Fitter:
        """Return who fits a module on a loader."""
        reasons = []
        for fitter in self._fitters[:-1]:
            reason = fitter.refusal(module, loader)
            if reason is None:
                return fitter
            reasons.append(reason)
        if reasons:
            self._explain(reasons[0])
        return self.last

    def give_up(self, reason: str) -> None:
        """Train by Lightning's Trainer for the rest of the run, because another fitter met `reason` while it ran."""
        self._explain(reason)
        self._fitters = [self.last]

    @property
    def used(self) -> str:
        """Fitter that trained, with the reason if it was not the first one; for the run's summary."""
        return self._fitters[0].name if self.reason is None else f"{self.last.name} ({self.reason})"

    def _explain(self, reason: str) -> None:
        first = self._fitters[0]
        if first is self.last:
            return
        if self._asked == first.name:
            raise ValueError(
                f"local_loop={first.name!r} cannot be used: {reason}. Use local_loop='auto' or {self.last.name!r}."
            )
        if self.reason is None:
            rank_zero_info(f"Local training uses Lightning's Trainer, not the {first.name} loop: {reason}.")
            self.reason = reason
