"""Training at the server, such as ensemble distillation on public data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fedlightning.client.probes import move_batch, outputs
from fedlightning.compat.lightning_runs import detached, quiet
from fedlightning.datamodules.public import addressable, public_loader, size_of
from fedlightning.datamodules.sampling import AddressedSampler, reseed_loader, seed_in_workers
from fedlightning.seeding import address, generator, isolated
from fedlightning.tensors import dense, ties
from fedlightning.wrappers.muting import evaluating, muted

if TYPE_CHECKING:
    from fedlightning.server.server import Server

ModuleT = TypeVar("ModuleT", bound=nn.Module)

OF_RUN = ("accelerator", "precision", "plugins", "deterministic", "benchmark", "detect_anomaly", "default_root_dir")
"""Arguments of the run's Trainers that a fit at the server has too: device and precision."""
EPOCHS_OF_A_ROUND = 2**31
"""More than any fit has, so that its epochs never get the address of another round's."""
VALIDATIONS = 10
"""Validations within the patience, or within the steps where there is none."""


class SchedulerOf(Protocol):
    """Makes a scheduler, which steps after every optimizer step."""

    def __call__(self, optimizer: Any, /) -> Any: ...


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam with learning rate 1e-3."""
    return torch.optim.Adam(parameters, lr=1e-3)


class ServerTraining:
    """Reads public data and trains models at the server: `server.training`.

    Args:
        server: The server.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.blueprint = server, server.blueprint

    @property
    def device(self) -> torch.device:
        """Device of the run. Models at the server are on the CPU, except while they train or give outputs."""
        return self.blueprint.device

    @property
    def precision(self) -> Any:
        """Lightning's precision plugin (for autocast)."""
        return self.blueprint.precision

    @property
    def public_size(self) -> int:
        """Number of public samples; 0 without any."""
        return size_of(*self.server.population.public_source())

    def public(
        self,
        ids: Tensor | Sequence[int] | None = None,
        *,
        targets: Tensor | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
    ) -> DataLoader[Any]:
        """Return a loader of public samples, for :meth:`fit` or :meth:`outputs`."""
        loader = public_loader(
            *self.server.population.public_source(),
            ids,
            targets=targets,
            batch_size=batch_size,
            shuffle=shuffle,
            reader="server",
        )
        self._start(loader, "public")
        return loader

    def public_ids(self, count: int, purpose: str = "public") -> Tensor:
        """Return the positions of a random subset of the public samples, addressed by (seed, round, server, purpose)."""
        if count < 1:
            raise ValueError(f"server.training.public_ids(count={count}): use 1 or more.")
        size = len(addressable(*self.server.population.public_source()).dataset)  # type: ignore[arg-type]
        if count >= size:
            return torch.arange(size)
        draw = generator(self.blueprint.settings.seed, self.server.round, "server", purpose)
        return torch.randperm(size, generator=draw)[:count].sort().values

    def outputs(self, module: ModuleT, loader: Iterable[Any], forward: Callable[[ModuleT, Any], Tensor]) -> Tensor:
        """Return what a function of module and batch gives over a loader, in eval mode, without gradients or a trace."""
        seed = (self.blueprint.settings.seed, self.server.round, "server", "outputs")
        return outputs(module, loader, forward, self.device, self.precision, *seed)

    def fit(
        self,
        module: ModuleT,
        loader: Any,
        loss: Callable[[ModuleT, Any], Tensor],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] = adam,
        scheduler: SchedulerOf | None = None,
        gradient_clip_val: float | None = None,
        validate: Callable[[ModuleT], float] | None = None,
        patience: int | None = None,
        purpose: str = "fit",
    ) -> float:
        """Train a module in place, on the run's device and precision, and leave it on the CPU in its former mode.

        Randomness is addressed by (seed, round, server, purpose); the global generators stay as they are.
        """
        work = _work(steps, epochs, loader)
        if patience is not None and (patience < 1 or validate is None):
            raise ValueError(
                f"server.training.fit(patience={patience}) needs 1 step or more, and validate=... to look at."
            )
        if work == 0:
            return math.nan
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(f"server.training.fit: no parameter of {type(module).__name__} needs a gradient.")
        wrapped = _Fit(module, loss, optimizer, scheduler)
        best = None
        if validate is not None:
            best = _Best(module, validate, patience, max(1, (patience or work) // VALIDATIONS), work)
        modes = {part: part.training for part in module.modules()}
        if not module.training:
            module.train()
        kept = {
            key: copy.deepcopy(value)
            for key, value in self.blueprint.settings.trainer_arguments.items()
            if key in OF_RUN
        }
        try:
            with isolated(self.blueprint.settings.seed, self.server.round, "server", purpose), muted(module), quiet():
                self._start(loader, purpose)
                trainer = Trainer(
                    **kept,
                    devices=1,
                    max_steps=work,
                    max_epochs=-1,
                    gradient_clip_val=gradient_clip_val,
                    callbacks=[] if best is None else [best],
                    logger=False,
                    limit_val_batches=0,
                    use_distributed_sampler=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    num_sanity_val_steps=0,
                )
                trainer.fit(wrapped, train_dataloaders=loader)
        finally:
            module.cpu()
            for part, mode in modes.items():
                part.training = mode
                if isinstance(part, LightningModule):
                    detached(part)
            module.zero_grad(set_to_none=True)
        if best is not None:
            module.load_state_dict(best.state)
        return float(wrapped.last)

    def _start(self, loader: Any, purpose: str) -> None:
        """Address the order of a loader's batches by (seed, round, server, purpose)."""
        seed = address(self.blueprint.settings.seed, "server", purpose)
        seed_in_workers(loader)
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, AddressedSampler):
            sampler.start(seed=seed, round=self.server.round, epochs_per_round=EPOCHS_OF_A_ROUND)
        else:
            reseed_loader(loader, seed, "samplers", self.server.round)


def _work(steps: int | None, epochs: int | None, loader: Any) -> int:
    """Return the optimizer steps of a fit."""
    amounts = {name: value for name, value in (("steps", steps), ("epochs", epochs)) if value is not None}
    if len(amounts) != 1 or min(amounts.values()) < 0:
        raise ValueError(
            f"server.training.fit got {amounts or 'neither steps nor epochs'}; give one of them, 0 or more."
        )
    if next(iter(amounts.values())) == 0:
        return 0
    if len(loader) == 0:
        raise ValueError("server.training.fit got a loader without a batch.")
    return steps if steps is not None else int(epochs or 0) * len(loader)


class _Fit(LightningModule):
    """A module, a loss and an optimizer for Lightning's Trainer."""

    def __init__(self, module: nn.Module, loss: Any, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        self.module, self.loss, self.make_optimizer, self.make_scheduler = module, loss, optimizer, scheduler
        self.last = torch.tensor(math.nan)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.module, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"server.training.fit(loss=...) returned {what}; return a tensor with one number.")
        self.last = loss.detach()
        if not bool(torch.isfinite(self.last)):
            raise FloatingPointError(
                f"The loss of server.training.fit is {float(self.last)} in step {self.global_step + 1}. Lower the learning "
                "rate of its optimizer, or clip gradients (gradient_clip_val)."
            )
        return loss

    def on_after_backward(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = dense(parameter.grad)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return (
            move_batch(self.module, batch)
            if isinstance(self.module, LightningModule)
            else move_data_to_device(batch, device)
        )

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(
            [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        )
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


@dataclass
class _Best(Callback):
    """Keeps the best state of a module and ends a fit that finds no better one."""

    module: nn.Module
    validate: Callable[[Any], float]
    patience: int | None
    every: int
    steps: int
    state: dict[str, Tensor] = field(default_factory=dict)
    score: float = -math.inf
    step: int = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if step % self.every == 0 or step == self.steps:
            self._look(step)
            trainer.should_stop |= self.patience is not None and step - self.step >= self.patience

    def _look(self, step: int) -> None:
        with isolated("validate"), evaluating(self.module), torch.no_grad():
            score = float(self.validate(self.module))
        if not self.state or ties.better_than_rounding(score, self.score):
            self.state = {name: value.detach().to("cpu", copy=True) for name, value in self.module.state_dict().items()}
            self.score, self.step = score, step
