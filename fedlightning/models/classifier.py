"""The one classification module: any network, any number of classes.

Check labels before a classifier learns from them.

A classifier with a well-known mistake, to reproduce results that were published with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from fedlightning.models.metrics import ClassificationMetrics
from fedlightning.models.supervised import SupervisedModule
from fedlightning.ranges import (
    Instance,
    NonNegativeFloat,
    PositiveInt,
    Range,
    ShareBelowOne,
    at_most_one,
    check_arguments,
)


def check_labels(y: Tensor, num_classes: int) -> None:
    """Check that labels are whole numbers `0 .. num_classes - 1`.

    Nothing is checked where values cannot be read (`torch.func.vmap`).

    Example:
        >>> import torch
        >>> from fedlightning.models.classifier import check_labels
        >>> check_labels(torch.tensor([0, 2]), num_classes=3)
        >>> check_labels(torch.tensor([0, 3]), num_classes=3)
        Traceback (most recent call last):
        ValueError: Label 3 is outside 0 .. 2: ...
    """
    if y.numel() == 0 or y.dtype == torch.bool:
        return
    try:
        low, high = (bound.item() for bound in torch.aminmax(y))
        whole = not y.is_floating_point() or bool((y == y.round()).all())
    except RuntimeError:  # inside torch.func.vmap
        return
    if not whole:
        raise ValueError("The labels hold fractions. Classifier needs one whole number a sample, not probabilities.")
    if low < 0 or high >= num_classes:
        label = int(low if low < 0 else high)
        way_out = "Remove unlabelled samples" if label < 0 else f"Set num_classes={label + 1}"
        raise ValueError(
            f"Label {label} is outside 0 .. {num_classes - 1}: the Classifier has {num_classes} classes. "
            f"{way_out} or map the labels to 0 .. {num_classes - 1} in the dataset."
        )


class Classifier(SupervisedModule):
    """A LightningModule that trains and scores a classification network on batches `(x, y)`.

    `x` is the network's input. `y` holds whole-number labels `0 .. num_classes - 1` of shape `(batch,)` or `(batch,
    1)`. A network with one output (a single logit, `(batch,)` or `(batch, 1)`) is binary: the loss is binary cross
    entropy on that logit, and everything else uses the equivalent pair of logits `(0, logit)`.

    Logged once at the end of an epoch, over all samples: `train_loss` (mean of the epoch, with label smoothing or the
    focal loss), and with the prefixes `val_` and `test_` the scores `loss` (plain cross entropy), `accuracy`,
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
        focal_gamma: Exponent of the focal loss, as the training loss instead of cross entropy (Lin et al. 2017: 2).
            `None` is cross entropy. See `training_loss`.
        class_weights: Weight of each class in the training loss (the alpha of the focal loss), two for a binary network.
        more_metrics: Further scores: `"kappa"` (Cohen's), `"pr_auc"` (average precision, macro), or both. Off by
            default, since every client is scored at every evaluation: kappa costs about a third of all other scores together,
            the area two to eight times as much (0.6 ms a client of 20 samples and 10 classes, 0.8 and 5 ms with them).
        channels_last: Whether weights of convolutions lie in memory with channels last, which convolutions of 2 or 3
            dimensions are often faster with, above all with `precision="bf16-mixed"`. Sums round otherwise.

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

    shown = ("loss", "accuracy")

    @at_most_one("focal_gamma", "label_smoothing", why="focal loss has no smoothing. Use one of them.")
    def __init__(
        self,
        net: Annotated[nn.Module, Instance("It is a torch.nn.Module that returns logits.")],
        num_classes: PositiveInt,
        optimizer: OptimizerCallable | None = None,
        scheduler: LRSchedulerCallable | None = None,
        lr: NonNegativeFloat | None = None,
        label_smoothing: ShareBelowOne = 0.0,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        focal_gamma: Annotated[float, Range("[0, inf)", "None is cross entropy.")] | None = None,
        class_weights: Sequence[NonNegativeFloat] | None = None,
        more_metrics: Sequence[Literal["kappa", "pr_auc"]] = (),
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        check_arguments(self, Classifier.__init__, locals())
        if class_weights is not None:
            if len(class_weights) != max(2, num_classes):
                raise ValueError(
                    f"Classifier got {len(class_weights)} class_weights for {max(2, num_classes)} classes; give one each."
                )
            if not any(class_weights):
                raise ValueError(f"Classifier got class_weights={list(class_weights)}; they must not all be 0.")
        self.save_hyperparameters(ignore=["net", "optimizer", "scheduler"])
        self.num_classes = num_classes
        self.label_smoothing, self.focal_gamma = label_smoothing, focal_gamma
        self.class_weights = None if class_weights is None else tuple(map(float, class_weights))
        self.take_over(net, optimizer, scheduler, lr, scheduler_interval)
        if channels_last:
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            for weight in net.parameters():
                weight.data = weight.data.contiguous(memory_format=formats.get(weight.ndim, torch.contiguous_format))
        self.val_metrics = ClassificationMetrics(max(2, num_classes), more_metrics)
        self.test_metrics = ClassificationMetrics(max(2, num_classes), more_metrics)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch, a scalar."""
        x, y = self._labelled(batch, batch_idx)
        loss = self.training_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(y))
        return loss

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return probabilities `(batch, num_classes)` for a batch `x` or `(x, y)`."""
        x = batch[0] if isinstance(batch, list | tuple) else batch
        return self.class_logits(self(x)).softmax(1)

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

    def training_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        r"""Return the mean training loss: cross entropy, or the focal loss of Lin et al. (arXiv 1708.02002, eq. 5).

        .. math::
            \text{FL} = -\frac{1}{n} \sum_i \alpha_{y_i} (1 - p_i)^\gamma \log p_i

        where :math:`p_i` is the probability of sample i's own class and :math:`\alpha` are the class weights (1 without
        them). The mean is over the samples, as in FLamby's Fed-ISIC2019. Weighted cross entropy is divided by the sum of
        the samples' weights instead, as torch's.

        Args:
            logits: The network's output, as for `class_logits`.
            y: Labels, shape `(batch,)`.
        """
        if self.focal_gamma is None and self.class_weights is None:
            return self.loss(logits, y, self.label_smoothing)
        pair = self.class_logits(logits)
        weights = None if self.class_weights is None else pair.new_tensor(self.class_weights)
        if self.focal_gamma is None:
            return F.cross_entropy(pair, y, weight=weights, label_smoothing=self.label_smoothing)
        # One minus the probability by expm1, which keeps its digits where the probability is nearly 1.
        log_p = pair.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
        losses = -log_p * (-torch.expm1(log_p)).clamp(min=0) ** self.focal_gamma
        return (losses if weights is None else losses * weights[y]).mean()

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

    def _labelled(self, batch: Any, batch_idx: int) -> tuple[Any, Tensor]:
        x, y = self._pair(batch)
        if y.ndim == 2 and y.shape[1] == 1:
            y = y.squeeze(1)
        if y.device.type == "cpu" or batch_idx == 0:  # reading values synchronises a GPU: first batch only
            check_labels(y, max(2, self.num_classes))
        return x, y.long()

    def _score(self, metrics: ClassificationMetrics, batch: Any, batch_idx: int) -> None:
        x, y = self._labelled(batch, batch_idx)
        logits = self(x)
        metrics.update(self.class_logits(logits), y, self.loss(logits, y))


class MissingLogClassifier(Classifier):
    r"""A `Classifier` whose network ends in a softmax and whose training loss is `NLLLoss`, with no logarithm between them.

    `NLLLoss` expects logarithms of probabilities. Given probabilities it is :math:`-\frac{1}{n} \sum_i p_{y_i}`, whose
    gradient nearly vanishes wherever the network is confident, rightly or wrongly. Programs with this mistake train more
    slowly and stop at a lower accuracy. Arguments and scores are those of `Classifier`; options of its training loss have no
    effect.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP
        >>> from fedlightning.models.classifier import MissingLogClassifier
        >>> module = MissingLogClassifier(MLP(4, [], 2), num_classes=2)
        >>> round(module.training_loss(torch.zeros(3, 2), torch.tensor([0, 1, 1])).item(), 6)
        -0.5
    """

    def training_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return minus the mean probability of the labels.

        Args:
            logits: The network's output, as for `class_logits`.
            y: Labels, shape `(batch,)`.
        """
        return F.nll_loss(self.class_logits(logits).softmax(1), y)
