"""One fit of a client's module, by one of several fitters that give the same bits (:mod:`~fedlightning.client.fitters`).

With each, :class:`~fedlightning.client.visit_callback.VisitCallback` seeds epochs, calls `correct_gradient` before every
optimizer step, and counts the steps.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, StochasticWeightAveraging, WeightAveraging
from torch.utils.data import DataLoader

from fedlightning.client import monitored_metrics as monitors
from fedlightning.client.client import Client
from fedlightning.client.fitters import FitJob, Fitter
from fedlightning.client.freezing import only_training
from fedlightning.client.local_data import start_sampler
from fedlightning.client.logged_numbers import numbers
from fedlightning.client.loss_terms import loss_terms
from fedlightning.client.phase_loss import phase_loss
from fedlightning.client.requests import Fit
from fedlightning.client.trainer_context import ClientData, ClientLogger, TrainerContext
from fedlightning.client.undefined_metrics import nan_where_undefined
from fedlightning.client.visit_callback import KeepingVisitCallback, VisitCallback, acting, address_of
from fedlightning.compat.attached import trainer_of
from fedlightning.compat.system import file_name_of
from fedlightning.contract import Phase, TrainingData
from fedlightning.contract.messages import Message
from fedlightning.errors import Restart

if TYPE_CHECKING:
    from fedlightning.client.runtime import LocalRunner

OF_ONE_FIT = (StochasticWeightAveraging, WeightAveraging, BaseFinetuning)
"""Callbacks whose state counts the epochs and steps of one fit. Where a visit's clocks start anew, so do they: an average
that goes on by the old clock would never be updated again, and would replace what later visits train."""


def fit(runner: LocalRunner, request: Fit) -> VisitCallback:
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
    runner: LocalRunner, request: Fit, fitter: Fitter, loader: Any, inside: TrainerContext, val_loader: Any
) -> VisitCallback:
    client, phase, work = request.client, request.phase, request.work
    callbacks, settings = runner.callbacks, runner.settings
    record = client.record.lightning.setdefault(phase.name, {})
    manual_steps = not client.module.automatic_optimization and (phase.unit or settings.unit) == "steps"
    kind = KeepingVisitCallback if settings.optimizer_state == "keep" or manual_steps else VisitCallback
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
    acting_terms = acting(callbacks.loss_terms(), phase)
    terms = loss_terms(client, acting_terms) if acting_terms else nullcontext()
    with own_loss, terms, nan_where_undefined(client.module):
        try:
            trainer = fitter.fit(job)
        except (Exception, Restart) as error:
            monitors.require(trainer_of(client.module), name, validates, error)
            raise
        monitors.require(trainer, name, validates)
    if settings.logs(client.id) and settings.optimizer_state == "reset":
        record["logged_steps"] = record.get("logged_steps", 0) + int(trainer.global_step)
    record["precision"] = trainer.precision_plugin.state_dict()
    batches = trainer.num_training_batches
    states = {callback.state_key: callback.state_dict() for callback in ordinary}
    record["callbacks"] = {key: state for key, state in states.items() if state}
    if phase.loss is None:  # else it is no metric of the task
        client.metrics |= numbers(trainer.callback_metrics, client.module)
    fitter.release(trainer)
    if visit.attempts == 0 and work > 0 and client.module.automatic_optimization and batches:
        raise RuntimeError(
            f"Client '{client.id}' was asked for {work} of work but took no optimizer step. "
            "Check accumulate_grad_batches, limit_train_batches and callbacks that stop training."
        )
    return visit


def start_fit(runner: LocalRunner, fit: Fit, loader: Any, offset: int = 0, rank: int = 0, world_size: int = 1) -> None:
    """Address the order of the batches of a fit."""
    place = address_of(fit.phase)
    purpose = "" if place == "fit" else f"phase-{place}"
    start_sampler(runner, loader, fit.message, purpose, epoch_offset=offset, rank=rank, world_size=world_size)


def _find_batches(runner: LocalRunner, request: Fit) -> Any:
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


def _make_trainer_context(runner: LocalRunner, client: Client, phase: Phase) -> TrainerContext:
    """Return what the Trainer of a fit shows to the module and its callbacks."""
    settings, source = runner.settings, runner.source
    folder = settings.folder_of(client.id)
    logs = client.logs if settings.logs(client.id) else None
    before = client.record.lightning.get(phase.name, {}).get("logged_steps", 0)
    prefix = "" if phase.name == "fit" else f"{phase.name}/"
    seen = None if source is None else ClientData(source, partial(runner.loader, client.message))
    return TrainerContext(folder, ClientLogger(folder, logs, prefix, before), seen)


def _find_validation_batches(runner: LocalRunner, message: Message) -> DataLoader[Any] | None:
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
    given = getattr(callback, "dirpath", None)
    if given is not None:
        callback.dirpath = os.path.join(given, file_name_of(client))  # type: ignore[attr-defined]
    elif folder is not None and hasattr(callback, "dirpath"):
        callback.dirpath = os.path.join(folder, "checkpoints")
    return given is not None or folder is not None
