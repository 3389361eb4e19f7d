"""What a module and its callbacks find around them inside a client: folder, logger and data module of its Trainer.

:class:`VisitCallback` is the core's own part in a fit, as a Lightning callback.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from numbers import Number
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.optim import SGD, Optimizer

from fedlightning.client.client import Client
from fedlightning.client.learning_rates import check_schedulers, decaying, scale_learning_rates, schedulers_of
from fedlightning.client.record import FitResult
from fedlightning.client.requests import LocalSettings
from fedlightning.contract import CallbackList, FederatedCallback, GradientContext, Phase
from fedlightning.contract.messages import ClientLog
from fedlightning.errors import ConfigurationError
from fedlightning.seeding import seed_all
from fedlightning.tensors import dense, momentum_step
from fedlightning.wrappers import user_class


@dataclass
class _Moves:
    """Steps of one parameter group in which the same parameters moved.

    Attributes:
        has_gradient: Whether each parameter of the group has a gradient.
        names: Names of those that have one.
        rates: Learning rates of the steps.
        momenta: By the number of a step with momentum, its momentum, dampening, and whether it is Nesterov's.
    """

    has_gradient: list[bool]
    names: list[str]
    rates: list[float] = field(default_factory=list)
    momenta: dict[int, tuple[float, float, bool]] = field(default_factory=dict)


class VisitCallback(Callback):
    """Addressed seeds, corrections of unscaled gradients, and a count of the steps that the optimizer really took.

    It runs after the federated callbacks and before the ordinary ones.

    Args:
        client: Client whose module trains.
        callbacks: All federated callbacks.
        settings: Settings of local training.
        phase: Phase of the visit.
        work: Epochs or optimizer steps.

    Attributes:
        unit: `"epochs"` or `"steps"`.
        steps: Steps taken by the first optimizer.
        attempts: Steps attempted by the first optimizer; the gradient scaler may have skipped some.
        lr_sums: By parameter name, the sum of its learning rate over the steps taken.
        gradient_weights: By parameter name, the sum of the weights with which SGD has added up its gradients.
    """

    never_logs = True

    def __init__(
        self, client: Client, callbacks: CallbackList, settings: LocalSettings, phase: Phase, work: int
    ) -> None:
        self.client = client
        self.correctors = select_active_callbacks(callbacks.correctors(), phase)
        self.num_samples = client.num_samples
        self.settings = settings
        self.phase = phase.name
        self.address = phase_address(phase)
        self.lr_factor = phase.lr_factor
        self.unit = phase.unit or settings.unit
        self.work = work
        self.steps = 0
        self.attempts = 0
        self._others = 0  # steps of the other optimizers
        self._moved = False
        self._announced: set[int] = set()  # optimizers whose next step Lightning has told of
        self._past_lightning = False
        self._before: list[tuple[Tensor, Tensor]] = []  # what trains, and its values at the start; until a step is seen
        self.first_epoch = self.first_step = 0
        self.lr_sums: dict[str, float] = {}
        self.gradient_weights: dict[str, float] = {}
        self._velocities: dict[tuple[int, str], float] = {}
        self._not_sgd: set[str] = set()
        self._handles: list[Any] = []
        self._names: dict[int, str] = {}
        self._moves: dict[tuple[int, int], _Moves] = {}
        self._payload: Mapping[str, Any] = client.message.extras

    @property
    def contributed(self) -> bool:
        """Whether any optimizer stepped, or trainable entries moved without one that is known here."""
        return bool(self.steps or self._others or self._moved)

    @property
    def unseen(self) -> str:
        """How entries moved past the hooks of optimizers, as the end of a sentence; empty: they did not."""
        if self._moved:
            return "moves its entries without a step of the optimizers that configure_optimizers returns"
        return "steps its optimizers past Lightning (use_pl_optimizer=False)" if self._past_lightning else ""

    def check_moves(self) -> None:
        """Look whether entries have moved, if no optimizer is known to have moved them."""
        self._moved = any(not torch.equal(value, before) for value, before in self._before)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first_epoch, self.first_step = trainer.current_epoch, trainer.global_step
        named = list(pl_module.named_parameters(remove_duplicate=False))
        self._names = {id(p): name for name, p in named}
        self._before = [(p, self._values(p)) for p in {id(p): p for _, p in named}.values() if p.requires_grad]
        scaler = self.client.record.lightning.get(self.phase, {}).get("precision")
        if scaler and self.settings.optimizer_state == "reset":  # under "keep" Lightning itself restored it
            trainer.precision_plugin.load_state_dict(scaler)
        self._decay_learning_rates(trainer, pl_module)
        for index, optimizer in enumerate(trainer.optimizers):
            if self.correctors and getattr(trainer.precision_plugin, "scaler", None) is not None:
                self._refuse_fused(optimizer)
            self._handles.append(optimizer.register_step_post_hook(partial(self._stepped, index)))

    def _values(self, parameter: Tensor) -> Tensor:
        """Return a parameter's values: those that were sent, without a copy, where it still has them."""
        sent = self.client.received.get(self._names[id(parameter)])
        if sent is not None and sent.device == parameter.device and torch.equal(sent, parameter):
            return sent
        return parameter.detach().clone()

    def _refuse_fused(self, optimizer: Optimizer) -> None:
        """Raise ValueError if a fused optimizer would hide the unscaled gradients from the correctors."""
        if any(group.get("fused") for group in optimizer.param_groups):
            names = ", ".join(callback.key for callback in self.correctors)
            raise ValueError(
                f"{names} corrects gradients, but the fused {type(optimizer).__name__} still holds scaled gradients "
                "under fp16 at that point. Use fused=False or precision='bf16-mixed'."
            )

    def _decay_learning_rates(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the decay per round, which an optimizer that is made anew in every visit does not know."""
        record, decay = self.client.record.lightning.get(self.phase, {}), self.settings.lr_decay
        keeps = self.settings.optimizer_state == "keep" and "checkpoint" in record
        # not every visit has every phase
        rounds = self.client.round - (record.get("round", self.client.record.last_round) if keeps else 0)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        listed = {id(scheduler) for scheduler in schedulers}
        others = [other for other in schedulers_of(pl_module, trainer.optimizers) if id(other) not in listed]
        if not record and (decay, self.lr_factor) != (1.0, 1.0):  # the first fit of the phase
            keeping = self.settings.optimizer_state == "keep"
            check_schedulers(trainer.optimizers, schedulers, decaying(decay), keeps=keeping)
            check_schedulers(trainer.optimizers, others, decaying(decay))
        scale_learning_rates(trainer.optimizers, schedulers, decay**rounds * (1.0 if keeps else self.lr_factor))
        # nobody keeps those that configure_optimizers does not return: they are new in every visit
        scale_learning_rates([], others, decay**self.client.round * self.lr_factor)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch - self.first_epoch
        if epoch > 0 and self.unit == "steps" and not (self.attempts or self._others):
            raise ValueError(
                f"{user_class(pl_module).__name__} has taken no step of an optimizer in a whole epoch, and its work "
                "is counted in steps: it would never end. Set local_epochs, or step self.optimizers()."
            )
        seed_all(self.settings.seed, self.client.visit, self.client.id, self.address, epoch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.attempts += optimizer is trainer.optimizers[0]
        self._announced.add(id(optimizer))
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
        anchor = self.client.anchor(name, parameter.device)
        gradient = before = dense(parameter.grad)
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
        return parameter.grad if gradient is before else gradient.to(parameter.grad.dtype)

    def _stepped(self, index: int, optimizer: Optimizer, *ignored: Any) -> None:
        moved = False
        for number, group in enumerate(optimizer.param_groups):
            has_gradient = [parameter.grad is not None for parameter in group["params"]]
            moves = self._moves.get((index, number))
            if moves is None or moves.has_gradient != has_gradient:
                self._settle((index, number))
                names = [self._names.get(id(parameter)) for parameter in group["params"]]
                chosen = [
                    name for name, is_moving in zip(names, has_gradient, strict=True) if is_moving and name is not None
                ]
                moves = self._moves[index, number] = _Moves(has_gradient, chosen)
            if group.get("momentum"):
                momentum = float(group["momentum"]), float(group.get("dampening", 0.0)), bool(group.get("nesterov"))
                moves.momenta[len(moves.rates)] = momentum
            moves.rates.append(float(group["lr"]))
            moved |= bool(moves.names)
            if type(optimizer) is not SGD:
                self._not_sgd.update(moves.names)
        is_announced = id(optimizer) in self._announced
        self._announced.discard(id(optimizer))
        self._past_lightning |= moved and not is_announced
        self.attempts += index == 0 and not is_announced
        self._others += index != 0 and moved
        self.steps += index == 0 and moved  # a training_step that returned None moves nothing
        if moved:
            self._before = []

    def _settle(self, which: tuple[int, int]) -> None:
        """Add up the learning rates of one optimizer's group, in the order of its steps."""
        moves = self._moves.pop(which, None)
        if moves is None:
            return
        totals: dict[float, float] = {}
        for name in moves.names:
            before = self.lr_sums.get(name, 0.0)
            if before not in totals:
                totals[before] = reduce(add, moves.rates, before)
            self.lr_sums[name] = totals[before]
        self._weigh(which[0], moves)

    def _weigh(self, index: int, moves: _Moves) -> None:
        """Add up the weights of the gradients in SGD's movement; without momentum they are the learning rates."""
        totals: dict[tuple[float, float | None], tuple[float, float | None]] = {}
        for name in moves.names:
            before = self.gradient_weights.get(name, 0.0), self._velocities.get((index, name))
            if before not in totals:
                weight, velocity = before
                for number, lr in enumerate(moves.rates):
                    step = 1.0
                    if number in moves.momenta:
                        step, velocity = momentum_step(velocity, 1.0, *moves.momenta[number])
                    weight += lr * step
                totals[before] = weight, velocity
            self.gradient_weights[name], velocity = totals[before]
            if velocity is not None:
                self._velocities[index, name] = velocity

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()
        self.check_moves()
        self._before = []
        for which in list(self._moves):
            self._settle(which)
        for name in self._not_sgd:  # no sum of gradients: there is no such weight
            self.gradient_weights.pop(name, None)


class EndsByEpochs(VisitCallback):
    """Ends a visit after its epochs where the Trainer's own limit is the horizon of the whole federation."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop |= trainer.current_epoch - self.first_epoch + 1 >= self.work


class EndsBySteps(VisitCallback):
    """Ends a visit after its steps: there, and under manual optimization, whose limit counts steps through Lightning only."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        count = trainer.global_step - self.first_step  # as a Trainer whose clocks start anew
        if not pl_module.automatic_optimization:
            count = max(count, self.attempts or self._others)
        trainer.should_stop |= count >= self.work


class UnseenStepsError(ConfigurationError):
    """A module moves its entries past the optimizers whose steps something goes by."""


def refuse_unseen(callbacks: Iterable[FederatedCallback], module: LightningModule, visit: FitResult, unit: str) -> None:
    """Refuse what goes by the steps of optimizers where a module moves its entries past them.

    Args:
        callbacks: The federated callbacks.
        module: The module that trained.
        visit: What it did.
        unit: What the trainer counts.

    Raises:
        UnseenStepsError: If one of them corrects gradients or counts steps that nobody sees, or the trainer counts these.
    """
    uncounted = not visit.steps and not visit.lr_sums
    going = [
        callback.key
        for callback in callbacks
        if callback.claims("correct_gradient") or (uncounted and callback.facts.counts_steps)
    ]
    going += ["local_steps"] if uncounted and unit == "steps" else []
    if going:
        raise UnseenStepsError(
            f"{going[0]} goes by the steps of optimizers, and {user_class(module).__name__} {visit.unseen}: they cannot be "
            f"corrected or counted. Call step() on what self.optimizers() returns, or leave out {going[0]}."
        )


def phase_address(phase: Phase) -> str:
    """Return the name by which the randomness of a phase is addressed."""
    return phase.repeats or phase.name


def select_active_callbacks(callbacks: list[FederatedCallback], phase: Phase) -> list[FederatedCallback]:
    """Return those of `callbacks` whose terms act in `phase`."""
    return [callback for callback in callbacks if phase.federated or callback.key in phase.terms_of]


MEDIA = ("add_image", "add_images", "add_histogram", "add_text", "add_figure")
"""Methods of a TensorBoard writer that are called again on the run's loggers, in the form (tag, value, step)."""


class ClientLogger(DummyLogger):
    """A logger that keeps what is logged inside one client's fit, or ignores it. Any call works, none raises.

    The main process writes what was kept to the run's loggers (`Recorder.log_clients`), since a client may train in
    another process.

    Args:
        folder: Folder of the client: `save_dir`, `log_dir`. `None`: the run writes nothing.
        logs: List to append to. `None`: nothing is kept.
        prefix: Put before every name.
        first_step: Added to every step: the client's steps in earlier visits.

    Example:
        >>> logs = []
        >>> logger = ClientLogger("runs/clients/a", logs, first_step=10)
        >>> logger.log_metrics({"loss": 0.5}, step=2)
        >>> logger.experiment.add_scalar("rate", 0.1, 3)
        >>> logs[0].values, logs[0].step, logs[1].values, logs[1].step
        ({'loss': 0.5}, 12, {'rate': 0.1}, 13)
        >>> ClientLogger().experiment.add_scalar("rate", 0.1)  # nothing is kept
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        logs: list[ClientLog] | None = None,
        prefix: str = "",
        first_step: int = 0,
    ) -> None:
        super().__init__()
        self._folder = None if folder is None else str(folder)
        self._logs, self._prefix, self._first_step = logs, prefix, first_step
        self._newest = 0
        self._experiment: Any = ClientExperiment(self)

    @property
    def save_dir(self) -> str | None:
        """Folder of the client."""
        return self._folder

    @property
    def log_dir(self) -> str | None:
        """Folder of the client."""
        return self._folder

    @property
    def root_dir(self) -> str | None:
        """Folder of the client."""
        return self._folder

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep the numbers among `metrics`."""
        values = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        if self._logs is not None and values:
            self._logs.append(ClientLog(self._named(values), self._step(step)))

    def log_media(self, method: str, tag: str, value: Any, step: int | None) -> None:
        """Keep a call of one of :data:`MEDIA`, with the value as it is now."""
        if self._logs is not None:
            value = value.detach().cpu().clone() if isinstance(value, Tensor) else copy.copy(value)
            self._logs.append(ClientLog(self._named({tag: value}), self._step(step), method))

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        return {f"{self._prefix}{name}": value for name, value in values.items()}

    def _step(self, step: int | None) -> int:
        self._newest = self._newest if step is None else int(step)
        return self._first_step + self._newest


class ClientExperiment:
    """What `self.logger.experiment` is inside a client. It knows the common calls of TensorBoard and W&B; others do nothing.

    Args:
        logger: Keeps what is logged.
    """

    def __init__(self, logger: ClientLogger) -> None:
        self._logger = logger

    def add_scalar(
        self, tag: str, scalar_value: Any, global_step: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Keep a number."""
        self._logger.log_metrics({tag: scalar_value}, global_step)

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Keep several numbers under `main_tag/name`."""
        self._logger.log_metrics({f"{main_tag}/{name}": value for name, value in tag_scalar_dict.items()}, global_step)

    def log(self, data: Mapping[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Keep the numbers among `data`."""
        self._logger.log_metrics(data, step)

    log_metrics = log

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> None:
            if name in MEDIA and len(args) >= 2:
                step = kwargs.get("global_step", args[2] if len(args) > 2 else None)
                self._logger.log_media(name, args[0], args[1], step)

        return method

    def __getitem__(self, index: Any) -> ClientExperiment:
        return self


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.size == 1 if isinstance(value, np.ndarray) else value.numel() == 1
    return isinstance(value, Number) and not isinstance(value, complex)


@dataclass
class TrainerContext:
    """What the Trainer of a fit shows.

    Attributes:
        folder: `trainer.default_root_dir` and `trainer.log_dir`. `None`: the run writes nothing.
        logger: `trainer.logger`.
        datamodule: `trainer.datamodule`.
    """

    folder: str | None
    logger: ClientLogger
    datamodule: DataModuleView | None


class DataModuleView:
    """The user's data module as a client sees it: its attributes, with the loaders of the client in place of its own.

    Args:
        source: The user's data module.
        loader: Gives the client's loader of a split. `None`: of a copy, which belongs to no client.
    """

    _log_hyperparams = prepare_data_per_node = False

    def __init__(self, source: Any, loader: Callable[[str], Any] | None = None) -> None:
        self._source, self._loader = source, loader

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the user's data module, for `isinstance`."""
        return type(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)

    def __reduce__(self) -> Any:
        return DataModuleView, (self._source,)

    def _of_client(self, split: str) -> Any:
        if self._loader is None:
            raise RuntimeError(
                f"{split}_dataloader() is called on a copy of trainer.datamodule, which belongs to no client. Use "
                "self.trainer.datamodule."
            )
        return self._loader(split)

    def train_dataloader(self) -> Any:
        """Return the client's training batches."""
        return self._of_client("train")

    def val_dataloader(self) -> Any:
        """Return the client's validation batches."""
        return self._of_client("val")

    def test_dataloader(self) -> Any:
        """Return the client's test batches."""
        return self._of_client("test")

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the federation prepares the data."""

    prepare_data = setup = teardown = on_exception = load_state_dict = _nothing
    on_save_checkpoint = on_load_checkpoint = _nothing

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state of the data is not a client's."""
        return {}
