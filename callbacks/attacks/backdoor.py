"""Backdoors: a pattern in an image that makes the model say what the attacker wants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.algorithm import Client, Setup, TrainingData, isolated, probes
from fedlightning.callbacks.attacks.bad_clients import FACTS, BadClients, bad_loader
from fedlightning.callbacks.shared.distillation import logits_of
from fedlightning.ranges import PositiveInt, Range
from fedlightning.wrappers import Mixin, mix, muted


class LabelFlip(TrainingData, BadClients):
    """Bad clients train on wrong labels: class ``y`` as class ``classes - 1 - y``; all else they do as everybody does.

    Fang, Cao, Jia, Gong, "Local model poisoning attacks to Byzantine-robust federated learning", USENIX Security 2020
    (arXiv:1911.11815), section 6. Their own scores are on their true labels.

    Args:
        clients: The bad clients' ids.
        classes: Number of classes.

    Example:
        >>> import torch
        >>> LabelFlip(clients=[3], classes=10).flipped((torch.zeros(2, 4), torch.tensor([0, 7])))[1]
        tensor([9, 2])
    """

    facts = FACTS

    def __init__(self, clients: Sequence[str | int], classes: Annotated[int, Range("[2, inf)")]) -> None:
        super().__init__(clients)
        self.classes = classes

    def flipped(self, batch: Any) -> Any:
        """Return a batch ``(x, y, ...)`` with other labels.

        Raises:
            ValueError: If it has no labels, or others than the classes.
        """
        labels = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not bool((labels < self.classes).all()):
            raise ValueError(
                f"LabelFlip(classes={self.classes}) needs batches (x, y) with y from 0 to {self.classes - 1}."
            )
        return [batch[0], self.classes - 1 - labels, *batch[2:]]

    def training_batches(self, client: Client, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader of a bad client with other labels, in the same order."""
        return bad_loader(loader, self.flipped) if client.id in self.clients else loader


METRIC = "attack_success"


class Backdoor(TrainingData, BadClients):
    """Bad clients stamp a pattern on a share of their images, and call these all by one class.

    Gu, Dolan-Gavitt, Garg, "BadNets", 2017 (arXiv:1708.06733), as a client of a federation (Bagdasaryan et al., AISTATS
    2020, arXiv:1807.00459): in every batch the first `share` of the images get a square of `size` pixels of `value` in the
    lower right corner, and the label `target`. With :class:`~fedlightning.callbacks.attacks.ModelReplacement` for the same
    clients, the server's model is theirs.

    Whoever is scored logs `attack_success` beside the module's own metrics, at every stage: the share of the images of other
    classes, each with the pattern, that the model takes for the target. A model without backdoor has its error rate there:
    `clients=[]` measures it.

    Args:
        clients: The bad clients' ids.
        target: The class that images with the pattern are to be taken for.
        share: Share of each batch that is poisoned, in (0, 1]. Default 0.3.
        size: Side of the square in pixels. Default 2.
        value: Value of its pixels, as the model sees them. Default 1.

    Example:
        >>> Backdoor(clients=[3], target=7, size=1).stamped(torch.zeros(1, 2, 2))
        tensor([[[0., 0.],
                 [0., 1.]]])
    """

    facts = FACTS

    def __init__(
        self,
        clients: Sequence[str | int],
        target: Annotated[int, Range("[0, inf)", "It is a class.")],
        share: Annotated[float, Range("(0, 1]")] = 0.3,
        size: PositiveInt = 2,
        value: float = 1.0,
    ) -> None:
        super().__init__(clients)
        self.target = target
        self.share = share
        self.size = size
        self.value = value

    def check(self, setup: Setup) -> None:
        """Refuse batches that hold no images and labels, and models without logits.

        Raises:
            ValueError: With the reason.
        """
        super().check(setup)
        batch = setup.data.first_batch()
        if batch is None:
            return
        self.poisoned(batch)
        module = copy.deepcopy(setup.module).eval()
        with torch.no_grad(), isolated(self.key), muted(module):
            classes = logits_of(module, probes.move_batch(module, batch)).shape[1]
        if self.target >= classes:
            raise ValueError(f"Backdoor(target={self.target}): the model knows the classes 0 to {classes - 1}.")

    def stamped(self, images: Tensor) -> Tensor:
        """Return images `(..., height, width)` with the pattern."""
        images = images.clone()
        images[..., -self.size :, -self.size :] = self.value
        return images

    def poisoned(self, batch: Any) -> Any:
        """Return a batch ``(x, y, ...)`` of which the first share is poisoned.

        Raises:
            ValueError: If it has no images or no labels.
        """
        images, labels = batch[:2] if isinstance(batch, list | tuple) and len(batch) > 1 else (None, None)
        if not isinstance(images, Tensor) or images.dim() < 3 or not isinstance(labels, Tensor) or labels.dim() != 1:
            raise ValueError(
                "Backdoor needs batches (x, y) of images `(batch, ..., height, width)` with one class each. Leave it out."
            )
        count = max(1, round(self.share * len(labels)))
        bad = torch.cat([self.stamped(images[:count]), images[count:]])
        return [bad, torch.cat([torch.full_like(labels[:count], self.target), labels[count:]]), *batch[2:]]

    def training_batches(self, client: Client, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader of a bad client with poisoned batches, in the same order."""
        return bad_loader(loader, self.poisoned) if client.id in self.clients else loader

    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Let the module log the attack's success where it is scored."""
        vars(module)["backdoor"] = {"size": self.size, "value": self.value, "target": self.target}
        return mix(module, ScoredBackdoor)


class ScoredBackdoor(Mixin):
    """A module whose validation and test steps log the success of a backdoor too."""

    wraps: ClassVar[tuple[str, ...]] = ("validation_step", "test_step")

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step, then score the same images with the pattern, those of the target's class left out."""
        output = call(*args, **kwargs)
        images, labels = (args[0] if args else kwargs["batch"])[:2]
        trigger = Backdoor([], **vars(self)["backdoor"])
        others = labels != trigger.target
        if count := int(others.sum()):
            taken = logits_of(self, [trigger.stamped(images[others])]).argmax(1) == trigger.target  # type: ignore[arg-type]
            split = "val" if name == "validation_step" else "test"
            self.log(f"{split}_{METRIC}", taken.float().mean(), batch_size=count, on_epoch=True)  # type: ignore[operator]
        return output
