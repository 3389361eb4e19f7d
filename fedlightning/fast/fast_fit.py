"""The local loop `fast`: what `lightning.pytorch.Trainer.fit` does on one device, and nothing else.

It calls the hooks of the module and of the callbacks in the Trainer's order with the same arguments, under the same
precision plugin. So the result is the same bit for bit, at a fraction of the cost of a step. `eligibility.py` says where
it does not apply. The order within a batch:

fetch, to device > on_train_batch_start > training_step > on_before_zero_grad, zero_grad > on_before_backward > backward
> on_after_backward > on_before_optimizer_step > clipping > step > schedulers > on_train_batch_end

One training step of the fast loop: forward, backward, clipping and the optimizer, with the hooks between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.fit import IN_MEMORY, REBUILT, FitJob, clocks, of_module, resumable
from fedlightning.client.probes import TRANSFERS
from fedlightning.compat.lightning_runs import class_takes_index, without_warnings
from fedlightning.datamodules.resident_batches import ResidentBatches, resident_batches
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.fast import eligibility
from fedlightning.fast.eligibility import Hooks
from fedlightning.fast.log_sheet import FastLoopRefused, LogSheet
from fedlightning.fast.optimizer_steps import Closure, count_steps, drop_gradients, unrecorded_step
from fedlightning.fast.trainer_view import FastTrainer


class FastStep:
    """One training step: all between a batch that is on the device and `on_train_batch_end`.

    Args:
        trainer: Stand-in for the Trainer, with its optimizers.
        log_sheet: Collects what the module logs.
        hooks: Hooks that are overridden.
        reports: Whether a hook needs the outputs of each step.
    """

    def __init__(self, trainer: FastTrainer, log_sheet: LogSheet, hooks: Hooks, reports: bool) -> None:
        module, precision = trainer.lightning_module, trainer.precision_plugin
        self.trainer, self.log_sheet, self.module, self.clock = trainer, log_sheet, module, vars(trainer)
        self.precision, self.scaler = precision, getattr(precision, "scaler", None)
        self.step_context: Callable[[], AbstractContextManager[Any]] | None = (
            None if type(precision) is Precision else precision.train_step_context
        )
        self.wants_index = class_takes_index(type(module), "training_step")
        self.before_zero_grad = hooks.find("on_before_zero_grad")
        self.before_backward, self.after_backward = hooks.find("on_before_backward"), hooks.find("on_after_backward")
        self.before_step = hooks.find("on_before_optimizer_step")
        self.zero_grad = module.optimizer_zero_grad if hooks.overridden("optimizer_zero_grad") else None
        self.backward = module.backward if hooks.overridden("backward") else None
        self.clips = hooks.overridden("configure_gradient_clipping") or hooks.overridden("clip_gradients")
        # Lightning's optimizer wrapper is left out where it would do nothing.
        self.direct = self.scaler is None and not hooks.overridden("optimizer_step")
        self.keeps_outputs = reports or not self.direct
        if module.automatic_optimization and trainer.optimizers:
            self.optimizer: Optimizer = trainer.optimizers[0]
            self.step = unrecorded_step(self.optimizer) if self.direct else self._through_lightning
        self.batch, self.index, self.window = None, 0, 1
        self.outputs: dict[str, Any] = {}

    def automatic(self, batch: Any, index: int, window_done: bool) -> dict[str, Any]:
        """Take a step under automatic optimization and return the outputs for `on_train_batch_end`."""
        self.batch, self.index, self.window = batch, index, self.clock["accumulate_grad_batches"]
        self.outputs = {}
        if window_done:
            self.step(self._passes_and_hooks)
            self.clock["global_step"] += 1
        else:
            self._passes_with_gradients()
        self.log_sheet.enter(None)
        self.batch = None
        return self.outputs

    def manual(self, batch: Any, index: int, window_done: bool) -> dict[str, Any]:
        """Take a step of a module that optimizes manually; only the steps of its optimizers are counted."""
        for optimizer in self.trainer.strategy._lightning_optimizers:
            count_steps(optimizer, self.clock)
        output = self._training_step(batch, index)
        self.log_sheet.enter(None)
        if output is not None and not isinstance(output, Mapping | Tensor):
            raise FastLoopRefused(f"training_step returns {type(output).__name__}")
        outputs: dict[str, Any] = {"loss": output} if isinstance(output, Tensor) else dict(output or {})
        if "loss" in outputs:
            outputs["loss"] = outputs["loss"].detach()
        return outputs

    # -- what an optimizer calls, once or more often ---------------------------------------------------------------
    def _passes_and_hooks(self) -> Tensor | None:
        result = self._passes() if torch.is_grad_enabled() else self._passes_with_gradients()
        if self.before_step is not None:
            self.before_step(self.optimizer)
        limit = self.clock["gradient_clip_val"]
        if limit is not None or self.clips:
            self._clip(limit)
        return result

    def _passes_with_gradients(self) -> Tensor | None:
        """Run the passes with gradients on, because the module may have switched them off."""
        with torch.enable_grad():
            return self._passes()

    def _passes(self) -> Tensor | None:
        """Run a forward and a backward pass."""
        output = self._training_step(self.batch, self.index)
        loss = output if output is None or isinstance(output, Tensor) else loss_in(output)
        outputs = self.outputs
        outputs.clear()
        if loss is not None:
            loss = loss / self.window if self.window != 1 else loss
            if self.keeps_outputs:
                outputs["loss"] = loss.detach().clone()
            if loss is not output and isinstance(output, Mapping):
                outputs.update((key, value) for key, value in output.items() if key != "loss")
        if self.index % self.window == 0:
            if self.before_zero_grad is not None:
                self.before_zero_grad(self.optimizer)
            if self.zero_grad is None:
                drop_gradients(self.optimizer)
            else:
                self.log_sheet.enter("optimizer_zero_grad")
                self.zero_grad(self.trainer.current_epoch, self.index, self.optimizer)
        if loss is None:
            return None
        self._backward(loss)
        return outputs["loss"] if self.keeps_outputs else loss.detach()

    def _training_step(self, batch: Any, index: int) -> Any:
        self.log_sheet.enter("training_step")
        step = self.module.training_step
        if self.step_context is None:
            return step(batch, index) if self.wants_index else step(batch)
        with self.step_context():
            return step(batch, index) if self.wants_index else step(batch)

    def _backward(self, loss: Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self.before_backward is not None:
            self.before_backward(loss)
        if self.backward is None:
            loss.backward()
        else:
            self.log_sheet.enter("backward")
            self.backward(loss)
        if self.after_backward is not None:
            self.after_backward()

    def _clip(self, limit: float | None) -> None:
        self.log_sheet.enter("configure_gradient_clipping")
        how = self.trainer.gradient_clip_algorithm
        self.module.configure_gradient_clipping(self.optimizer, gradient_clip_val=limit, gradient_clip_algorithm=how)

    def _through_lightning(self, closure: Closure) -> None:
        wrapped = self.module.optimizers()
        first = wrapped[0] if isinstance(wrapped, list) else wrapped
        self.log_sheet.enter("optimizer_step")
        self.module.optimizer_step(self.trainer.current_epoch, self.index, first, self._passes_with_gradients)


def loss_in(output: Any) -> Tensor:
    """Return the loss in a `training_step`'s output that is neither a tensor nor `None`."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(loss, Tensor):
        raise FastLoopRefused(f"training_step returns {type(output).__name__} without a loss")
    return loss


class FastFitter:
    """Trains by the fast loop.

    Args:
        blueprint: Settings and callbacks of the run, and a Trainer made with its arguments.
    """

    name = "fast"

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint

    @cached_property
    def _of_run(self) -> str | None:
        blueprint, settings = self._blueprint, self._blueprint.settings
        return eligibility.find_run_refusal(
            settings.trainer_arguments, [*blueprint.callbacks, *settings.callbacks], blueprint.trainer
        )

    def refusal(self, module: LightningModule, loader: Any) -> str | None:
        """Return why only Lightning's Trainer can train a module on a loader; `None`: this loop can."""
        settings = self._blueprint.settings
        limit = settings.trainer_arguments.get("limit_train_batches")
        # first: what its `configure_callbacks` adds is not the work of the environment
        of_class = eligibility.find_class_refusal(type(module))
        return of_class or self._of_run or eligibility.find_visit_refusal(module, loader, limit)

    def fit(self, job: FitJob) -> FastTrainer:
        """Train the client's module in place."""
        job.start_sampler(job.epochs_before, 0, 1)
        module, base, visit, loader = job.client.module, self._blueprint.trainer, job.visit, job.loader
        precision = base.precision_plugin
        if getattr(precision, "scaler", None) is not None:
            precision = copy.deepcopy(precision)  # a scaler adapts, so each fit starts with a new one
        log_sheet = LogSheet(module, training=True)
        in_epochs = visit.unit == "epochs"
        trainer = FastTrainer(
            base,
            module,
            job.callbacks,
            precision,
            log_sheet,
            loader=loader,
            num_batches=eligibility.num_batches(loader, base.limit_train_batches),
            max_epochs=job.limit if in_epochs else -1,
            max_steps=-1 if in_epochs else job.limit,
        )
        trainer.show(job.inside)
        job.client.scratch["trainer"] = trainer
        record = job.record if job.keeps else None
        with without_warnings():
            FastFit(trainer, log_sheet, bool(job.settings.trainer_arguments.get("detect_anomaly")), record).run()
        return trainer

    def detach_trainer(self, trainer: FastTrainer) -> None:
        """Let go of the module."""
        trainer.detach()


class Checkpoint(dict[str, Any]):
    """A Lightning checkpoint that is saved, as far as the fast loop has it; who asks for more gets Lightning's own."""

    def _refuse(self, name: Any) -> None:
        if name in REBUILT and not dict.__contains__(self, name):
            raise FastLoopRefused(f"a hook reads {name!r} of a checkpoint")

    def __missing__(self, name: str) -> Any:
        self._refuse(name)
        raise KeyError(name)

    def __contains__(self, name: Any) -> bool:
        self._refuse(name)
        return super().__contains__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        """Return an entry, or the default."""
        self._refuse(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self._refuse("loops")
        return super().__iter__()


MAY_CHANGE_MODULE = ("setup", "configure_model", "on_load_checkpoint", "state_dict", "load_state_dict")
"""Hooks under which it matters that Lightning loads the weights of a checkpoint back: those from before `setup`."""


class FastFit:
    """One fit of one module.

    Args:
        trainer: Stand-in for the Trainer, with its loader and limits.
        log_sheet: Collects what the module logs.
        detect_anomaly: Look for the backward function that makes a NaN.
        record: What the client keeps of fits, where optimizers go on: it is read before the fit, and written after it.
    """

    def __init__(
        self,
        trainer: FastTrainer,
        log_sheet: LogSheet,
        detect_anomaly: bool = False,
        record: dict[str, Any] | None = None,
    ) -> None:
        self.trainer, self.log_sheet, self.module = trainer, log_sheet, trainer.lightning_module
        self.clock = vars(trainer)  # the counters are written here: as attributes, the stand-in refuses them
        self.detect_anomaly = detect_anomaly
        self.precision = trainer.precision_plugin
        self.scaler = getattr(self.precision, "scaler", None)
        self.limits = (trainer.max_steps, trainer.max_epochs)
        self.window_done = False
        self.record = record
        self.counts = {"batches": 0, "windows": 0}

    # -- the fit ---------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Train. As in Lightning, an exception goes to `on_exception` and then to the caller."""
        module, trainer = self.module, self.trainer
        module.trainer = trainer
        self.hooks = hooks = Hooks(trainer, self.log_sheet)
        self.log_sheet.attach()
        for callback in trainer.callbacks:
            vars(callback).update(log=module.log, log_dict=module.log_dict)
        try:
            self._set_up()
            with self._anomalies():
                torch.set_grad_enabled(True)
                self._epochs()
            if self.device.type != "cpu":
                module.cpu()
            hooks.run("on_fit_end")
            hooks.run("teardown", stage="fit")
            trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
            if self.record is not None:
                self._keep(self.record)
        except BaseException as error:
            for hook in hooks.callbacks("on_exception"):
                hook(error)
            if isinstance(error, KeyboardInterrupt):
                raise SystemExit(1) from error  # as Lightning's Trainer does
            raise
        finally:
            self.log_sheet.detach()

    def _anomalies(self) -> AbstractContextManager[None]:
        if torch.is_anomaly_enabled() == self.detect_anomaly:
            return nullcontext()
        return torch.autograd.set_detect_anomaly(self.detect_anomaly)

    def _set_up(self) -> None:
        module, hooks, base = self.module, self.hooks, self.trainer._base.strategy
        self.device = base.root_device
        checkpoint = self._kept_checkpoint()
        hooks.run("setup", stage="fit")
        if hooks.overridden("configure_model"):
            with base.tensor_init_context(), self.precision.module_init_context():
                module.configure_model()
        if checkpoint is not None:
            self._restore(checkpoint)
        self.precision.convert_module(module)
        if self.device.type != "cpu":
            module.to(self.device)
        self._make_optimizers()
        hooks.run("on_fit_start")
        if checkpoint is not None:
            self._go_on(checkpoint)
        module.zero_grad()
        self.trainer.set_up_data()
        self.batches = resident_batches(self.trainer.train_dataloader, self.device) or self.trainer.train_dataloader
        self.is_resident = self.batches is not self.trainer.train_dataloader
        self.is_addressed = isinstance(self.batches, ResidentBatches)
        self._bind()

    def _make_optimizers(self) -> None:
        """Call `configure_optimizers`. Lightning reads its result, unless that is a single optimizer."""
        trainer, module = self.trainer, self.module
        self.log_sheet.enter("configure_optimizers")
        configured = module.configure_optimizers()
        self.log_sheet.enter(None)
        if isinstance(configured, Optimizer) and self.clock["_strategy"] is None:
            self.clock["optimizers"] = [configured]
            return
        attributes = vars(module)
        method = attributes.get("configure_optimizers")
        attributes["configure_optimizers"] = lambda: configured  # it has been called; Lightning would call it again
        try:
            trainer.strategy.setup_optimizers(trainer)  # type: ignore[arg-type]
        finally:
            del attributes["configure_optimizers"]
            if method is not None:
                attributes["configure_optimizers"] = method
        self.clock["optimizers"] = trainer.strategy.optimizers
        self.clock["lr_scheduler_configs"] = trainer.strategy.lr_scheduler_configs
        trainer.strategy.is_fixed = True

    # -- optimizers that go on -------------------------------------------------------------------------------------
    def _kept_checkpoint(self) -> dict[str, Any] | None:
        """Return what was kept, as the checkpoint that Lightning would resume from; `None` in a first visit."""
        record = self.record
        if record is None or "checkpoint" not in record:
            return None
        if any(self.hooks.find(name) for name in MAY_CHANGE_MODULE):
            return resumable(record, self.trainer._base, self.module)
        return copy.deepcopy(dict(record["checkpoint"]))

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        """Show the checkpoint to the hooks that load it, and let the module have its weights."""
        module, hooks, has_weights = self.module, self.hooks, "state_dict" in checkpoint
        self.trainer.__dict__["ckpt_path"] = IN_MEMORY
        for hook in hooks.own("on_load_checkpoint"):
            hook(checkpoint)
        if has_weights:
            module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        for hook in hooks.callbacks("on_load_checkpoint"):
            hook(checkpoint)
        for callback in self.trainer.callbacks:
            if state := checkpoint["callbacks"].get(callback.state_key):
                callback.load_state_dict(copy.deepcopy(state))

    def _go_on(self, checkpoint: dict[str, Any]) -> None:
        """Restore clocks, the gradient scaler, optimizers and schedulers."""
        name = type(self.precision).__qualname__
        if name in checkpoint:
            self.precision.load_state_dict(checkpoint[name])
        assert self.record is not None
        self.clock.update(current_epoch=self.record["epochs"], global_step=self.record["steps"])
        for optimizer, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        for config, state in zip(self.trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)

    def _keep(self, record: dict[str, Any]) -> None:
        """Keep what Lightning's checkpoint would hold; the module's own entries are kept elsewhere."""
        trainer, hook = self.trainer, self.hooks.find("on_save_checkpoint")
        states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        checkpoint = Checkpoint(
            {} if hook is None else clocks(trainer.current_epoch, trainer.global_step) | of_module(self.module),
            callbacks={name: state for name, state in states.items() if state},
            optimizer_states=move_data_to_device(optimizers, "cpu") if self.device.type != "cpu" else optimizers,
            lr_schedulers=[config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        )
        if state := self.precision.state_dict():
            checkpoint[type(self.precision).__qualname__] = state
        if hook is not None:
            hook(checkpoint)
        record.update(epochs=self.clock["current_epoch"], steps=self.clock["global_step"])
        record.update({name: record.get(name, 0) + count for name, count in self.counts.items()})
        record["checkpoint"] = {name: value for name, value in checkpoint.items() if name not in REBUILT}

    def _bind(self) -> None:
        """Look up once what every batch needs."""
        module, hooks, trainer = self.module, self.hooks, self.trainer
        self.batch_start, self.batch_end = hooks.find("on_train_batch_start"), hooks.find("on_train_batch_end")
        self.moves = not self.is_resident or any(map(hooks.overridden, TRANSFERS))
        self.converts = type(self.precision).convert_input is not Precision.convert_input
        self.schedules = bool(trainer.lr_scheduler_configs) and module.automatic_optimization
        self.one_step = FastStep(trainer, self.log_sheet, hooks, reports=self.batch_end is not None)

    # -- epochs ----------------------------------------------------------------------------------------------------
    @property
    def _done(self) -> bool:
        steps, epochs = self.limits
        clock = self.clock
        return 0 <= steps <= clock["global_step"] or 0 <= epochs <= clock["current_epoch"] or bool(clock["should_stop"])

    def _epochs(self) -> None:
        hooks, clock, log_sheet = self.hooks, self.clock, self.log_sheet
        loader = self.trainer.train_dataloader
        epoch_start, epoch_end = hooks.find("on_train_epoch_start"), hooks.epoch_end()
        batches: Iterator[Any] = iter(self.batches)  # Lightning makes the first epoch's before on_train_start
        first = clock["current_epoch"]
        hooks.run("on_train_start")
        while not self._done:
            epoch = clock["current_epoch"]
            if self.is_addressed and type(loader.sampler) is AddressedSampler:
                loader.sampler.go_to(epoch)
            else:
                set_epoch(loader, epoch)
            if epoch_start is not None:
                epoch_start()
            if epoch > first or self.is_addressed:
                batches = iter(self.batches)
            whole = self._epoch(batches)
            log_sheet.end_batches()
            if epoch_end is not None:
                epoch_end()
            log_sheet.end_epoch()
            if whole and self.schedules:
                self._schedule("epoch", plateau=True)
            log_sheet.clear()
            clock["current_epoch"] = epoch + 1
        hooks.run("on_train_end")

    def _epoch(self, batches: Iterator[Any]) -> bool:
        """Run one epoch; return True if it reached its last batch."""
        clock, log_sheet, module, counts = self.clock, self.log_sheet, self.module, self.counts
        last, max_steps = clock["num_training_batches"] - 1, self.limits[0]
        one_step = self.one_step.automatic if module.automatic_optimization else self.one_step.manual
        clock["is_last_batch"] = False
        index = -1
        while index < last and not (0 <= max_steps <= clock["global_step"]) and not clock["should_stop"]:
            batch = next(batches)
            index += 1
            self.index = index
            counts["batches"] += 1
            clock["is_last_batch"] = index == last
            if self.converts or self.moves:
                batch = self._to_device(batch)
            log_sheet.begin_batch(batch)
            if self.batch_start is not None and self.batch_start(batch, index) == -1:
                clock["is_last_batch"] = True
                self._after_skipped()
                break
            window = clock["accumulate_grad_batches"]
            self.window_done = (index + 1) % window == 0 or index == last
            counts["windows"] += self.window_done
            outputs = one_step(batch, index, self.window_done)
            if self.schedules:
                if self.window_done:
                    self._schedule("step", plateau=False)
                if index == last:
                    self._schedule("epoch", plateau=False)
            if self.batch_end is not None:
                self.batch_end(outputs, batch, index)
            log_sheet.end_batch()
            if self.schedules and self.window_done:
                self._schedule("step", plateau=True)
        return bool(clock["is_last_batch"])

    def _after_skipped(self) -> None:
        """Skip the rest of the epoch, which counts as finished, because `on_train_batch_start` returned -1."""
        if self.schedules:
            self._schedule("step", plateau=False)
            self._schedule("epoch", plateau=False)

    def _to_device(self, batch: Any) -> Any:
        if batch is None:
            raise FastLoopRefused("a training loader yields None")
        batch = self.precision.convert_input(batch)
        if not self.moves:
            return batch
        batch = self.module.on_before_batch_transfer(batch, 0)
        batch = self.module.transfer_batch_to_device(batch, self.device, 0)
        return self.module.on_after_batch_transfer(batch, 0)

    # -- schedulers ------------------------------------------------------------------------------------------------
    def _schedule(self, interval: str, plateau: bool) -> None:
        for config in self.trainer.lr_scheduler_configs:
            if bool(config.reduce_on_plateau) != plateau or config.interval != interval:
                continue
            count = 1 + (self.index if interval == "step" else self.clock["current_epoch"])
            if count % config.frequency != 0:
                continue
            metric = self.trainer.callback_metrics.get(config.monitor) if config.reduce_on_plateau else None
            if config.reduce_on_plateau and metric is None:
                raise FastLoopRefused(f"a scheduler monitors {config.monitor!r}, which is not logged")
            self.log_sheet.enter("lr_scheduler_step")
            self.module.lr_scheduler_step(config.scheduler, metric)
            self.log_sheet.enter(None)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader the number of the epoch, if they have `set_epoch`."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    for sampler in {id(sampler): sampler for sampler in samplers}.values():
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
