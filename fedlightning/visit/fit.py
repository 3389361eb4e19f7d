"""One fit of a client's module, by one of several fitters that give the same bits (:mod:`~fedlightning.visit.fitters`).

With each, :class:`~fedlightning.visit.visit_callback.VisitCallback` adds what a federation needs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, StochasticWeightAveraging, WeightAveraging

from fedlightning.blueprint.settings import LocalSettings
from fedlightning.compat.attached import trainer_of
from fedlightning.compat.system import file_name_of
from fedlightning.errors import Restart
from fedlightning.hooks import CallbackList, Phase
from fedlightning.visit import monitors
from fedlightning.visit.client import Client
from fedlightning.visit.fitters import FitJob, Fitter
from fedlightning.visit.logged_numbers import numbers
from fedlightning.visit.loss_terms import loss_terms
from fedlightning.visit.phase_loss import phase_loss
from fedlightning.visit.surroundings import Surroundings
from fedlightning.visit.undefined import nan_where_undefined
from fedlightning.visit.visit_callback import KeepingVisitCallback, VisitCallback, acting

OF_ONE_FIT = (StochasticWeightAveraging, WeightAveraging, BaseFinetuning)
"""Callbacks whose state counts the epochs and steps of one fit. Where a visit's clocks start anew, so do they: an average
that goes on by the old clock would never be updated again, and would replace what later visits train."""


def fit(
    client: Client,
    callbacks: CallbackList,
    settings: LocalSettings,
    loader: Any,
    start_sampler: Callable[[int, int, int], None],
    inside: Surroundings,
    *,
    phase: Phase,
    work: int,
    fitter: Fitter,
    val_loader: Any = None,
) -> VisitCallback:
    """Train `client.module` in place, and keep in the client's record what Lightning needs for the next visit."""
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
    job = FitJob(client, visit, everything, settings, loader, start_sampler, inside, phase, val_loader)
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
