"""The one segmentation module: any network that returns a class for each pixel or voxel."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from fedlightning.models.supervised import SupervisedModule
from fedlightning.ranges import Range, check_arguments


class Segmenter(SupervisedModule):
    """A LightningModule that trains and scores a segmentation network on batches `(x, y)`.

    `y` holds whole-number labels `(batch, *space)`, 0 is background; the network returns logits `(batch, num_classes,
    *space)`, in two or three dimensions. Logged once at the end of an epoch: `train_loss`, and with the prefixes `val_`
    and `test_` the scores `loss` and `dice` (`DiceMetrics`). `predict_step` returns labels `(batch, *space)`.

    Checkpoints hold plain values only, as those of `Classifier`.

    Args:
        net: The network.
        num_classes: Number of classes, background included.
        optimizer: Makes the optimizer from the parameters. `None` is `torch.optim.SGD` with `lr`.
        scheduler: Makes the learning-rate scheduler from the optimizer. `ReduceLROnPlateau` monitors `val_loss`.
        lr: Learning rate of the default optimizer; `None` is 0.1. Not allowed together with `optimizer`.
        loss: `"dice"`, one minus the soft Dice coefficient (Milletari et al. 2016; FLamby's), or `"dice_ce"`, that and
            the cross entropy.
        scheduler_interval: When the scheduler steps: once an `"epoch"` or once a `"step"`.

    Raises:
        ValueError: If both `lr` and `optimizer` are given, or a value is out of its range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.models import Segmenter
        >>> module = Segmenter(nn.Conv2d(1, 2, 1), num_classes=2)
        >>> module.predict_step((torch.zeros(5, 1, 8, 8), torch.zeros(5, 8, 8))).shape
        torch.Size([5, 8, 8])
    """

    shown = ("loss", "dice")

    def __init__(
        self,
        net: nn.Module,
        num_classes: Annotated[int, Range("[2, inf)", "Background included.")],
        optimizer: OptimizerCallable | None = None,
        scheduler: LRSchedulerCallable | None = None,
        lr: float | None = None,
        loss: Literal["dice", "dice_ce"] = "dice",
        scheduler_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__()
        check_arguments(self, Segmenter.__init__, locals())
        self.save_hyperparameters(ignore=["net", "optimizer", "scheduler"])
        self.num_classes, self.loss_name = num_classes, loss
        self.take_over(net, optimizer, scheduler, lr, scheduler_interval)
        self.val_metrics, self.test_metrics = DiceMetrics(num_classes), DiceMetrics(num_classes)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch, a scalar."""
        logits, y = self._segmented(batch)
        loss = self.loss(logits, y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(y))
        return loss

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return labels `(batch, *space)` for a batch `x` or `(x, y)`."""
        return self(batch[0] if isinstance(batch, list | tuple) else batch).argmax(1)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        r"""Return the mean loss over samples and foreground classes.

        .. math:: 1 - \frac{2 \sum_v p_v [y_v = c]}{\sum_v p_v + \sum_v [y_v = c]}

        with a sum of 1e-9 where class c is neither predicted nor there.

        Args:
            logits: The network's output, `(batch, num_classes, *space)`.
            y: Labels, `(batch, *space)`.
        """
        chances = logits.softmax(1)
        truth = torch.stack([(y == label).to(chances.dtype) for label in range(1, self.num_classes)], dim=1)
        foreground = chances[:, 1:].flatten(2)
        truth = truth.flatten(2)
        dice = 2 * (foreground * truth).sum(2) / (foreground.sum(2) + truth.sum(2) + 1e-9)
        loss = 1 - dice.mean()
        return loss + F.cross_entropy(logits, y) if self.loss_name == "dice_ce" else loss

    def _segmented(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = self._pair(batch)
        logits = self(x)
        if logits.shape[1:2] != (self.num_classes,) or logits.shape[2:] != y.shape[1:] or logits.ndim < 3:
            raise ValueError(
                f"{type(self.net).__name__} returned {tuple(logits.shape)} for labels of shape {tuple(y.shape)}; "
                f"Segmenter needs (batch, {self.num_classes}, *space) for (batch, *space)."
            )
        if y.device.type == "cpu" and len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.num_classes:
            raise ValueError(
                f"The labels go from {int(y.min())} to {int(y.max())}; Segmenter has the classes 0 to {self.num_classes - 1}."
            )
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, y.long()

    def _score(self, metrics: DiceMetrics, batch: Any, batch_idx: int) -> None:
        logits, y = self._segmented(batch)
        metrics.update(logits.argmax(1), y, self.loss(logits, y))


class DiceMetrics(Metric):
    r"""Loss and Dice coefficient of a segmentation.

    .. math:: D_{ic} = 2 |A_{ic} \cap B_{ic}| / (|A_{ic}| + |B_{ic}|)

    with the predicted and the true voxels of sample i and class c. `dice` is the mean over samples and foreground
    classes; a class that is neither predicted nor there in a sample does not count, and without any other `dice` is
    NaN.

    As input to `update` the metric takes predicted and true labels `(batch, *space)` and the mean loss `()`. As output
    of `compute` it returns a dictionary of float32 scalars: `loss` and `dice`.

    Args:
        num_classes: Number of classes, background included.

    Example:
        >>> from torch import tensor
        >>> from fedlightning.models.segmenter import DiceMetrics
        >>> metrics = DiceMetrics(2)
        >>> metrics.update(tensor([[[1, 1, 0, 0]]]), tensor([[[1, 0, 0, 0]]]), loss=tensor(0.5))
        >>> {name: round(score.item(), 3) for name, score in metrics.compute().items()}
        {'loss': 0.5, 'dice': 0.667}
    """

    full_state_update = False
    metric_bounds = {"dice": (0.0, 1.0)}
    losses: list[Tensor]
    dice: list[Tensor]

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        for name in ("losses", "dice"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, predicted: Tensor, target: Tensor, loss: Tensor) -> None:
        """Add a batch."""
        rows = []
        for label in range(1, self.num_classes):
            mask, true = (predicted == label).flatten(1), (target == label).flatten(1)
            rows.append(2 * (mask & true).sum(1).double() / (mask.sum(1) + true.sum(1)))  # 0 / 0 is NaN
        self.dice.append(torch.stack(rows, dim=1))
        self.losses.append(loss.detach().double().expand(len(target)))

    def compute(self) -> dict[str, Tensor]:
        """Return the scores over all samples since the last reset."""
        scores = {"loss": dim_zero_cat(self.losses).mean(), "dice": dim_zero_cat(self.dice).nanmean()}
        return {name: value.float().to(self.device) for name, value in scores.items()}
