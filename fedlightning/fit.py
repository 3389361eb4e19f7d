"""The local loop ``trainer``: one fit of a client's module by a quiet Lightning Trainer of its own.

Everything Lightning can do works inside a visit, because it is Lightning that does it. :class:`VisitCallback` adds what
a federation needs: addressed seeds, corrections on unscaled gradients, and a count of the steps that really happened.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor
from torch.optim import Optimizer

from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.hooks import CallbackList, FederatedCallback, GradientContext, Phase
from fedlightning.loss_terms import loss_terms
from fedlightning.quiet import quiet
from fedlightning.seeding import seed_all

if TYPE_CHECKING:
    from fedlightning.client import Client

UNLIMITED = -1


@dataclass
class LocalSettings:
    """How every client trains. Plain values: a worker process can be given them.

    Attributes:
        trainer_arguments: Lightning Trainer arguments, forwarded as they are.
        callbacks: ordinary Lightning callbacks; each visit works on copies with the client's own state.
        local_epochs, local_steps: work per visit, one of them.
        optimizer_state: ``"reset"``: optimizers, schedulers and clocks are new in every visit; ``"keep"``: they
            go on, with the horizon of the whole federation.
        lr_decay: factor on every learning rate per round.
    """

    seed: int
    max_rounds: int
    local_epochs: int | None = 1
    local_steps: int | None = None
    optimizer_state: Literal["reset", "keep"] = "reset"
    lr_decay: float = 1.0
    trainer_arguments: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)
    logger: Any = False

    @property
    def unit(self) -> Literal["epochs", "steps"]:
        """What the trainer counts work in."""
        return "epochs" if self.local_steps is None else "steps"

    @property
    def work(self) -> int:
        """Default work of a visit, in the trainer's unit."""
        return self.local_steps if self.local_steps is not None else int(self.local_epochs or 0)


class MemoryCheckpointIO(CheckpointIO):
    """Lets Lightning's own save and resume carry a client's optimizers and clocks, without a file."""

    def __init__(self, checkpoint: dict[str, Any] | None = None) -> None:
        self.checkpoint = checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.checkpoint = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.checkpoint is not None
        return self.checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        self.checkpoint = None


class VisitCallback(Callback):
    """What the core does inside a client's fit. It runs after the federated callbacks and before the ordinary ones."""

    def __init__(
        self, client: Client, callbacks: CallbackList, settings: LocalSettings, phase: Phase, work: int
    ) -> None:
        self.client = client
        self.correctors = acting(callbacks.correctors(), phase)
        self.num_samples = client.num_samples
        self.settings = settings
        self.phase = phase.name
        self.address = address_of(phase)
        self.lr_factor = phase.lr_factor
        self.unit = phase.unit or settings.unit
        self.work = work
        self.steps = 0
        self.attempts = 0
        self.first_epoch = 0
        self.lr_sums: dict[str, float] = {}
        self._handles: list[Any] = []
        self._names: dict[int, str] = {}
        self._payload: Mapping[str, Any] = client.message.extras

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first_epoch = trainer.current_epoch
        self._names = {id(p): name for name, p in pl_module.named_parameters(remove_duplicate=False)}
        scaler = self.client.record.lightning.get(self.phase, {}).get("precision")
        if scaler and self.settings.optimizer_state == "reset":  # under "keep" Lightning itself restored it
            trainer.precision_plugin.load_state_dict(scaler)
        self._decay_learning_rates(trainer)
        for index, optimizer in enumerate(trainer.optimizers):
            if self.correctors and getattr(trainer.precision_plugin, "scaler", None) is not None:
                self._refuse_fused(optimizer)
            self._handles.append(optimizer.register_step_post_hook(partial(self._stepped, index)))

    def _refuse_fused(self, optimizer: Optimizer) -> None:
        if any(group.get("fused") for group in optimizer.param_groups):
            names = ", ".join(callback.key for callback in self.correctors)
            raise ValueError(
                f"{names} corrects gradients, but the fused {type(optimizer).__name__} still holds scaled gradients "
                "under fp16 at that point. Use fused=False or precision='bf16-mixed'."
            )

    def _decay_learning_rates(self, trainer: Trainer) -> None:
        """Learning-rate decay per round survives the re-creation of the optimizer."""
        keeps = self.settings.optimizer_state == "keep" and "checkpoint" in self.client.record.lightning[self.phase]
        rounds = self.client.round - (self.client.record.last_round if keeps else 0)
        factor = self.settings.lr_decay**rounds * (1.0 if keeps else self.lr_factor)
        if factor == 1.0:
            return
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for name in ("lr", "initial_lr", "max_lr", "min_lr"):  # the last two are OneCycleLR's
                    if name in group:
                        group[name] = group[name] * factor
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        while schedulers:
            scheduler = schedulers.pop()
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
            schedulers += getattr(scheduler, "_schedulers", [])  # SequentialLR, ChainedScheduler

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch - self.first_epoch
        seed_all(self.settings.seed, self.client.round, self.client.id, self.address, epoch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.attempts += optimizer is trainer.optimizers[0]
        if not self.correctors:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in self._names:
                    name = self._names[id(parameter)]
                    parameter.grad = self._corrected(name, parameter, float(group["lr"]))

    @torch.no_grad()
    def _corrected(self, name: str, parameter: Tensor, lr: float) -> Tensor:
        assert parameter.grad is not None
        gradient = parameter.grad
        anchor = self.client.anchor(name, parameter.device)
        for callback in self.correctors:
            context = GradientContext(
                anchor={} if anchor is None else {name: anchor},
                payload=self._payload.get(callback.key, {}),
                state=self.client.state.get(callback.key, {}),
                client=self.client.id,
                num_samples=self.num_samples,
                lr=lr,
                phase=self.phase,
            )
            gradient = callback.correct_gradient(context, name, parameter, gradient)
        return gradient.to(parameter.grad.dtype)

    def _stepped(self, index: int, optimizer: Optimizer, *ignored: Any) -> None:
        moved = False
        for group in optimizer.param_groups:
            lr = float(group["lr"])
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None and parameter.grad is not None:
                    self.lr_sums[name] = self.lr_sums.get(name, 0.0) + lr
                    moved = True
        self.steps += index == 0 and moved  # a training_step that returned None moves nothing

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._stops_itself and self.unit == "steps" and self.attempts >= self.work:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stops_itself and self.unit == "epochs":
            trainer.should_stop |= trainer.current_epoch - self.first_epoch + 1 >= self.work

    @property
    def _stops_itself(self) -> bool:
        """Under ``keep`` the Trainer's limit is the whole federation's horizon, and a visit ends before it."""
        return self.settings.optimizer_state == "keep"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()


def address_of(phase: Phase) -> str:
    """The name by which the randomness of ``phase`` is addressed."""
    return phase.repeats or phase.name


def acting(callbacks: list[FederatedCallback], phase: Phase) -> list[FederatedCallback]:
    """The callbacks among ``callbacks`` whose terms act in ``phase``."""
    return [callback for callback in callbacks if phase.federated or callback.key in phase.terms_of]


def fit(
    client: Client,
    callbacks: CallbackList,
    settings: LocalSettings,
    loader: Any,
    start_sampler: Callable[[int, int, int], None],
    *,
    phase: Phase,
    work: int,
    val_loader: Any = None,
) -> VisitCallback:
    """Train ``client.module`` in place for ``work`` epochs or steps and keep what Lightning keeps in its record.

    Args:
        client: whose module and record; callbacks: all federated callbacks; settings: how to train.
        loader: training batches.
        start_sampler: addresses the loader's order, given (first epoch's number, rank, world size).
        phase: which fit this is, and whose terms act in it; work: epochs or steps.
        val_loader: for ``check_val_every_n_epoch``.

    Raises:
        RuntimeError: if Lightning ran no step although there was data (a fit that silently trains nothing is a bug).
    """
    record = client.record.lightning.setdefault(phase.name, {})
    visit = VisitCallback(client, callbacks, settings, phase, work)
    ordinary = [copy.deepcopy(callback) for callback in settings.callbacks]
    keep = settings.optimizer_state == "keep"
    arguments = {key: copy.deepcopy(value) for key, value in settings.trainer_arguments.items()}
    memory = MemoryCheckpointIO(_resumable(record.get("checkpoint"), client.module) if keep else None)
    plugins = arguments.pop("plugins", None) or []
    plugins = [*plugins] if isinstance(plugins, list | tuple) else [plugins]
    if keep:
        plugins.append(memory)
    in_epochs = visit.unit == "epochs"
    epochs_before = int(record.get("epochs", 0)) if keep else 0
    limit = work
    if keep:
        horizon = settings.max_rounds * (settings.work if phase.work is None else phase.work)
        limit = max(horizon, int(record.get("epochs" if in_epochs else "steps", 0)) + work)
    if val_loader is None:
        arguments["limit_val_batches"] = 0  # Lightning would take the module's own val_dataloader
    if isinstance(getattr(loader, "sampler", None), AddressedSampler):
        arguments["use_distributed_sampler"] = False  # it shares the batches among ranks itself
    with quiet():
        trainer = Trainer(
            **arguments,
            max_epochs=limit if in_epochs else UNLIMITED,
            max_steps=UNLIMITED if in_epochs else limit,
            plugins=plugins,
            callbacks=[*callbacks, visit, *ordinary],
            logger=settings.logger,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in ordinary),
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        # A visit ends its last epoch, if need be early. With a step limit Lightning would go on inside that epoch.
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]
        start_sampler(epochs_before, trainer.global_rank, trainer.world_size)
        for callback in ordinary:
            state = record.get("callbacks", {}).get(callback.state_key)
            if state is not None and not keep:
                callback.load_state_dict(copy.deepcopy(state))
        client.scratch["trainer"] = trainer
        with loss_terms(client, acting(callbacks.loss_terms(), phase)):
            trainer.fit(
                client.module,
                train_dataloaders=loader,
                val_dataloaders=val_loader,
                ckpt_path="memory" if keep and memory.checkpoint is not None else None,
            )
        if keep:
            trainer.save_checkpoint("memory")
            record["epochs"], record["steps"] = trainer.current_epoch, trainer.global_step
            record["checkpoint"] = {k: v for k, v in (memory.checkpoint or {}).items() if k != "state_dict"}
    record["precision"] = trainer.precision_plugin.state_dict()
    batches = trainer.num_training_batches
    states = {callback.state_key: callback.state_dict() for callback in ordinary}
    record["callbacks"] = {key: state for key, state in states.items() if state}
    client.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    _release(trainer)
    left = vars(client.module).get("forward")
    if getattr(left, "__func__", None) is type(client.module).forward:
        del client.module.forward  # under DDP Lightning leaves the bound method on the instance
    if visit.attempts == 0 and work > 0 and client.module.automatic_optimization and batches:
        raise RuntimeError(
            f"Client '{client.id}' was asked for {work} of work but took no optimizer step. "
            "Check accumulate_grad_batches, limit_train_batches and callbacks that stop training."
        )
    return visit


def _release(trainer: Trainer) -> None:
    """Cut what a finished Trainer holds of the client's model.

    A Trainer is full of reference cycles: without this, the models of many clients stay in memory until Python's
    collector comes by.
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
    """The kept checkpoint with the module's present weights; copied, since optimizers edit their state in place."""
    if checkpoint is None:
        return None
    return copy.deepcopy(checkpoint) | {"state_dict": module.state_dict()}
