"""The one classification module: any network, any number of classes."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from fedlightning.models.heads import head_name
from fedlightning.models.labels import check_labels
from fedlightning.models.metrics import ClassificationMetrics
from fedlightning.models.recipes import INSTANTIATOR, callable_recipe, net_recipe, plain_factory

DEFAULT_LR = 0.1
"""Learning rate of the default optimizer."""
_UNRECORDED = "fedlightning_unrecorded"


class Classifier(LightningModule):
    """A LightningModule that trains and scores a classification network on batches `(x, y)`.

    `x` is the network's input. `y` holds whole-number labels `0 .. num_classes - 1` of shape `(batch,)` or `(batch,
    1)`. A network with one output (a single logit, `(batch,)` or `(batch, 1)`) is binary: the loss is binary cross
    entropy on that logit, and everything else uses the equivalent pair of logits `(0, logit)`.

    Logged once at the end of an epoch, over all samples: `train_loss` (mean of the epoch, with label smoothing), and
    with the prefixes `val_` and `test_` the scores `loss` (plain cross entropy, without smoothing), `accuracy`,
    `balanced_accuracy`, `f1_macro`, `f1_macro_all`, `auroc` and `ece`. `ClassificationMetrics` defines each of them and
    says when AUROC is NaN. `predict_step` returns probabilities of shape `(batch, num_classes)`, with 2 columns for a
    binary network.

    Checkpoints hold plain values only, so that `Classifier.load_from_checkpoint(path)` works on its own for every
    network with `init_args` (all of this package; see `fedlightning.models.recipes`), from Python and from the command
    line. For other networks pass `net=`; the error says so.

    Args:
        net: The network. `net(x)` returns logits `(batch, num_classes)`, or one logit if binary.
        num_classes: Number of classes. 1 and 2 both mean two classes; with 1 the network must return one logit.
        optimizer: Makes the optimizer from the parameters, as in `partial(torch.optim.AdamW, lr=1e-3)` or, in YAML,
            `{class_path: torch.optim.AdamW, init_args: {lr: 1e-3}}`. `None` is `torch.optim.SGD` with `lr`, without
            momentum or weight decay: the local optimizer that FedAvg and most papers assume.
        scheduler: Makes the learning-rate scheduler from the optimizer. `ReduceLROnPlateau` monitors `val_loss`.
        lr: Learning rate of the default optimizer; `None` is 0.1. The networks of this package train with it, except
            `SmallTransformer` and `PLayerCifarNet`, which need AdamW. Not allowed together with `optimizer`.
        label_smoothing: Label smoothing of the training loss, in [0, 1).
        scheduler_interval: When the scheduler steps: once an `"epoch"` or once a `"step"`.

    Raises:
        ValueError: If both `lr` and `optimizer` are given, or a value is out of its range.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Classifier
        >>> module = Classifier(MLP(4, [8], 3), num_classes=3, lr=0.05)
        >>> batch = torch.zeros(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> module.predict_step(batch).shape, module.head_name
        (torch.Size([5, 3]), 'net.fc2')
    """

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        optimizer: OptimizerCallable | None = None,
        scheduler: LRSchedulerCallable | None = None,
        lr: float | None = None,
        label_smoothing: float = 0.0,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__()
        if optimizer is not None and lr is not None:
            raise ValueError(
                f"Classifier got lr={lr} and an optimizer. lr belongs to the default SGD only: leave it out and set "
                "the learning rate in the optimizer (optimizer.init_args.lr)."
            )
        if num_classes < 1:
            raise ValueError(f"Classifier(num_classes={num_classes}): there must be at least 1 class.")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"Classifier(label_smoothing={label_smoothing}): it must lie in [0, 1).")
        self.save_hyperparameters(ignore=["net", "optimizer", "scheduler"])
        if "_instantiator" in self.hparams:  # LightningCLI made this object and gives its own plain configuration
            self.save_hyperparameters()
        self.net = net
        self.num_classes = num_classes
        self.lr = DEFAULT_LR if lr is None else lr
        self.label_smoothing = label_smoothing
        self.scheduler_interval = scheduler_interval
        self.make_optimizer = plain_factory(optimizer)
        self.make_scheduler = plain_factory(scheduler)
        self.val_metrics = ClassificationMetrics(max(2, num_classes))
        self.test_metrics = ClassificationMetrics(max(2, num_classes))
        self._record_recipes()

    @property
    def head_name(self) -> str:
        """Name of the head inside this module, such as `net.fc2`: the part that personal-head algorithms keep local."""
        return f"net.{head_name(self.net)}"

    def forward(self, x: Any) -> Tensor:
        """Return the network's logits, as it returns them."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch, a scalar."""
        x, y = self._labelled(batch, batch_idx)
        loss = self.loss(self(x), y, self.label_smoothing)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(y))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the `val_` scores."""
        self._score(self.val_metrics, batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the `test_` scores."""
        self._score(self.test_metrics, batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return probabilities `(batch, num_classes)` for a batch `x` or `(x, y)`."""
        x = batch[0] if isinstance(batch, list | tuple) else batch
        return self.class_logits(self(x)).softmax(1)

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

    def class_logits(self, logits: Tensor) -> Tensor:
        """Return logits as `(batch, num_classes)` in at least float32; a single logit z becomes the pair (0, z).

        Args:
            logits: The network's output, shape `(batch, num_classes)`, or `(batch,)` or `(batch, 1)` if binary.

        Raises:
            ValueError: If the network's output does not fit `num_classes`.
        """
        shape = tuple(logits.shape)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if logits.ndim == 1:
            logits = logits.unsqueeze(1)
        single = logits.ndim == 2 and logits.shape[1] == 1
        if single and self.num_classes <= 2:
            return torch.cat([torch.zeros_like(logits), logits], dim=1)
        if single or logits.ndim != 2 or logits.shape[1] != self.num_classes:
            shapes = {1: "(N,) or (N, 1)", 2: "(N, 2), or (N, 1) for one logit"}
            raise ValueError(
                f"{type(self.net).__name__} returned logits of shape {shape}, but Classifier(num_classes="
                f"{self.num_classes}) needs {shapes.get(self.num_classes, f'(N, {self.num_classes})')}. Give the "
                "network that many outputs or change num_classes."
            )
        return logits

    def loss(self, logits: Tensor, y: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the mean cross entropy, in at least float32.

        Args:
            logits: The network's output, as for `class_logits`.
            y: Labels, shape `(batch,)`.
            label_smoothing: Share of the target that is spread over all classes.
        """
        pair = self.class_logits(logits)
        if logits.ndim == 2 and logits.shape[1] > 1:
            return F.cross_entropy(pair, y, label_smoothing=label_smoothing)
        target = y.to(pair.dtype) * (1 - label_smoothing) + label_smoothing / 2
        return F.binary_cross_entropy_with_logits(pair[:, 1], target)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        factories = {"optimizer": self.make_optimizer, "scheduler": self.make_scheduler}
        lost = [name for name, made in factories.items() if made is not None and callable_recipe(made) is None]
        if lost:
            checkpoint[_UNRECORDED] = lost

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        have = {"optimizer": self.make_optimizer, "scheduler": self.make_scheduler}
        for name in checkpoint.get(_UNRECORDED, []):
            if have[name] is None:
                rank_zero_warn(
                    f"The {name} of this checkpoint was a function that cannot be written down, so the loaded "
                    f"Classifier has the default one. To train on, pass {name}=... to load_from_checkpoint."
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
        self._hparams_initial = copy.deepcopy(self._hparams)
        self._set_hparams({"_instantiator": INSTANTIATOR})  # how load_from_checkpoint turns recipes into objects

    def _labelled(self, batch: Any, batch_idx: int) -> tuple[Any, Tensor]:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise ValueError(
                f"Classifier needs batches (x, y), but the loader gave a {type(batch).__name__}. Return a pair from "
                "the dataset or the collate function, or override training_step and the like."
            )
        x, y = batch
        if y.ndim == 2 and y.shape[1] == 1:
            y = y.squeeze(1)
        if y.device.type == "cpu" or batch_idx == 0:  # reading values synchronises a GPU: first batch only
            check_labels(y, max(2, self.num_classes))
        return x, y.long()

    def _score(self, metrics: ClassificationMetrics, batch: Any, batch_idx: int) -> None:
        x, y = self._labelled(batch, batch_idx)
        logits = self(x)
        metrics.update(self.class_logits(logits), y, self.loss(logits, y))

    def _start_scores(self, metrics: ClassificationMetrics) -> None:
        if metrics.update_called:  # not after an epoch that has ended
            metrics.reset()

    def _log_scores(self, stage: str, metrics: ClassificationMetrics) -> None:
        if not metrics.update_called:
            return
        # On one process torchmetrics' own compute() adds nothing but its cost, for every client.
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        values = metrics.compute() if together else ClassificationMetrics.compute(metrics)
        for name, value in values.items():
            shown = name in ("loss", "accuracy")
            self.log(f"{stage}_{name}", value, on_epoch=True, prog_bar=shown, sync_dist=True)
        metrics.reset()
