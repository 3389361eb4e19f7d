"""The local loop ``fast``: what ``lightning.pytorch.Trainer.fit`` does on one device, and nothing else.

It calls the hooks of the module and of the callbacks in the Trainer's order with the same arguments, under the same
precision plugin, so the result is the same bit for bit at a fraction of the cost of a step. :mod:`fast_refusals` says
where it does not apply. The order within a batch:

fetch, to device > on_train_batch_start > training_step > on_before_zero_grad, zero_grad > on_before_backward > backward >
on_after_backward > on_before_optimizer_step > clipping > step > schedulers > on_train_batch_end
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from fedlightning.datamodules.resident import resident_batches
from fedlightning.fast_hooks import Hooks, per_class
from fedlightning.fast_log import LogBook
from fedlightning.fast_refusals import num_batches
from fedlightning.fast_trainer import FastTrainer, NotInFastLoop
from fedlightning.quiet import without_warnings

if TYPE_CHECKING:
    from fedlightning.client import Client
    from fedlightning.fit import VisitCallback


def train_fast(
    client: Client, visit: VisitCallback, callbacks: list[Callback], loader: Any, kit: Trainer, detect_anomaly: bool
) -> FastTrainer:
    """Train ``client.module`` in place with ``callbacks`` (``visit`` among them); the stand-in that they saw.

    Args:
        client: whose module; visit: knows how much work there is; loader: training batches, addressed.
        kit: a Trainer made with the run's arguments.
    """
    module = client.module
    precision = kit.precision_plugin
    if getattr(precision, "scaler", None) is not None:
        precision = copy.deepcopy(precision)  # a scaler learns: each fit starts with a new one
    book = LogBook(module, training=True)
    in_epochs = visit.unit == "epochs"
    trainer = FastTrainer(
        kit,
        module,
        callbacks,
        precision,
        book,
        loader=loader,
        num_batches=num_batches(loader, kit.limit_train_batches),
        max_epochs=visit.work if in_epochs else -1,
        max_steps=-1 if in_epochs else visit.work,
    )
    client.scratch["trainer"] = trainer
    with without_warnings():
        FastFit(trainer, book, detect_anomaly).run()
    return trainer


class FastFit:
    """One fit of one module.

    Args:
        trainer: the stand-in, with its loader and limits; book: where the module logs.
        detect_anomaly: look for the backward function that makes a NaN.
    """

    def __init__(self, trainer: FastTrainer, book: LogBook, detect_anomaly: bool = False) -> None:
        self.trainer, self.book, self.module = trainer, book, trainer.lightning_module
        self.clock = vars(trainer)  # the loop's own counters; setting them as attributes is for nobody
        self.detect_anomaly = detect_anomaly
        self.precision = trainer.precision_plugin
        self.scaler = getattr(self.precision, "scaler", None)
        self.limits = (trainer.max_steps, trainer.max_epochs)
        self.window_done = False

    # -- the fit ---------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Train. An exception goes to ``on_exception`` and on to the caller, as in Lightning."""
        module, trainer = self.module, self.trainer
        module.trainer = trainer
        self.hooks = hooks = Hooks(trainer, self.book)
        self.book.attach()
        for callback in trainer.callbacks:
            vars(callback).update(log=module.log, log_dict=module.log_dict)
        try:
            self._set_up()
            with torch.autograd.set_detect_anomaly(self.detect_anomaly):
                torch.set_grad_enabled(True)
                self._epochs()
            if self.device.type != "cpu":
                module.cpu()
            hooks.run("on_fit_end")
            hooks.run("teardown", stage="fit")
            trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
        except BaseException as error:
            for hook in hooks.callbacks("on_exception"):
                hook(error)
            if isinstance(error, KeyboardInterrupt):
                raise SystemExit(1) from error  # as Lightning's Trainer does
            raise
        finally:
            self.book.detach()

    def _set_up(self) -> None:
        module, hooks, kit = self.module, self.hooks, self.trainer._kit.strategy
        self.device = kit.root_device
        hooks.run("setup", stage="fit")
        if hooks.overridden("configure_model"):
            with kit.tensor_init_context(), self.precision.module_init_context():
                module.configure_model()
        self.precision.convert_module(module)
        if self.device.type != "cpu":
            module.to(self.device)
        self._make_optimizers()
        hooks.run("on_fit_start")
        module.zero_grad()
        self.trainer.set_up_data()
        self.batches = resident_batches(self.trainer.train_dataloader, self.device) or self.trainer.train_dataloader
        self.is_resident = self.batches is not self.trainer.train_dataloader
        self._bind()

    def _make_optimizers(self) -> None:
        """``configure_optimizers`` in any of its forms; Lightning reads all but the simplest."""
        trainer, module = self.trainer, self.module
        self.book.enter("configure_optimizers")
        configured = module.configure_optimizers()
        self.book.enter(None)
        if isinstance(configured, Optimizer) and self.clock["_strategy"] is None:
            self.clock["optimizers"] = [configured]
            return
        attributes = vars(module)
        own = attributes.get("configure_optimizers")
        attributes["configure_optimizers"] = lambda: configured  # it has been called; Lightning would call it again
        try:
            trainer.strategy.setup_optimizers(trainer)  # type: ignore[arg-type]
        finally:
            del attributes["configure_optimizers"]
            if own is not None:
                attributes["configure_optimizers"] = own
        self.clock["optimizers"] = trainer.strategy.optimizers
        self.clock["lr_scheduler_configs"] = trainer.strategy.lr_scheduler_configs

    def _bind(self) -> None:
        """Look up once what every batch needs."""
        module, hooks, trainer = self.module, self.hooks, self.trainer
        self.batch_start, self.batch_end = hooks.find("on_train_batch_start"), hooks.find("on_train_batch_end")
        self.before_zero_grad = hooks.find("on_before_zero_grad")
        self.before_backward, self.after_backward = hooks.find("on_before_backward"), hooks.find("on_after_backward")
        self.before_step = hooks.find("on_before_optimizer_step")
        self.zero_grad = module.optimizer_zero_grad if hooks.overridden("optimizer_zero_grad") else None
        self.backward = module.backward if hooks.overridden("backward") else None
        self.clip = hooks.overridden("configure_gradient_clipping") or hooks.overridden("clip_gradients")
        self.moves = not self.is_resident or any(
            hooks.overridden(name)
            for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        )
        self.converts = type(self.precision).convert_input is not Precision.convert_input
        plain = type(self.precision) is Precision
        self.step_context: Callable[[], AbstractContextManager[Any]] | None = (
            None if plain else self.precision.train_step_context
        )
        self.wants_index = takes_index(type(module))
        self.schedules = bool(trainer.lr_scheduler_configs) and module.automatic_optimization
        # The short way round Lightning's optimizer wrapper, where nothing of it would be seen.
        self.direct = self.scaler is None and not hooks.overridden("optimizer_step")

    # -- epochs ----------------------------------------------------------------------------------------------------
    @property
    def _done(self) -> bool:
        steps, epochs = self.limits
        clock = self.clock
        return 0 <= steps <= clock["global_step"] or 0 <= epochs <= clock["current_epoch"] or bool(clock["should_stop"])

    def _epochs(self) -> None:
        hooks, clock, book = self.hooks, self.clock, self.book
        loader = self.trainer.train_dataloader
        epoch_start, epoch_end = hooks.find("on_train_epoch_start"), hooks.epoch_end()
        batches: Iterator[Any] = iter(self.batches)  # Lightning makes the first epoch's before on_train_start
        hooks.run("on_train_start")
        while not self._done:
            epoch = clock["current_epoch"]
            set_epoch(loader, epoch)
            if epoch_start is not None:
                epoch_start()
            if epoch > 0 or self.is_resident:
                batches = iter(self.batches)
            whole = self._epoch(batches)
            book.end_batches()
            if epoch_end is not None:
                epoch_end()
            book.end_epoch()
            if whole and self.schedules:
                self._schedule("epoch", plateau=True)
            book.clear()
            clock["current_epoch"] = epoch + 1
        hooks.run("on_train_end")

    def _epoch(self, batches: Iterator[Any]) -> bool:
        """One epoch, perhaps cut short; whether it reached its last batch."""
        clock, book, module = self.clock, self.book, self.module
        last, max_steps = clock["num_training_batches"] - 1, self.limits[0]
        one_step = self._automatic if module.automatic_optimization else self._manual
        clock["is_last_batch"] = False
        index = -1
        while index < last and not (0 <= max_steps <= clock["global_step"]) and not clock["should_stop"]:
            batch = next(batches)
            index += 1
            self.index = index
            clock["is_last_batch"] = index == last
            if self.converts or self.moves:
                batch = self._to_device(batch)
            book.begin_batch(batch)
            if self.batch_start is not None and self.batch_start(batch, index) == -1:
                clock["is_last_batch"] = True
                self._after_skipped()
                break
            window = clock["accumulate_grad_batches"]
            self.window_done = (index + 1) % window == 0 or index == last
            outputs = one_step(batch, index, window)
            if self.schedules:
                if self.window_done:
                    self._schedule("step", plateau=False)
                if index == last:
                    self._schedule("epoch", plateau=False)
            if self.batch_end is not None:
                self.batch_end(outputs, batch, index)
            book.end_batch()
            if self.schedules and self.window_done:
                self._schedule("step", plateau=True)
        return bool(clock["is_last_batch"])

    def _after_skipped(self) -> None:
        """``on_train_batch_start`` returned -1: the rest of the epoch is skipped, and it counts as finished."""
        if self.schedules:
            self._schedule("step", plateau=False)
            self._schedule("epoch", plateau=False)

    def _to_device(self, batch: Any) -> Any:
        if batch is None:
            raise NotInFastLoop("a training loader yields None")
        batch = self.precision.convert_input(batch)
        if not self.moves:
            return batch
        batch = self.module.on_before_batch_transfer(batch, 0)
        batch = self.module.transfer_batch_to_device(batch, self.device, 0)
        return self.module.on_after_batch_transfer(batch, 0)

    # -- a batch ---------------------------------------------------------------------------------------------------
    def _training_step(self, batch: Any, index: int) -> Any:
        self.book.enter("training_step")
        step = self.module.training_step
        if self.step_context is None:
            return step(batch, index) if self.wants_index else step(batch)
        with self.step_context():
            return step(batch, index) if self.wants_index else step(batch)

    def _automatic(self, batch: Any, index: int, window: int) -> dict[str, Any]:
        optimizer: Optimizer = self.trainer.optimizers[0]
        outputs: dict[str, Any] = {}

        def passes() -> Tensor | None:
            """A forward and a backward pass."""
            output = self._training_step(batch, index)
            loss = output if output is None or isinstance(output, Tensor) else loss_in(output)
            outputs.clear()
            if loss is not None:
                loss = loss / window if window != 1 else loss
                if self.batch_end is not None or not self.direct:
                    outputs["loss"] = loss.detach().clone()
                if loss is not output and isinstance(output, Mapping):
                    outputs.update((key, value) for key, value in output.items() if key != "loss")
            if index % window == 0:
                if self.before_zero_grad is not None:
                    self.before_zero_grad(optimizer)
                if self.zero_grad is None:
                    drop_gradients(optimizer)
                else:
                    self.book.enter("optimizer_zero_grad")
                    self.zero_grad(self.trainer.current_epoch, index, optimizer)
            if loss is not None:
                self._backward(loss)
            return outputs.get("loss", loss if loss is None else loss.detach())

        def closure() -> Tensor | None:
            """What an optimizer's step calls, once or more often; it may have switched gradients off."""
            with torch.enable_grad():
                return passes()

        def closure_and_hooks() -> Tensor | None:
            result = passes() if torch.is_grad_enabled() else closure()
            if self.before_step is not None:
                self.before_step(optimizer)
            self._clip(optimizer)
            return result

        if not self.window_done:
            closure()
        elif self.direct:
            optimizer.step(closure=closure_and_hooks)  # type: ignore[arg-type]
            self.clock["global_step"] += 1
        else:
            wrapped = self.module.optimizers()
            first = wrapped[0] if isinstance(wrapped, list) else wrapped
            self.book.enter("optimizer_step")
            self.module.optimizer_step(self.trainer.current_epoch, index, first, closure)
            self.clock["global_step"] += 1
        self.book.enter(None)
        return outputs

    def _backward(self, loss: Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self.before_backward is not None:
            self.before_backward(loss)
        if self.backward is None:
            loss.backward()
        else:
            self.book.enter("backward")
            self.backward(loss)
        if self.after_backward is not None:
            self.after_backward()

    def _clip(self, optimizer: Optimizer) -> None:
        limit = self.clock["gradient_clip_val"]
        if limit is not None or self.clip:
            self.book.enter("configure_gradient_clipping")
            how = self.trainer.gradient_clip_algorithm
            self.module.configure_gradient_clipping(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=how)

    def _manual(self, batch: Any, index: int, window: int) -> dict[str, Any]:
        """The module does it all; only its steps are counted."""
        optimizers = self.trainer.strategy._lightning_optimizers
        for optimizer in optimizers:
            count_steps(optimizer, self.clock)
        output = self._training_step(batch, index)
        self.book.enter(None)
        if output is not None and not isinstance(output, Mapping | Tensor):
            raise NotInFastLoop(f"training_step returns {type(output).__name__}")
        outputs: dict[str, Any] = {"loss": output} if isinstance(output, Tensor) else dict(output or {})
        if "loss" in outputs:
            outputs["loss"] = outputs["loss"].detach()
        return outputs

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
                raise NotInFastLoop(f"a scheduler monitors {config.monitor!r}, which is not logged")
            self.book.enter("lr_scheduler_step")
            self.module.lr_scheduler_step(config.scheduler, metric)
            self.book.enter(None)


@per_class
def takes_index(kind: type[LightningModule]) -> bool:
    """Whether ``training_step`` of a class wants the batch's number."""
    return bool(is_param_in_hook_signature(kind.training_step, "batch_idx", min_args=2))


def loss_in(output: Any) -> Tensor:
    """The loss in a ``training_step``'s output that is neither a tensor nor ``None``."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(loss, Tensor):
        raise NotInFastLoop(f"training_step returns {type(output).__name__} without a loss")
    return loss


def drop_gradients(optimizer: Optimizer) -> None:
    """``optimizer.zero_grad()``, without the profiler's record of it that torch makes in every call."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the loader's samplers which epoch it is, those that want to know."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    for sampler in {id(sampler): sampler for sampler in samplers}.values():
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]


def count_steps(optimizer: Any, clock: dict[str, Any]) -> None:
    """Count the steps that a manual module takes through Lightning's optimizer wrapper.

    Lightning's loop counts by the same private attribute: the wrapper has no public one.
    """

    def stepped() -> None:
        clock["global_step"] += 1

    optimizer._on_after_step = stepped
