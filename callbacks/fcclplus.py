"""FCCL+: FCCL with similarities of samples, and distillation of the classes that are not the target."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from fedlightning.algorithm import Client, Server, Setup, probes
from fedlightning.callbacks.fccl import FCCL, correlation_loss
from fedlightning.callbacks.shared.distillation import check_public_logits, logits_of
from fedlightning.callbacks.shared.representations import head_path, labels_of, looked_at, rows
from fedlightning.ranges import NonNegativeFloat, PositiveFloat
from fedlightning.wrappers import FeatureTap


class FCCLPlus(FCCL):
    """FCCL, with the similarity of samples among representations and distillation of non-target classes.

    Huang, Ye, Shi, Du, "Generalizable heterogeneous federated cross-correlation and instance similarity learning", IEEE
    TPAMI 2023 (arXiv 2309.16286). The exchange and the cross-correlation of logits are :class:`FCCL`'s. Besides:

    * Collaborative phase: for each public sample of a batch the cosines of its representation to those of the others, over
      `temperature`; `loss += similarity KL( softmax(mean of all clients' rows) || softmax(own row) )`. Cosines do not depend
      on the width of representations, which may differ between architectures.
    * Local phase: `loss = task + inter T^2 KL(q_inter || q)`, where `q` is the distribution over the classes that are not
      the sample's target, of `logits / T` with `T = non_target_temperature`. There is no pre-training and no intra teacher,
      and a first visit has no inter teacher.
    * Down and up: beside the logits `public_batch_size - 1` numbers for each sample.

    The server draws the batches of the round, since the rows of all clients must be about the same samples, and the digest
    takes them in that order; the authors exchange rows for every batch. Their code does not normalise the distributions
    over non-target classes (`non_target="code"`), so that its divergence may be negative; the default here normalises.

    Args:
        public_samples: Public samples of a round; all, if there are not more.
        public_batch_size: Batch size of the collaborative phase. Default 64: rows are as wide. Authors: 128 to 256.
        collaborate_epochs: Epochs of the collaborative phase. Default 1 (authors). 0: nothing is exchanged.
        collaborate_lr_factor: Factor on the module's learning rates there.
        off_diagonal: Weight of the sum over pairs of classes. Default 0.0051 (authors).
        similarity: Weight of the similarities. Default 3 (authors: 1 to 3).
        temperature: Temperature of the similarities. Default 0.02 (authors).
        inter: Weight of the inter teacher.
        non_target_temperature: Temperature of the non-target distributions. Default 3 (authors: 1 to 3).
        non_target: `"normalised"`, or `"code"`: the parts of the softmax over all classes.
        unbiased: Standardise with the unbiased deviation (authors' code).
        head: Path of the submodule that turns representations into logits (`"net.fc"`). `None`: the last layer.

    Raises:
        ValueError: If a number is negative, or 0 where it cannot be, or `non_target` is unknown.

    Example:
        >>> from fedlightning.callbacks import FCCLPlus
        >>> FCCLPlus().hyperparameters()["temperature"]
        0.02
    """

    def __init__(
        self,
        public_samples: int = 5000,
        public_batch_size: int = 64,
        collaborate_epochs: int = 1,
        collaborate_lr_factor: float = 0.1,
        off_diagonal: float = 0.0051,
        similarity: NonNegativeFloat = 3.0,
        temperature: PositiveFloat = 0.02,
        inter: float = 1.0,
        non_target_temperature: PositiveFloat = 3.0,
        non_target: Literal["normalised", "code"] = "normalised",
        unbiased: bool = False,
        head: str | list[str] | None = None,
    ) -> None:
        super().__init__(
            public_samples,
            public_batch_size,
            collaborate_epochs,
            collaborate_lr_factor,
            off_diagonal,
            pretrain_epochs=0,
            inter=inter,
            intra=0.0,
            unbiased=unbiased,
            head=head,
        )
        self.similarity = similarity
        self.temperature = temperature
        self.non_target_temperature = non_target_temperature
        self.non_target = non_target

    def check(self, setup: Setup) -> None:
        """Refuse what :class:`FCCL` refuses, one class alone, and batches without labels."""
        super().check(setup)
        failure = f"FCCLPlus cannot see the representations of {type(setup.template).__name__} for a public batch"
        with looked_at(setup.module, failure, "Set head=... to the submodule that forward calls on them.") as module:
            self._both(module, probes.move_batch(module, setup.public.batch()))
        batch = setup.data.first_batch()
        if self.inter and batch is not None:
            labels_of(batch, self.key)
            classes = check_public_logits(self.key, setup, labels=False)
            if classes < 3:
                raise ValueError(
                    f"FCCLPlus distils the classes that are not a sample's target, and {type(setup.template).__name__} has "
                    f"{classes} classes: there is one other. Use FCCL, or inter=0."
                )

    def ids(self, server: Server) -> Tensor:
        """Return the public samples of the round in the order of its batches."""
        ids = super().ids(server)
        return ids[torch.randperm(len(ids), generator=server.rng(f"{self.key} batches"))]

    def public_batches(self, client: Client, ids: Tensor, targets: Tensor | None = None) -> Any:
        """Return the loader of the round's public samples, in the order of the ids."""
        return client.public(ids, targets=targets, batch_size=self.public_batch_size)

    def predict(self, module: LightningModule, batch: Any) -> Tensor:
        """Return logits and similarities of a public batch, those filled up with zeros to one width."""
        logits, z = self._both(module, batch)
        similarity_rows = similarities(z, self.temperature)
        width = (self.public_batch_size or 1) - 1
        return torch.cat([logits, F.pad(similarity_rows, (0, width - similarity_rows.shape[1])).to(logits)], 1)

    def collaborate_loss(self, client: Client, module: LightningModule, paired: Any, batch_idx: int) -> Tensor:
        """Return the loss of the collaborative phase."""
        logits, z = self._both(module, paired.batch)
        classes = logits.shape[1]
        loss = correlation_loss(logits, paired.targets[:, :classes], self.off_diagonal, self.unbiased)
        if self.similarity == 0.0 or len(z) < 2:
            return loss
        target = paired.targets[:, classes : classes + len(z) - 1].to(z).softmax(1)
        log_similarities = similarities(z, self.temperature).log_softmax(1)
        return loss + self.similarity * F.kl_div(log_similarities, target, reduction="batchmean")

    def divergence(self, teacher: Tensor, student: Tensor, batch: Any) -> Tensor:
        """Return `T^2 KL(q_teacher || q)` over the classes that are not the target, mean over the batch."""
        labels, temperature = labels_of(batch, self.key).to(student.device), self.non_target_temperature
        others = F.one_hot(labels, student.shape[1]) == 0
        count = (len(labels), student.shape[1] - 1)
        q, p = teacher / temperature, student / temperature
        if self.non_target == "normalised":
            target, log_student = (z[others].view(count).log_softmax(1) for z in (q, p))
        else:
            target, log_student = (z.log_softmax(1)[others].view(count) for z in (q, p))
        return temperature**2 * F.kl_div(log_student, target.detach(), reduction="batchmean", log_target=True)

    def _both(self, module: LightningModule, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits and representations of a public batch."""
        with FeatureTap(module, head_path(module, self.head)) as tap:
            logits = logits_of(module, batch)
            return logits, rows(tap.features)


def similarities(z: Tensor, temperature: float) -> Tensor:
    """Return for each row the cosines to all others over a temperature, `(n, n - 1)`, in fp32 at least.

    Example:
        >>> similarities(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]), 0.5).tolist()
        [[2.0, 0.0], [2.0, 0.0], [0.0, 0.0]]
    """
    with torch.autocast(z.device.type, enabled=False):
        unit = F.normalize(z, dim=1)
        others = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
        return (unit @ unit.T)[others].view(len(z), len(z) - 1) / temperature
