"""Questions that only a step answers, asked before round 1: optimizers, sparse gradients, metrics, batches of one."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client import Client
from fedlightning.client.data_summary import take_first_batch
from fedlightning.client.fit import fit
from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Fit
from fedlightning.client.runtime import LocalRunner
from fedlightning.compat.lightning_runs import quiet
from fedlightning.contract import Change, FederatedCallback, Phase
from fedlightning.contract.messages import Message
from fedlightning.datamodules.sampling import kept
from fedlightning.datamodules.views import samples_at
from fedlightning.errors import ConfigurationError, ControlFlow, listed, warn
from fedlightning.seeding import isolated
from fedlightning.wrappers import user_class

MOST_CLIENTS = 1000
"""Clients whose loaders are looked at for a last batch of one sample."""
OF_ONE = "Expected more than 1 value per channel"
"""Beginning of what torch says of a batch that cannot be normalised."""


def corrects(callback: FederatedCallback) -> bool:
    """Return whether optimizers step with other gradients than those of the module's step."""
    return callback.claims("correct_gradient") or Change.ELSEWHERE in callback.facts.changes


def probe_first_step(runner: LocalRunner) -> FirstStepProbe:
    """Return what a step on the first batch shows; nothing where clients' models differ."""
    batch = take_first_batch(runner) if len(runner.blueprint.architectures) == 1 else None
    return FirstStepProbe() if batch is None else _first_step(runner, batch)[0]


def refuse_sparse_gradients(blueprint: Blueprint, architecture: str, seen: FirstStepProbe) -> None:
    """Refuse callbacks that add to gradients of which the optimizer takes sparse ones only."""
    correcting = next((one for one in blueprint.callbacks if corrects(one)), None)
    sparse_only = seen.sparse and any(isinstance(one, torch.optim.SparseAdam) for one in seen.optimizers)
    if correcting is not None and sparse_only and not any(one.claims("shared_names") for one in blueprint.callbacks):
        name = user_class(blueprint.template_of(architecture)).__name__
        raise ConfigurationError(
            f"The gradients of '{seen.sparse}' of {name} are sparse, {correcting.key} adds to gradients, and SparseAdam "
            "steps with sparse ones only. Take another optimizer, or leave the callback out."
        )


class FirstStepReached(ControlFlow):
    """Ends a fit after its first batch.

    Args:
        seen: What was seen of it. The callback of a fit is a copy.
    """

    def __init__(self, seen: FirstStepProbe) -> None:
        super().__init__()
        self.seen = seen


class FirstStepProbe(Callback):
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
        raise FirstStepReached(self)


def _first_step(runner: LocalRunner, batch: Any) -> tuple[FirstStepProbe, Exception | None]:
    """Take one step on a copy of the module; return what was seen, and what the step raised."""
    client = next(one for one in runner.described.client_ids if runner.described.num_samples(one))
    loader: DataLoader[Any] = DataLoader([batch], batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]
    with isolated(runner.settings.seed, "first step"), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = runner.beside(runner.blueprint.without_callbacks([FirstStepProbe()], local_loop="trainer"))
        visitor = Client(alone, Message(0, client, {}, ()), ClientRecord(), runner.blueprint.build(client))
        visitor.num_samples = 1
        try:
            fit(alone, Fit(visitor, visitor.message, Phase(), alone.settings.work, loader))
        except FirstStepReached as done:
            return done.seen, None
        except Exception as error:  # of the user's code: a step that fails is refused where all steps are tried
            return FirstStepProbe(), error
    return FirstStepProbe(), None


def _as_it_is(batch: Any) -> Any:
    return batch


# -- batches of one sample ---------------------------------------------------------------------------------------------
def warn_single_sample_batches(runner: LocalRunner) -> None:
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
