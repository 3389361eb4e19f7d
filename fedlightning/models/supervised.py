"""What all modules here that train a network on batches `(x, y)` share: optimizer, checkpoints, scores of an epoch."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from fedlightning.models.networks import head_name
from fedlightning.models.recipes import INSTANTIATOR, callable_recipe, net_recipe, plain_factory

_UNRECORDED = "fedlightning_unrecorded"


class SupervisedModule(LightningModule):
    """Base of `Classifier` and `Regressor`: a network, its optimizer, and metrics over a whole split.

    Subclasses call `save_hyperparameters` and then `take_over` in their constructors, and define the steps.

    Example:
        >>> from fedlightning.models import MLP, Classifier, SupervisedModule
        >>> isinstance(Classifier(MLP(4, [], 2), num_classes=2), SupervisedModule)
        True
    """

    shown: tuple[str, ...] = ("loss",)
    """Scores that the progress bar shows."""
    default_lr: float = 0.1
    """Learning rate of the default optimizer."""
    val_metrics: Any
    test_metrics: Any

    def take_over(
        self, net: nn.Module, optimizer: Any, scheduler: Any, lr: float | None, scheduler_interval: str
    ) -> None:
        """Keep the network and what makes its optimizer, and write down how they were made.

        Args:
            net: The network.
            optimizer: Makes the optimizer from the parameters; `None` is SGD with `lr`.
            scheduler: Makes the scheduler from the optimizer, or `None`.
            lr: Learning rate of the default optimizer; `None` is `default_lr`.
            scheduler_interval: `"epoch"` or `"step"`.

        Raises:
            ValueError: If an optimizer and a learning rate are given.
        """
        if optimizer is not None and lr is not None:
            raise ValueError(
                f"{type(self).__name__} got lr={lr} and an optimizer. lr belongs to the default SGD only: leave it out and "
                "set the learning rate in the optimizer (optimizer.init_args.lr)."
            )
        if "_instantiator" in self.hparams:  # LightningCLI made this object and gives its own plain configuration
            self.save_hyperparameters()
        self.net = net
        self.lr = self.default_lr if lr is None else lr
        self.scheduler_interval = scheduler_interval
        self.make_optimizer = plain_factory(optimizer)
        self.make_scheduler = plain_factory(scheduler)
        self._record_recipes()

    @property
    def head_name(self) -> str:
        """Name of the head inside this module, such as `net.fc2`: the part that personal-head algorithms keep local."""
        return f"net.{head_name(self.net)}"

    def forward(self, x: Any) -> Tensor:
        """Return the network's logits, as it returns them."""
        logits: Tensor = self.net(x)
        return logits

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the `val_` scores."""
        self._score(self.val_metrics, batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the `test_` scores."""
        self._score(self.test_metrics, batch, batch_idx)

    @abstractmethod
    def _score(self, metrics: Any, batch: Any, batch_idx: int) -> None:
        """Add a batch to some scores."""

    def on_validation_epoch_start(self) -> None:
        self._start_scores(self.val_metrics)

    def on_test_epoch_start(self) -> None:
        self._start_scores(self.test_metrics)

    def on_validation_epoch_end(self) -> None:
        self._log_scores("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_metrics)

    def configure_optimizers(self) -> Any:
        """Return the optimizer over all parameters of this module, with its scheduler if one is set."""
        factory = self.make_optimizer
        parameters = self.parameters()
        optimizer = torch.optim.SGD(parameters, lr=self.lr) if factory is None else factory(parameters)
        if self.make_scheduler is None:
            return optimizer
        schedule = {
            "scheduler": self.make_scheduler(optimizer),
            "interval": self.scheduler_interval,
            "monitor": "val_loss",
        }
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        factories = {"optimizer": self.make_optimizer, "scheduler": self.make_scheduler}
        lost = [name for name, factory in factories.items() if factory is not None and callable_recipe(factory) is None]
        if lost:
            checkpoint[_UNRECORDED] = lost

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        have = {"optimizer": self.make_optimizer, "scheduler": self.make_scheduler}
        for name in checkpoint.get(_UNRECORDED, []):
            if have[name] is None:
                rank_zero_warn(
                    f"The {name} of this checkpoint was a function that cannot be written down, so the loaded "
                    f"{type(self).__name__} has the default one. To train on, pass {name}=... to load_from_checkpoint."
                )

    def _record_recipes(self) -> None:
        """Put net, optimizer and scheduler into the hyperparameters as recipes (plain values)."""
        recipes: dict[str, Any] = {
            "optimizer": callable_recipe(self.make_optimizer),
            "scheduler": callable_recipe(self.make_scheduler),
        }
        recipe = net_recipe(self.net)
        if "net" not in self.hparams or "init_args" in vars(self.net):
            recipes["net"] = recipe
        self._set_hparams(recipes)
        self._hparams_initial = copy.deepcopy(self.hparams)
        self._set_hparams({"_instantiator": INSTANTIATOR})  # how load_from_checkpoint turns recipes into objects

    def _pair(self, batch: Any) -> tuple[Any, Tensor]:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise ValueError(
                f"{type(self).__name__} needs batches (x, y), but the loader gave a {type(batch).__name__}. Return a pair "
                "from the dataset or the collate function, or override training_step and the like."
            )
        x, y = batch
        return x, y

    def _start_scores(self, metrics: Any) -> None:
        if metrics.update_called:  # not after an epoch that has ended
            metrics.reset()

    def _log_scores(self, stage: str, metrics: Any) -> None:
        if not metrics.update_called:
            return
        # On one process torchmetrics' own compute() adds nothing but its cost, for every client.
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        values = metrics.compute() if together else type(metrics).compute(metrics)
        for name, value in values.items():
            if not together and value.dtype == torch.float32 and not value.ndim:
                value = value.item()  # a number takes a shorter way, and makes the same tensor
            self.log(f"{stage}_{name}", value, on_epoch=True, prog_bar=name in self.shown, sync_dist=True)
        metrics.reset()
