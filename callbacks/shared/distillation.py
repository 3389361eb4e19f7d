"""What distillation on public data shares: inputs and logits of a batch, the divergence, and checks before round 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from fedlightning.algorithm import Client, Message, Server, Setup, Update, probes, requires
from fedlightning.callbacks.shared.representations import (
    LABEL_KEYS,
    features_at_start,
    labels_of,
    looked_at,
    other_task,
    refuse_width,
    rows,
    targets_in,
)
from fedlightning.callbacks.shared.server_models import SharesPredictions


def inputs_of(batch: Any, owner: str = "Distillation") -> Any:
    """Return the inputs of a batch: a tensor itself, the first of a tuple or list, a dict's one entry that is not a label.

    Example:
        >>> import torch
        >>> inputs_of([torch.zeros(2, 3), torch.zeros(2)]).shape, inputs_of({"x": torch.zeros(4), "label": 1}).shape
        (torch.Size([2, 3]), torch.Size([4]))
    """
    inputs, what = batch, type(batch).__name__
    if isinstance(batch, Mapping):
        others = [key for key in batch if key not in LABEL_KEYS]
        inputs = batch[others[0]] if len(others) == 1 else None
        what = f"dict with {', '.join(map(str, batch))}"
    elif isinstance(batch, tuple | list):
        inputs = batch[0] if batch else None
    if not isinstance(inputs, Tensor):
        raise ValueError(
            f"{owner} gives the model the inputs of a batch, one tensor, and a batch is a {what} here. Let the loader give "
            f"x, (x, y, ...), or a dict with one entry beside {', '.join(LABEL_KEYS)}."
        )
    return inputs


def both_classes(logits: Tensor) -> Tensor:
    """Return logits as `(batch, classes)`, in fp32 at least; one logit gets a 0 for class 0 beside it.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks.shared.distillation import both_classes
        >>> both_classes(torch.tensor([[2.0], [-1.0]])).tolist()
        [[0.0, 2.0], [0.0, -1.0]]
    """
    logits = rows(logits)
    return F.pad(logits, (1, 0)) if logits.shape[1] == 1 else logits


def logits_of(module: LightningModule, batch: Any) -> Tensor:
    """Return `module(inputs)` as `(batch, classes)`, in fp32 at least; one logit gets a 0 for class 0 beside it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> logits_of(nn.Linear(3, 1), [torch.zeros(2, 3), torch.zeros(2)]).shape
        torch.Size([2, 2])
    """
    inputs = inputs_of(batch)
    logits = module(inputs)
    if isinstance(logits, Tensor) and logits.ndim == 1 and len(logits) == len(inputs):
        logits = logits[:, None]
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(inputs):
        what = f"a tensor {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(f"forward gives {what} for {len(inputs)} samples, and not logits (batch, classes)")
    return both_classes(logits)


def kl(teacher_logits: Tensor, student_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `T^2 KL( softmax(teacher / T) || softmax(student / T) )`, mean over the batch, in fp32 at least.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, -1.0]])
        >>> float(kl(logits, logits)), round(float(kl(logits, -logits, 2.0)), 3)
        (0.0, 3.811)
    """
    teacher = rows(teacher_logits.detach()) / temperature
    student = rows(student_logits) / temperature
    divergence = F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
    return temperature**2 * divergence


class SharesPublicRows(SharesPredictions):
    """Base of methods in which clients send predictions for the round's public samples, a row for each.

    Attributes:
        sends: Name of the rows in an update.
        weighting: `"samples"` where the mean of rows goes by them.
    """

    sends = "rows"

    def predict(self, module: LightningModule, batch: Any) -> Tensor:
        """Return the rows that are sent for a public batch."""
        return logits_of(module, batch)

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse rows of another width than the client's architecture gives, as the server itself sees it."""
        if extras := update.extras.get(self.key):
            few = server.training.public(list(range(min(2, server.training.public_size))), batch_size=2)
            module = server.architecture_of(update.client).module
            refuse_width(self.sends, extras[self.sends], server.training.outputs(module, few, self.predict).shape[1])

    def rows_in(self, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the rows that came, by client."""
        return {update.client: update.extras[self.key][self.sends] for update in updates if update.error is None}

    def mean_of(self, server: Server, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the mean of clients' rows."""
        weights = {client: server.num_samples[client] if self.weighting == "samples" else 1 for client in rows}
        return mean_rows(rows, weights, self.key)

    def send_rows(self, client: Client, update: Update, batches: Any) -> None:
        """Send a row for each public sample.

        Raises:
            FloatingPointError: If one is not finite. The core then leaves the client out.
        """
        rows = client.outputs(batches, self.predict)
        if not torch.isfinite(rows).all():
            raise FloatingPointError(
                "its predictions on public data hold NaN or infinite values; lower the learning rate"
            )
        update.extras[self.key] = {self.sends: rows}


def mean_rows(rows: Mapping[str, Tensor], weights: Mapping[str, float], owner: str) -> Tensor:
    """Return the weighted mean of what clients predict for the same samples, summed in float64 in the order given.

    Example:
        >>> mean_rows({"a": torch.tensor([[4.0]]), "b": torch.tensor([[0.0]])}, {"a": 3, "b": 1}, "FedMD")
        tensor([[3.]])
    """
    first, first_rows = next(iter(rows.items()))
    for client, client_rows in rows.items():
        if client_rows.shape != first_rows.shape:
            raise ValueError(
                f"Client '{client}' predicts {tuple(client_rows.shape)}, client '{first}' {tuple(first_rows.shape)} "
                f"(samples, classes). {owner} needs the same classes for all."
            )
    total = sum(weights[client] * client_rows.double() for client, client_rows in rows.items()) / sum(
        weights[client] for client in rows
    )
    assert isinstance(total, Tensor)
    return total.to(first_rows.dtype)


def check_public_logits(owner: str, setup: Setup, labels: bool, softmax: bool = True) -> int:
    """Refuse before round 1 what distillation on public data cannot work with. Return the number of logits.

    Args:
        owner: The method, for the sentence.
        setup: The federation before round 1.
        labels: Whether the public data need labels.
        softmax: Whether logits are compared by their softmax, which means nothing but for one class a sample.
    """
    name = type(setup.template).__name__
    batch, client_batch = setup.public.batch(), setup.data.first_batch()
    inputs = inputs_of(batch, owner)
    label_sets = [labels_of(batch, f"{owner}, on public data,")] if labels else []
    if client_batch is not None:
        theirs = inputs_of(client_batch, owner)
        if inputs.shape[1:] != theirs.shape[1:]:
            raise ValueError(
                f"{owner} needs public samples like the clients': a public sample has the shape {tuple(inputs.shape[1:])}, a "
                f"client's {tuple(theirs.shape[1:])}. Resize them, or take public data from the clients (public=0.1)."
            )
    logits = _logits_at_start(owner, name, setup.module, batch)
    for other, module in setup.modules.items():
        classes = _logits_at_start(owner, f"'{other}'", module, batch).shape[1]
        if classes != logits.shape[1]:
            raise ValueError(
                f"{owner} compares the logits of all models, but {name} gives {logits.shape[1]} and '{other}' {classes}. "
                "Give all architectures the same classes."
            )
    refuse_nan_in_public(owner, setup, [setup.module, *setup.modules.values()])
    with suppress(ValueError):  # what else the task's targets are is its own business
        label_sets += [] if client_batch is None else [labels_of(client_batch, owner)]
    largest = max((int(batch_labels.max()) for batch_labels in label_sets if len(batch_labels)), default=-1)
    if largest >= logits.shape[1]:
        raise ValueError(
            f"{owner} needs a logit for each class, but {name} gives {logits.shape[1]}, and a label is {largest}. Give the "
            "network an output for each class."
        )
    if softmax and (why := other_task(targets_in(client_batch), int(logits.shape[1]))):
        raise ValueError(
            f"{owner} compares predictions by softmax, one class a sample, but {why}. Use it for classification, or "
            f"another method, such as FedMD(transfer_epochs=0), which compares the predictions themselves."
        )
    return int(logits.shape[1])


def refuse_nan_in_public(owner: str, setup: Setup, modules: Sequence[LightningModule]) -> None:
    """Refuse before round 1 public samples with NaN or infinite inputs, for which a model gives no finite logits."""
    seen = 0
    for batch in setup.public.batches():
        inputs = inputs_of(batch, owner)
        finite = torch.isfinite(inputs.flatten(1)).all(1) if inputs.is_floating_point() else inputs.new_ones(0).bool()
        if not finite.all() and not all(
            torch.isfinite(_logits_at_start(owner, "the model", module, batch)).all() for module in modules
        ):
            bad = seen + int((~finite).nonzero()[0])
            raise ValueError(
                f"{owner} compares predictions on public data, and the inputs of public sample {bad} hold NaN or infinite "
                "values. Leave such samples out of the public data, or fill them in."
            )
        seen += len(inputs)


def _logits_at_start(owner: str, name: str, module: LightningModule, batch: Any) -> Tensor:
    """Return the logits of a batch by a copy of a module."""
    way_out = "Its forward must take the inputs and return logits (batch, classes)."
    with looked_at(module, f"{owner} cannot read the logits of {name} on a public batch", way_out) as copied:
        return logits_of(copied, probes.move_batch(copied, batch))


@dataclass(frozen=True)
class PublicLogits(requires.Requirement):
    """There are public data like the clients', and models give logits of them, that can be distilled.

    Attributes:
        labels: The option for which public data need labels; empty: they need none.
        softmax: The option for which logits are compared by their softmax; empty: they always are.
    """

    labels: str = ""
    softmax: str = ""

    def fault(self, owner: Any, setup: Setup) -> str:
        requires.PublicData("trains on public data").check(owner, setup)
        requires.AutomaticOptimization("minimises a loss of its own instead of training_step").check(owner, setup)
        labels = bool(self.labels and getattr(owner, self.labels))
        check_public_logits(owner.key, setup, labels, bool(not self.softmax or getattr(owner, self.softmax)))
        return ""


@dataclass(frozen=True)
class NoSinglePublicSample(requires.Requirement):
    """The last batch of public data that a model trains on holds more than one sample, or the model can train on one.

    Attributes:
        samples: The option that says on how many samples, or the method that says it of all there are; empty: on all.
        batch_size: The option that says in batches of how many; `None` there, or empty: in those of the public data.
    """

    samples: str = ""
    batch_size: str = ""

    def fault(self, owner: Any, setup: Setup) -> str:
        batch, num_public = setup.public.batch(), setup.public.size()
        chosen = getattr(owner, self.samples) if self.samples else num_public
        count = min(chosen(num_public) if callable(chosen) else chosen, num_public)
        size = (self.batch_size and getattr(owner, self.batch_size)) or len(inputs_of(batch, owner.key))
        option = f"{owner.key}({self.batch_size}=...)" if self.batch_size else "the batch size of the public data"
        modules = (
            {type(setup.template).__name__: setup.module, **setup.modules} if size == 1 or count % size == 1 else {}
        )
        for name, module in modules.items():
            last = f"trains on {count} public samples in batches of {size}, so that the last batch is one sample"
            failure, way_out = f"{owner.key} {last}, and {name} cannot train on one", f"Set {option} to another size"
            with looked_at(module, failure, f"{way_out}{self.instead}.") as copied:
                copied.train()(inputs_of(probes.move_batch(copied, batch))[:1])
        return ""


class OwnLogits(requires.Requirement):
    """What the callback's tap `logits` catches in a training step are the logits that `forward` gives."""

    usual = "Set head=... to the submodule that gives the logits."

    def fault(self, owner: Any, setup: Setup) -> str:
        seen = features_at_start(setup, owner.feature_taps, owner.key)
        if not seen:
            return ""
        samples, shape = len(inputs_of(setup.data.first_batch(), owner.key)), tuple(seen["logits"].shape)
        classes = check_public_logits(owner.key, setup, labels=False)
        gives = f"the head of {type(setup.template).__name__} gives {shape} for {samples} samples"
        fits = both_classes(seen["logits"]).shape == (samples, classes)
        return "" if fits else f"needs the logits of each training step, but {gives}, and forward has {classes} classes"
