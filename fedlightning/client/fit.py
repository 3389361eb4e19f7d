"""One fit of a client's module, by one of several fitters that give the same bits (:mod:`~fedlightning.client.fit`).

With each, :class:`~fedlightning.client.trainer_context.VisitCallback` seeds epochs, calls `correct_gradient` before every
optimizer step, and counts the steps.

Who trains the module is a :class:`Fitter`: Lightning's Trainer is one, and others attach. What callbacks add to the loss, and
which optimizers a module configures, is found here for all of them.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from lightning import __version__ as lightning_version
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fedlightning.client import logged_metrics
from fedlightning.client.client import Client
from fedlightning.client.data_summary import limited, start_sampler
from fedlightning.client.logged_metrics import nan_where_undefined, numbers
from fedlightning.client.phases import only_training, phase_loss
from fedlightning.client.requests import Fit, LocalSettings
from fedlightning.client.trainer_context import (
    ClientLogger,
    DataModuleView,
    EndsByEpochs,
    EndsBySteps,
    TrainerContext,
    VisitCallback,
    phase_address,
    select_active_callbacks,
)
from fedlightning.compat.lazy_clones import copy_module
from fedlightning.compat.lightning_runs import quiet, trainer_of
from fedlightning.compat.system import file_name_of
from fedlightning.contract import FederatedCallback, Phase, TrainingData
from fedlightning.contract.messages import Message
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.errors import ConfigurationError, Restart
from fedlightning.tensors.entries import optimizers_in
from fedlightning.wrappers.mixing import Mixin, mixed

if TYPE_CHECKING:
    from fedlightning.client.runtime import ClientRuntime


def optimizers_of(module: LightningModule) -> list[Optimizer]:
    """The optimizers a module configures; empty where it needs a running trainer to tell."""
    try:
        configuration = configured(module)
    except (RuntimeError, AttributeError):  # it needs a trainer, or what `setup` and other hooks of a fit make
        return []
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers fails: {' '.join(str(error).split()).rstrip('.')} "
            f"({type(error).__name__})."
        ) from error
    # a module that optimizes manually may move its entries itself
    if configuration is None and module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__}.configure_optimizers returns nothing, so nothing would train. Return an optimizer."
        )
    optimizers = optimizers_in(configuration)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, value in group.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} of {type(module).__name__} has {name}={value}; it must be finite."
                    )
    return optimizers


def have_memory(module: LightningModule) -> bool | None:
    """Return whether the optimizers carry anything from step to step: momentum, moments, or a schedule of learning rates.

    Only then does it matter whether they are kept from visit to visit. `None`: it cannot be told without a trainer.
    """
    try:
        configuration = configured(module)
    except Exception:  # it may ask for a trainer in any way; the run itself has worked
        return None
    optimizers = optimizers_in(configuration)
    if schedulers_in(configuration):
        return True
    return any(
        type(optimizer) is not SGD or any(group.get("momentum") for group in optimizer.param_groups)
        for optimizer in optimizers
    )


def configured(module: LightningModule) -> Any:
    """Return what `configure_optimizers` gives for a copy of a module, as it is."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy_module(module).configure_optimizers()


def schedulers_in(value: Any) -> list[LRScheduler]:
    """The schedulers of learning rates in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(value, LRScheduler):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [scheduler for item in items for scheduler in schedulers_in(item)]


def configured_callbacks(module: LightningModule) -> list[Callback]:
    """Return the callbacks that a module brings along; none if it needs a trainer to tell."""
    try:
        configured = module.configure_callbacks()
    except Exception:  # of the user's code
        return []
    return [configured] if isinstance(configured, Callback) else list(configured or ())


UNLIMITED = -1
UNKNOWN = float("inf")
REBUILT = frozenset((
    "epoch", "global_step", "pytorch-lightning_version", "loops", "state_dict",
    *(getattr(LightningModule, f"CHECKPOINT_HYPER_PARAMS_{part}") for part in ("NAME", "KEY", "TYPE")),
))  # fmt: skip
"""Entries of Lightning's checkpoint that follow from the module and from the counts of a record; they are not kept."""
IN_MEMORY = "memory"
"""The `ckpt_path` of a fit that goes on."""


class InMemoryCheckpointIO(CheckpointIO):
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
        callbacks, inside = job.callbacks, job.inside
        record, keep = job.record, job.keeps
        arguments = {key: copy.deepcopy(value) for key, value in settings.trainer_arguments.items()}
        memory = InMemoryCheckpointIO()
        plugins = arguments.pop("plugins", None) or []
        plugins = [*plugins] if isinstance(plugins, list | tuple) else [plugins]
        if keep:
            plugins.append(memory)
        in_epochs, limit = visit.unit == "epochs", job.limit
        if val_loader is None:
            arguments["limit_val_batches"] = 0  # Lightning would take the module's own val_dataloader
        elif not in_epochs and arguments.get("val_check_interval") is None:
            batches = visit.work * arguments.get("accumulate_grad_batches", 1)
            # the visit ends inside its first epoch
            if batches < limited(len(loader), arguments.get("limit_train_batches")):
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
            job.start_sampler(job.epochs_before, trainer.global_rank, trainer.world_size)
            if keep and "checkpoint" in record:
                memory.checkpoint = resumable(record, trainer, client.module)
            vars(trainer)["datamodule"] = inside.datamodule
            client.scratch["trainer"] = trainer
            try:
                trainer.fit(
                    client.module,
                    train_dataloaders=loader,
                    val_dataloaders=val_loader,
                    ckpt_path=IN_MEMORY if keep and memory.checkpoint is not None else None,
                )
            except BaseException:
                # Lightning stops the profiler of a fit that ends well only. Two of torch's that run at once end the process.
                cast(Any, trainer).profiler.teardown(stage="fit")  # which Trainer sets in a function of its own
                raise
            expected = trainer.num_training_batches if in_epochs and not trainer.should_stop else UNKNOWN
            for check in self._checks:
                check(trainer.fit_loop.epoch_loop, "training_step", client.module, loader, expected)
                check(trainer.fit_loop.epoch_loop.val_loop, "validation_step", client.module, val_loader)
            vars(trainer)["datamodule"] = None  # its hyper-parameters are not part of what the client keeps
            if keep:
                trainer.save_checkpoint(IN_MEMORY)
                saved = memory.checkpoint or {}
                record["epochs"], record["steps"] = trainer.current_epoch, trainer.global_step
                record["batches"] = trainer.fit_loop.epoch_loop.total_batch_idx + 1
                record["windows"] = saved["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
                record["checkpoint"] = {name: value for name, value in saved.items() if name not in REBUILT}
        left = vars(client.module).get("forward")
        if getattr(left, "__func__", None) is type(client.module).forward:
            del client.module.forward  # under DDP Lightning leaves the bound method on the instance
        return trainer

    def detach_trainer(self, trainer: Trainer) -> None:
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


def resumable(record: Mapping[str, Any], trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return Lightning's checkpoint of what a client keeps and of its module; optimizers edit their state in place.

    The progress of the loops is that of a fit that has ended with a whole epoch.
    """
    loops = trainer.fit_loop.state_dict()
    manual = "epoch_loop.manual_optimization.optim_step_progress"
    steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    counts = [(loops["epoch_progress"], "epochs"), (loops["epoch_loop.batch_progress"], "batches")]
    for progress, name in (*counts, (steps if module.automatic_optimization else loops[manual], "steps")):
        for counters in (progress["total"], progress["current"]):
            counters.update(dict.fromkeys(counters, record.get(name, 0)))
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = record.get("windows", 0)
    entries = clocks(record["epochs"], record["steps"]) | of_module(module) | record["checkpoint"]
    return copy.deepcopy(entries) | {"loops": {"fit_loop": loops}}


def clocks(epochs: int, steps: int) -> dict[str, Any]:
    """Return the entries of a checkpoint that say when it was made, and by what."""
    return {"epoch": epochs, "global_step": steps, "pytorch-lightning_version": lightning_version}


def of_module(module: LightningModule) -> dict[str, Any]:
    """Return the entries of a checkpoint that a module has itself."""
    options = {LightningModule.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams)} if module.hparams else {}
    return {"state_dict": module.state_dict(), **options}


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

    @property
    def keeps(self) -> bool:
        """Whether optimizers, their schedules and their clocks go on from visit to visit."""
        return self.settings.optimizer_state == "keep"

    @property
    def record(self) -> dict[str, Any]:
        """What the client keeps of fits of this phase."""
        return self.client.record.lightning[self.phase.name]

    @property
    def epochs_before(self) -> int:
        """Epochs that the clocks count before this fit."""
        return int(self.record.get("epochs", 0)) if self.keeps else 0

    @property
    def limit(self) -> int:
        """Epochs or steps at which the Trainer ends: where clocks go on, those of the whole federation."""
        if not self.keeps:
            return self.visit.work
        horizon = self.settings.max_rounds * (self.settings.work if self.phase.work is None else self.phase.work)
        return max(horizon, int(self.record.get(self.visit.unit, 0)) + self.visit.work)


class Fitter(Protocol):
    """A local loop. It does what Lightning's Trainer does, bit for bit, and refuses what it cannot."""

    @property
    def name(self) -> str:
        """Its name in `local_loop` and in the summary of a run."""

    def refusal(self, module: LightningModule, loader: Any) -> str | None:
        """Return why it cannot train a module on a loader; `None`: it can."""

    def fit(self, job: FitJob) -> Any:
        """Train, and return the Trainer that did it, or what stands for it."""

    def detach_trainer(self, trainer: Any) -> None:
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

    def adopt(self, reason: str | None) -> None:
        """Take over why another process, or the run before this one, did not train by the first fitter."""
        self.reason = self.reason or reason

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


class LossTermMixin(Mixin):
    """Runs a client's training step with feature taps attached, then adds the callbacks' terms to its loss."""

    wraps = ("training_step",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the step's output with its loss replaced. A skipped batch (`None`) stays skipped."""
        loss_terms: _Terms = vars(self)["loss_terms"]
        client, callbacks = loss_terms.client, loss_terms.callbacks
        module = cast(LightningModule, self)
        batch = args[0] if args else kwargs["batch"]
        taps = {callback.key: callback.feature_taps(module) for callback in callbacks}
        with ExitStack() as stack:
            for of_callback in taps.values():
                for tap in of_callback.values():
                    stack.enter_context(tap)
            output = call(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, dict) else output
            if not isinstance(loss, Tensor):
                return output
            for callback in callbacks:
                features = {label: tap.features for label, tap in taps[callback.key].items()}
                loss = callback.training_loss(client, module, batch, loss, features)
        return {**output, "loss": loss} if isinstance(output, dict) else loss


class _Terms:
    """The client and the callbacks whose terms act. A copy of the module refers to the same."""

    def __init__(self, client: Client, callbacks: Sequence[FederatedCallback]) -> None:
        self.client, self.callbacks = client, tuple(callbacks)

    def __deepcopy__(self, memo: Any) -> _Terms:
        return self


@contextmanager
def loss_terms(client: Client, callbacks: Sequence[FederatedCallback]) -> Iterator[None]:
    """Within the block, the training step of the client's module returns the loss with the term of every callback.

    The module's class is swapped and put back, so its logging, hooks and names stay the same.
    """
    module: LightningModule = client.module
    if not module.automatic_optimization:
        raise ValueError(
            f"{callbacks[0].key} adds a term to the loss that training_step returns, but {type(module).__name__} "
            "optimizes manually. Use automatic optimization."
        )
    with mixed(module, LossTermMixin, loss_terms=_Terms(client, callbacks)):
        yield


OF_ONE_FIT = (StochasticWeightAveraging, WeightAveraging, BaseFinetuning)
"""Callbacks whose state counts the epochs and steps of one fit. Where a visit's clocks start anew, so do they: an average
that goes on by the old clock would never be updated again, and would replace what later visits train."""


def fit(runner: ClientRuntime, request: Fit) -> VisitCallback:
    """Train a client's module in place, and keep in its record what Lightning needs for the next visit."""
    client, phase, settings = request.client, request.phase, runner.settings
    loader = _find_batches(runner, request)
    inside = _make_trainer_context(runner, client, phase)
    fitter = runner.loop.last if settings.logs(client.id) else runner.loop.choose(client.module, loader)
    val_loader = _find_validation_batches(runner, request.message)
    runner.scorer.fitted.add(client.module)
    with nullcontext() if phase.train is None else only_training(client.module, phase.train):
        return _fit(runner, request, fitter, loader, inside, val_loader)


def _fit(
    runner: ClientRuntime, request: Fit, fitter: Fitter, loader: Any, inside: TrainerContext, val_loader: Any
) -> VisitCallback:
    client, phase, work = request.client, request.phase, request.work
    callbacks, settings = runner.callbacks, runner.settings
    record = client.record.lightning.setdefault(phase.name, {})
    keeps, by_steps = settings.optimizer_state == "keep", (phase.unit or settings.unit) == "steps"
    ends = keeps or (by_steps and not client.module.automatic_optimization)
    kind = VisitCallback if not ends else EndsBySteps if by_steps else EndsByEpochs
    visit = kind(client, callbacks, settings, phase, work)
    ordinary = [copy.deepcopy(callback) for callback in settings.callbacks]
    ordinary = [callback for callback in ordinary if _in_own_folder(callback, client.id, inside.folder)]
    for callback in ordinary if settings.optimizer_state == "reset" else ():
        state = record.get("callbacks", {}).get(callback.state_key)
        if state is not None and not isinstance(callback, OF_ONE_FIT):
            callback.load_state_dict(copy.deepcopy(state))
    everything = [*callbacks, visit, *ordinary]
    start = partial(start_fit, runner, request, loader)
    job = FitJob(client, visit, everything, settings, loader, start, inside, phase, val_loader)
    validates, name = val_loader is not None, type(client.module).__name__
    own_loss = nullcontext() if phase.is_task else phase_loss(client, phase)
    acting_terms = select_active_callbacks(callbacks.loss_terms(), phase)
    with_terms = loss_terms(client, acting_terms) if acting_terms else nullcontext()
    with own_loss, with_terms, nan_where_undefined(client.module):
        try:
            trainer = fitter.fit(job)
        except (Exception, Restart) as error:
            logged_metrics.require(trainer_of(client.module), name, validates, error)
            raise
        logged_metrics.require(trainer, name, validates)
    if settings.logs(client.id) and settings.optimizer_state == "reset":
        record["logged_steps"] = record.get("logged_steps", 0) + int(trainer.global_step)
    if keeps:
        record["round"] = client.round  # up to which its learning rates have decayed
    record["precision"] = trainer.precision_plugin.state_dict()
    batches = trainer.num_training_batches
    states = {callback.state_key: callback.state_dict() for callback in ordinary}
    record["callbacks"] = {key: state for key, state in states.items() if state}
    if phase.loss is None:  # else it is not a metric of the task
        client.metrics |= numbers(trainer.callback_metrics, client.module)
    fitter.detach_trainer(trainer)
    if visit.attempts == 0 and work > 0 and client.module.automatic_optimization and batches:
        raise RuntimeError(
            f"Client '{client.id}' was asked for {work} of work but took no optimizer step. "
            "Check accumulate_grad_batches, limit_train_batches and callbacks that stop training."
        )
    return visit


def start_fit(
    runner: ClientRuntime, fit: Fit, loader: Any, offset: int = 0, rank: int = 0, world_size: int = 1
) -> None:
    """Address the order of the batches of a fit."""
    place = phase_address(fit.phase)
    purpose = "" if place == "fit" else f"phase-{place}"
    start_sampler(runner, loader, fit.message, purpose, epoch_offset=offset, rank=rank, world_size=world_size)


def _find_batches(runner: ClientRuntime, request: Fit) -> Any:
    """Return the batches that a fit trains on."""
    data = request.phase.data
    if isinstance(data, str) and data == "train":
        loader = runner.loader(request.message, "train") if request.loader is None else request.loader
        owner = runner.callbacks.answering(TrainingData, "training_batches")
        return loader if owner is None or loader is None else owner.training_batches(request.client, loader)
    loader = request.client.public(shuffle=True) if isinstance(data, str) else data
    if len(loader) == 0:
        raise ValueError(f"phase '{request.phase.name}' has no batch to train on; leave the phase out")
    return loader


def _make_trainer_context(runner: ClientRuntime, client: Client, phase: Phase) -> TrainerContext:
    """Return what the Trainer of a fit shows to the module and its callbacks."""
    settings, source = runner.settings, runner.source
    folder = settings.folder_of(client.id)
    logs = client.logs if settings.logs(client.id) and not runner.callbacks.covers_training else None
    before = client.record.lightning.get(phase.name, {}).get("logged_steps", 0)
    prefix = "" if phase.name == "fit" else f"{phase.name}/"
    seen = None if source is None else DataModuleView(source, client.loader)
    return TrainerContext(folder, ClientLogger(folder, logs, prefix, before), seen)


def _find_validation_batches(runner: ClientRuntime, message: Message) -> DataLoader[Any] | None:
    """Return the batches on which a visit validates inside training; `None` if it does not."""
    if runner.monitor is None and runner.settings.trainer_arguments.get("check_val_every_n_epoch") is None:
        return None
    loader = runner.loader(message, "val")
    if runner.monitor is not None and (loader is None or len(loader) == 0):
        raise ValueError(
            f"{runner.monitor}, which {type(runner.blueprint.template).__name__} does not log in training, and client "
            f"'{message.client}' has no validation data. Give every client some (val_fraction), or monitor a metric "
            "of training."
        )
    return loader


def _in_own_folder(callback: Callback, client: str, folder: str | None) -> bool:
    """Give a checkpoint callback the client's own folder; return False if the run writes nothing, so that it is left out."""
    if not isinstance(callback, Checkpoint):
        return True
    folder_of_user = getattr(callback, "dirpath", None)
    if folder_of_user is not None:
        callback.dirpath = os.path.join(folder_of_user, file_name_of(client))  # type: ignore[attr-defined]
    elif folder is not None and hasattr(callback, "dirpath"):
        callback.dirpath = os.path.join(folder, "checkpoints")
    return folder_of_user is not None or folder is not None
