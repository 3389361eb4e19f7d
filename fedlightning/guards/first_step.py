"""Questions that only a step answers, asked before round 1: optimizers, sparse gradients, metrics, batches of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from fedlightning.client.client import Client
from fedlightning.client.data_summary import take_first_batch
from fedlightning.client.fit import fit
from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Fit
from fedlightning.client.runtime import LocalRunner
from fedlightning.compat.lightning_runs import quiet
from fedlightning.contract import Change, FederatedCallback, FirstStep, Phase
from fedlightning.contract.messages import Message
from fedlightning.datamodules.sampling import kept
from fedlightning.datamodules.views import samples_at
from fedlightning.engines.base import Engine
from fedlightning.errors import ConfigurationError, ControlFlow, listed, warn
from fedlightning.seeding import isolated
from fedlightning.wrappers import user_class

MOST_CLIENTS = 1000
"""Clients whose loaders are looked at for a last batch of one sample."""
OF_ONE = "Expected more than 1 value per channel"
"""Beginning of what torch says of a batch that cannot be normalised."""


def ask_first_step(
    engine: Engine, architecture: str, logged: Callable[[], Iterable[list[str]]], is_scored: bool
) -> None:
    """Let callbacks refuse what a step of training and of validation shows.

    Args:
        engine: Has the runner, and its data where they are here.
        architecture: Name of the architecture.
        logged: Gives what the module logs in validation, for some clients.
        is_scored: Whether models are scored on validation data.
    """
    runner, blueprint = engine.runner, engine.runner.blueprint
    asking = [one for one in blueprint.callbacks if one.claims("check_step")]
    correcting = next((one for one in blueprint.callbacks if corrects(one)), None)
    name = user_class(blueprint.template_of(architecture)).__name__
    seen = Look()
    batch = take_first_batch(runner) if engine.data_here and len(blueprint.architectures) == 1 else None
    if batch is not None:
        seen, _ = _first_step(runner, batch)
    sparse_only = seen.sparse and any(isinstance(one, torch.optim.SparseAdam) for one in seen.optimizers)
    if correcting is not None and sparse_only and not any(one.claims("shared_names") for one in blueprint.callbacks):
        raise ConfigurationError(
            f"The gradients of '{seen.sparse}' of {name} are sparse, {correcting.key} adds to gradients, and SparseAdam "
            "steps with sparse ones only. Take another optimizer, or leave the callback out."
        )
    if asking:
        heard = list(_found(logged))
        known = tuple({metric: None for names in heard for metric in names})  # one client may lack what another has
        state = blueprint.settings.optimizer_state
        step = FirstStep(name, tuple(seen.optimizers), seen.clips, state, known if heard else None, is_scored)
        for callback in asking:
            callback.check_step(step)


def corrects(callback: FederatedCallback) -> bool:
    """Return whether optimizers step with other gradients than those of the module's step."""
    return callback.claims("correct_gradient") or Change.ELSEWHERE in callback.facts.changes


def _found(logged: Callable[[], Iterable[list[str]]]) -> Iterable[list[str]]:
    try:
        yield from logged()
    except Exception:  # a step that fails is refused where all steps are tried
        return


class StepDone(ControlFlow):
    """Ends a fit after its first batch.

    Args:
        seen: What was seen of it. The callback of a fit is a copy.
    """

    def __init__(self, seen: Look) -> None:
        super().__init__()
        self.seen = seen


class Look(Callback):
    """Looks at the first step of a fit, and ends it.

    Attributes:
        optimizers: Optimizers of the fit.
        sparse: Name of a parameter whose gradient is sparse; empty: there is none.
        clips: Hook in which the module changes its gradients; empty: in none.
    """

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.sparse = self.clips = ""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note gradients that are sparse."""
        sparse = (n for n, p in pl_module.named_parameters() if p.grad is not None and p.grad.layout != torch.strided)
        self.sparse = self.sparse or next(sparse, "")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the optimizers, and end the fit."""
        self.optimizers = list(trainer.optimizers)
        kind = user_class(pl_module)
        hooks = ("configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward")
        self.clips = next((hook for hook in hooks if getattr(kind, hook) is not getattr(LightningModule, hook)), "")
        raise StepDone(self)


def _first_step(runner: LocalRunner, batch: Any) -> tuple[Look, Exception | None]:
    """Take one step on a copy of the module; return what was seen, and what the step raised."""
    client = next(one for one in runner.described.client_ids if runner.described.num_samples(one))
    loader: DataLoader[Any] = DataLoader([batch], batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]
    with isolated(runner.settings.seed, "first step"), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = runner.beside(runner.blueprint.without_callbacks([Look()], local_loop="trainer"))
        visitor = Client(alone, Message(0, client, {}, ()), ClientRecord(), runner.blueprint.build(client))
        visitor.num_samples = 1
        try:
            fit(alone, Fit(visitor, visitor.message, Phase(), alone.settings.work, loader))
        except StepDone as done:
            return done.seen, None
        except Exception as error:  # of the user's code: a step that fails is refused where all steps are tried
            return Look(), error
    return Look(), None


def _as_it_is(batch: Any) -> Any:
    return batch


# -- batches of one sample ---------------------------------------------------------------------------------------------
def tell_of_batches_of_one(runner: LocalRunner) -> None:
    """Say which clients' last batch is a single sample, which BatchNorm cannot normalise: their visits would fail."""
    found: dict[str, tuple[Any, int]] = {}  # client -> its loader, and its samples
    for client in runner.described.client_ids[:MOST_CLIENTS]:
        loader: Any = runner.data.client_dataloader(client, "train")
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.drop_last:
            continue
        counts = runner.described.over_rounds.get(client) or [len(loader.dataset)]  # type: ignore[arg-type]
        count = next((one for one in counts if loader.batch_size and one % loader.batch_size == 1), None)
        if count is not None:
            found[client] = loader, count
    if not found:
        return
    client, (loader, count) = next(iter(found.items()))
    with kept(loader.dataset):
        alone = runner.blueprint.precision.convert_input(loader.collate_fn(samples_at(loader.dataset, [0])))
    _, error = _first_step(runner, alone)
    if error is None or OF_ONE not in str(error):
        return
    way_out = (
        "Set drop_last=True in the data (batches are drawn anew in every epoch, so that no sample is left out for good), or "
        "another batch_size."
    )
    if count == 1:
        way_out = (
            "Give the client more samples or leave the client out, or take another normalisation, such as GroupNorm."
        )
    warn(
        f"The last batch of {len(found)} of {len(runner.described.client_ids)} clients ({listed(found)}) is a single "
        f"sample, which BatchNorm cannot normalise: client '{client}' has {count} training sample{'s' * (count > 1)} in "
        f"batches of {loader.batch_size}. Their visits will fail. {way_out}"
    )
