"""FedType: a private model imitates what a shared proxy is sure of; the proxy learns from the private one's predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import Change, Client, Facts, Phase, Stage, WeightingName, generator, requires
from fedlightning.callbacks.shared.mutual import SharedPeer, divergence
from fedlightning.callbacks.shared.representations import Labels, labels_of
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, Range, Share, make_init
from fedlightning.tensors import module_state
from fedlightning.wrappers.pair import JointLoss, Side, minimise, shared_entries, shared_of, sides_of

TEMPERATURES = 0.1, 10.0
"""Range in which the temperature is sought: without an error among the samples, there is no best one."""


@dataclass(frozen=True)
class PredictionSets:
    """Regularised adaptive prediction sets of one model, calibrated.

    Angelopoulos, Bates, Malik, Jordan, "Uncertainty sets for image classifiers using conformal prediction", ICLR 2021.
    Nothing is randomised, and the most probable class is always in, so that no set is empty: this only adds classes.

    Attributes:
        temperature: The logits are divided by it.
        threshold: Largest score of a class in the set; infinite where there are too few samples to tell, then all are in.
        lambda_reg: Penalty on every rank above `k_reg`.
        k_reg: Ranks without a penalty.

    Example:
        >>> from fedlightning.callbacks.fedtype import PredictionSets
        >>> sets = PredictionSets(temperature=1.0, threshold=0.9, lambda_reg=0.0, k_reg=5)
        >>> sets(torch.tensor([[2.0, 1.0, -1.0], [9.0, 0.0, 0.0]])).long()
        tensor([[1, 0, 0],
                [1, 0, 0]])
    """

    temperature: float
    threshold: float
    lambda_reg: float
    k_reg: int

    def scores(self, logits: Tensor) -> Tensor:
        """Return each class's score: the probability of it and all more probable ones, and the penalty."""
        probabilities, order = (logits / self.temperature).softmax(1).sort(dim=1, descending=True, stable=True)
        ranks = torch.arange(1, logits.shape[1] + 1, device=logits.device)
        sums = probabilities.cumsum(1).clamp(max=1.0)
        sums[:, -1] = 1.0  # whatever the rounding: a threshold that one sample's last class has is that of all
        sums = sums + self.lambda_reg * (ranks - self.k_reg).clamp(min=0)
        return torch.empty_like(sums).scatter_(1, order, sums)

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> Tensor:
        """Return which classes are in the set of each sample, boolean `(samples, classes)`."""
        inside = self.scores(logits) <= self.threshold
        return inside.scatter_(1, logits.argmax(1, keepdim=True), True)


def calibrate(logits: Tensor, labels: Tensor, alpha: float, lambda_reg: float, k_reg: int) -> PredictionSets:
    """Return prediction sets that hold the class of a new sample with probability `1 - alpha` at least.

    That is so if the samples are exchangeable with the new one and the model has not trained on them. The threshold is the
    `ceil((n + 1)(1 - alpha))`-th smallest of their `n` scores; the temperature, one number, is fitted to the same samples.

    Example:
        >>> from fedlightning.callbacks.fedtype import calibrate
        >>> calibrate(torch.zeros(8, 3), torch.zeros(8).long(), alpha=0.1, lambda_reg=0.0, k_reg=5).threshold
        inf
    """
    sets = PredictionSets(best_temperature(logits, labels), math.inf, lambda_reg, k_reg)
    count = len(labels)
    rank = math.ceil((count + 1) * (1.0 - alpha) - 1e-9)
    if rank > count:
        return sets
    label_scores = sets.scores(logits).gather(1, labels.long()[:, None])[:, 0]
    return PredictionSets(sets.temperature, float(label_scores.sort().values[rank - 1]), lambda_reg, k_reg)


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature within :data:`TEMPERATURES` with the least cross entropy; 1 without a sample.

    The cross entropy is convex in `1 / T`, so its derivative has one root, which is found by bisection.

    Example:
        >>> from fedlightning.callbacks.fedtype import best_temperature
        >>> logits = 3 * torch.tensor([[1.0, 0.0]] * 4).log_softmax(1)  # three of four are right
        >>> round(best_temperature(logits, torch.tensor([0, 0, 0, 1])), 3)
        2.731
    """
    if not len(labels):
        return 1.0
    logits = logits.double()
    label_logits = logits.gather(1, labels.long()[:, None])[:, 0]

    def slope(inverse: float) -> float:
        expected = ((inverse * logits).softmax(1) * logits).sum(1)
        return float((expected - label_logits).mean())

    low, high = (1.0 / bound for bound in reversed(TEMPERATURES))
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0.0 else (low, middle)
    return 1.0 / math.sqrt(low * high)


@make_init
class FedType(SharedPeer):
    r"""A private model of any architecture and a small proxy learn from each other in unequal ways; only the proxy travels.

    Wang, Zhao, Lyu, You, Huai, Ma, "Bridging model heterogeneity in federated learning via uncertainty-based asymmetrical
    reciprocity learning", ICML 2024.

    A visit is three steps:

    1. *Calibration.* Conformal prediction sets (RAPS) of both models as they arrive, which hold a sample's class with
       probability `1 - alpha`, are calibrated on samples of the client that neither model has ever trained on there.
    2. *Private model, proxy frozen*: `CE + imitation c BIL`. With the proxy's set `S` of a sample and private logits `z`,
       `BIL = 1 / (|S| |S^c|) sum_{a in S, b not in S} max(0, z_b - z_a)`: what the proxy is sure of is to outrank the rest.
       `c` is the agreement of both sets, mean over the batch: their Jaccard index, or the share of the proxy's set that
       the private model's covers if that is the larger one.
    3. *Proxy, private model frozen*: `CE + distillation KL(softmax(z / T) || softmax(z_proxy / T))`.

    `CE` is whatever loss the `training_step` of each model gives. Both steps take the visit's epochs on the same batches; the
    frozen model is in eval mode. The authors alternate by epoch. For the private model that is the same (the sets' thresholds
    hold for the visit); the proxy learns from the private model after all of its epochs, not after each.

    * Down: the proxy. Up: the client's.
    * State: the private model, and its accuracy at the last visit, at each client.
    * Deployed: the private model. Stage G scores the global proxy. `deploy="proxy"` scores the local one at stage L2.

    `lambda_reg` of the proxy's sets grows with a fall `D` of the private model's accuracy on its training samples since the
    last visit, as the sets are made once a visit: `lambda_reg + (1 - lambda_reg) D`. `imitation = distillation = 0` is local
    training of the private models beside FedAvg of the proxy (or what is stacked on it), on all samples.

    The authors' imitation loss reads the proxy's own frozen logits, so it has no gradient, and their sets are calibrated on
    training data, so they cover less than they say; neither is done here. A client with fewer than `1 / alpha - 1`
    calibration samples has sets of all classes: BIL is 0. Batches that are augmented at random calibrate, too.

    Args:
        shared: The proxy: a LightningModule with the same classes. `None`: a copy of the client's own model, where all have
            one architecture.
        alpha: Share of samples whose class may be missing in a set, in (0, 1) (authors: 0.1).
        calibration: Share of each client's training samples, drawn once by address, that calibrates and does not train, in
            (0, 1). Weights of clients count all samples.
        imitation: Factor on `c BIL` (paper: 1). 0: nothing is calibrated, and all samples train.
        distillation: Factor on the divergence (paper: 1).
        temperature: `T` of the divergence (authors: 1).
        lambda_reg: Penalty of the proxy's sets on ranks above `k_reg`, in [0, 1] (authors: 0.5).
        private_lambda_reg: The same of the private model's (authors: 1).
        k_reg: Ranks without a penalty (authors: 5).
        deploy: `"private"`, or `"proxy"`: clients deploy and are scored on the proxy, at stage L1 as received and at L2 as
            trained.
        head: Path of the layer of the private models that gives the logits. `None`: the last layer of each.
        shared_head: The same of the proxy.
        weighting: `"samples"`, `"uniform"` or `"log"`.

    Raises:
        ValueError: If a number is out of range, `deploy` is unknown, or `shared` is not a LightningModule.

    Example:
        >>> from fedlightning.callbacks import FedType
        >>> from fedlightning.models import MLP, Classifier
        >>> FedType(shared=Classifier(MLP(64, [16], 10), num_classes=10)).calibration
        0.2
    """

    shared: LightningModule | None = None
    alpha: Annotated[float, Range("(0, 1)")] = 0.1
    calibration: Annotated[float, Range("(0, 1)")] = 0.2
    imitation: NonNegativeFloat = 1.0
    distillation: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 1.0
    lambda_reg: Share = 0.5
    private_lambda_reg: NonNegativeFloat = 1.0
    k_reg: NonNegativeInt = 5
    deploy: Literal["private", "proxy"] = "private"
    head: str | None = None
    shared_head: str | None = None
    weighting: WeightingName | None = None

    @property
    def facts(self) -> Facts:
        """It makes sets of labels out of a part of the client's samples."""
        why = "calibrates on samples of a client that never train"
        required = [requires.SteadyData(why), requires.NumberedSamples(why, when="imitation"), Labels(when="imitation")]
        return super().facts.extend(changes={Change.READS}, requires=required)

    def compares(self) -> bool:
        """Return whether the losses compare predictions, as classes."""
        return self.imitation > 0.0 or self.distillation > 0.0

    def joint_loss(self) -> JointLoss:
        """Return the loss outside of the two steps: the task's of the private model, and the proxy's own."""
        return ProxyLoss(self.distillation, self.temperature, beside=True)

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Calibrate; train the private model with the proxy frozen, then the proxy with the private model frozen."""
        module = client.module
        private: JointLoss = PrivateLoss(0.0, None, None)
        ids: Tensor | None = None
        if self.imitation:
            held_out, ids = self.split(client)
            private = PrivateLoss(self.imitation, *self.calibrated(client, held_out, ids))
        shared = tuple(shared_entries(module))
        private_names = tuple(name for name in module_state(module) if name not in set(shared))
        minimise(module, private, frozen="shared")
        yield Phase("private", train=private_names, repeats="fit", federated=False, data=self._batches(client, ids))
        minimise(module, ProxyLoss(self.distillation, self.temperature), frozen="own")
        yield Phase(train=shared, data=self._batches(client, ids))
        minimise(module, self.joint_loss())

    def _batches(self, client: Client, ids: Tensor | None) -> Any:
        return "train" if ids is None else client.samples(ids=ids, training=True)

    def split(self, client: Client) -> tuple[Tensor, Tensor]:
        """Return the numbers of a client's samples that calibrate, and of those that train: the same in every visit.

        At least a sample (with `drop_last`, a batch) remains for training. One more calibrates where the last batch would
        have a single sample, which batch normalisation cannot take.

        Args:
            client: The client.
        """
        loader, count = client.loader(), len(client.samples().dataset)  # type: ignore[arg-type]
        assert loader is not None
        size = loader.batch_size or 1
        held_out = max(0, min(round(self.calibration * count), count - (size if loader.drop_last else 1)))
        held_out += not loader.drop_last and count - held_out > size and (count - held_out) % size == 1
        order = torch.randperm(count, generator=generator(client.seed, client.id, self.key, "calibration"))
        return order[:held_out].sort().values, order[held_out:].sort().values

    def calibrated(self, client: Client, held_out: Tensor, ids: Tensor) -> tuple[PredictionSets, PredictionSets]:
        """Return the sets of the private model and of the proxy, and note the private model's accuracy.

        Args:
            client: The client.
            held_out: Numbers of the samples that calibrate.
            ids: Numbers of those that train.
        """
        private, shared, labels = (
            self._logits(client, held_out) if len(held_out) else (torch.zeros(0, 2),) * 2 + (_NONE,)
        )
        trained, _, truth = self._logits(client, ids)
        accuracy = float((trained.argmax(1) == truth).double().mean())
        fallen = max(0.0, client.state.get(self.key, {}).get("accuracy", 0.0) - accuracy)
        client.state[self.key] = {"accuracy": accuracy}
        lambda_reg = self.lambda_reg + (1.0 - self.lambda_reg) * fallen
        return (
            calibrate(private, labels, self.alpha, self.private_lambda_reg, self.k_reg),
            calibrate(shared, labels, self.alpha, lambda_reg, self.k_reg),
        )

    def _logits(self, client: Client, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits of both models, and labels, of the samples of these numbers."""
        rows = client.outputs(client.samples(ids=ids), self._rows)
        classes = (rows.shape[1] - 1) // 2
        return rows[:, :classes], rows[:, classes:-1], rows[:, -1].long()

    def _rows(self, module: LightningModule, batch: Any) -> Tensor:
        private_logits, shared = (side.logits for side in sides_of(module, batch))
        return torch.cat([private_logits, shared, labels_of(batch, self.key).to(private_logits)[:, None]], 1)

    # -- deployed ------------------------------------------------------------------------------------------------------
    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the private model, or the proxy; for a client that never trained, the proxy."""
        return shared_of(client.copy_module()) if self.deploy == "proxy" else super().personal_module(client, stage)


_NONE = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class PrivateLoss:
    """The private model's loss.

    Attributes:
        imitation: Factor on `c BIL`.
        own_sets: Prediction sets of the private model. `None`, as `shared`, only without a factor.
        shared: Prediction sets of the proxy.
    """

    imitation: float
    own_sets: PredictionSets | None
    shared: PredictionSets | None

    def __call__(self, local: Side, shared: Side, project: nn.Module | None) -> Tensor:
        """Return `CE + imitation c BIL`."""
        if self.own_sets is None or self.shared is None:
            return local.loss
        sure = self.shared(shared.logits)
        return local.loss + self.imitation * consensus(self.own_sets(local.logits), sure).mean() * imitation_loss(
            local.logits, sure
        )


@dataclass(frozen=True)
class ProxyLoss:
    """The proxy's loss.

    Attributes:
        distillation: Factor on the divergence.
        temperature: Both logits are divided by it.
        beside: Add the private model's own loss.
    """

    distillation: float
    temperature: float
    beside: bool = False

    def __call__(self, local: Side, shared: Side, project: nn.Module | None) -> Tensor:
        """Return `CE + distillation KL(softmax(z / T) || softmax(z_proxy / T))`."""
        loss = local.loss + shared.loss if self.beside else shared.loss
        if self.distillation == 0.0:  # a target that is not finite must not matter
            return loss
        return loss + self.distillation * divergence(local.logits / self.temperature, shared.logits / self.temperature)


def imitation_loss(logits: Tensor, sure: Tensor) -> Tensor:
    """Return `BIL`, mean over the batch: by how much classes outside of a set outrank those in it.

    Example:
        >>> sure = torch.tensor([[True, False, False]])
        >>> imitation_loss(torch.tensor([[1.0, 3.0, 0.0]]), sure), imitation_loss(torch.tensor([[4.0, 3.0, 0.0]]), sure)
        (tensor(1.), tensor(0.))
    """
    excess = (logits[:, None, :] - logits[:, :, None]).relu()  # [sample, in the set, outside]
    pairs = sure[:, :, None] & ~sure[:, None, :]
    return (excess.where(pairs, 0.0).sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)).mean()


def consensus(own_sets: Tensor, sure: Tensor) -> Tensor:
    """Return the agreement `c` of two sets for each sample, in [0, 1].

    Example:
        >>> one, two = torch.tensor([[True, False, False]]), torch.tensor([[True, True, False]])
        >>> consensus(one, two), consensus(two, one)
        (tensor([0.5000]), tensor([1.]))
    """
    both, either = (own_sets & sure).sum(1), (own_sets | sure).sum(1)
    return both / torch.where(own_sets.sum(1) <= sure.sum(1), either, sure.sum(1))
