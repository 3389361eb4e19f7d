"""Dapper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from fedlightning.algorithm import NEWCOMER, Change, Client, Phase, probes, requires, warn
from fedlightning.callbacks.local_adaptation import AdaptsAtEnd
from fedlightning.ranges import Length, PositiveFloat, PositiveInt, Share, make_init

PHASE = "adapt"
"""Phase of whose batches every share sees the same again; that of :class:`LocalAdaptation`."""


@make_init
class Dapper(AdaptsAtEnd):
    r"""Data interpolation: every client fine-tunes the global model on its own data and on public data.

    Mansour, Mohri, Ro, Suresh, "Three approaches for personalization with applications to federated learning", 2020.

    Training is FedAvg's, or that of the method beside it. After the last round each client, sampled before or not, draws a
    subset `D_0` of the public data, of `ratio` times its own size (one batch at least, all of them at most), and for each
    `lam` of the grid trains a copy of the global model on

    .. math:: \lambda f_i(h) + (1 - \lambda) f_{D_0}(h)

    where every step takes one batch of each. The copy with the least loss on the client's validation data is kept. Running
    statistics of normalisation layers are mixed by `lam` as the losses are.

    * Down: `w`, once more. Up: nothing of the copies. State: the copy that was chosen, and its `lam`.
    * Deployed: the copy. The global model is `w`.

    `lam = 1` is :class:`LocalAdaptation` of as many epochs; with `lam = 0` the copy does not depend on the client's own
    samples. The public data are those of the data module: `public_fraction=0.1` takes a tenth of every client's training
    samples, or override `public_dataloader`. On digits over ten clients, a tenth of whose data is public (ten rounds, three
    seeds), the accuracy is 0.907 (Local 0.813, FedAvg 0.893, on all of the data). Methods that are compared should
    all run on the same data module: others do not see the public part.

    Args:
        grid: Values of `lam` in [0, 1]; an adaptation costs one training for each.
        ratio: Size of `D_0` over the client's training samples (paper: a constant, not given).
        epochs: Epochs of adaptation, of the client's own data.
        lr_factor: Factor on the module's learning rate during adaptation.
        choose_on: Split whose mean training loss decides: `"val"`, or `"train"`, which prefers large shares. A client
            without validation samples chooses on its training samples.

    Raises:
        ValueError: If `grid` is empty or holds other values than different shares, or another argument is out of range.

    Example:
        >>> from fedlightning.callbacks import Dapper
        >>> Dapper(grid=[0.5, 1.0]).ratio
        1.0
    """

    facts = AdaptsAtEnd.facts.extend(
        changes={Change.READS},
        requires=[
            requires.AutomaticOptimization("compares models by the loss that training_step returns"),
            requires.PublicData("trains on public data beside a client's own", when="mixes"),
            requires.Split(
                "chooses among the shares of its grid on validation data",
                "Set val_fraction in the data module, or give one share.",
                "val",
                when="chooses_on_val",
            ),
        ],
    )
    part, head, num_layers = "all", None, 1

    grid: Annotated[Sequence[Share], Length(different=True, note="Shares of the own data.")] = (0.25, 0.5, 0.75, 1.0)
    ratio: PositiveFloat = 1.0
    epochs: PositiveInt = 1
    lr_factor: PositiveFloat = 1.0
    choose_on: Literal["val", "train"] = "val"

    @property
    def mixes(self) -> bool:
        """Whether public data are used, and not own data only."""
        return set(self.grid) != {1.0}

    @property
    def chooses_on_val(self) -> bool:
        """Whether validation data say which copy is kept."""
        return self.mixes and len(self.grid) > 1 and self.choose_on == "val"

    def claims(self, role: str) -> bool:
        """Decline the loss term where only own data are used."""
        return super().claims(role) and (role != "training_loss" or self.mixes)

    # -- the visit after the last round --------------------------------------------------------------------------------
    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train as FedAvg does or, in a visit after the last round and for a client that joins then, adapt for each share."""
        joins = client.message.tag == NEWCOMER
        if client.message.tag != self.key and not joins:
            yield from super().local_phases(client)
            return
        w = client.model_state()
        self.keep(client)
        adaptation = client.scratch[self.key] = _Adaptation()
        for lam in self.grid:
            adaptation.lam = lam
            adaptation.public = client.public_batches(self.ratio) if lam < 1.0 else iter(())
            yield Phase(
                f"{PHASE}-{lam}",
                start=w,
                work=None if joins else self.epochs,
                unit="epochs",
                lr_factor=self.lr_factor,
                federated=False,
                terms_of=(self.key,) if lam < 1.0 else (),
                repeats=PHASE,
                keep_as=self._weigh,
            )
        if adaptation.least == math.inf:
            warn(
                f"The loss of client '{client.id}' is not finite after adaptation with any lam of {list(self.grid)}, so it "
                "deploys the global model. Lower the learning rate (lr_factor) or clip gradients."
            )

    def _weigh(self, client: Client) -> None:
        """Keep the adapted model and its share if its loss is the least so far."""
        adaptation = client.scratch[self.key]
        loss = client.loss(None, self.choose_on if client.loader(self.choose_on) else "train")
        if loss < adaptation.least:
            adaptation.least = loss
            self.keep(client, lam=adaptation.lam)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the running statistics from which both batches start."""
        adaptation = self._mixing()
        if adaptation is not None:
            adaptation.before = {name: value.detach().clone() for name, value in _statistics(pl_module)}

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return `lam f_i + (1 - lam) f_{D_0}` on one batch of each."""
        adaptation = self._mixing()
        if adaptation is None or adaptation.inside:
            return loss
        other = probes.move_batch(module, client.precision.convert_input(next(adaptation.public)))
        with client.probing(module):  # on copies of the buffers: those that the own batch has moved stay
            with torch.no_grad():
                for name, value in _statistics(module):
                    value.copy_(adaptation.before[name])
            adaptation.inside = True
            try:
                public = probes.training_loss(module, other)
            finally:
                adaptation.inside = False
            adaptation.moved = {name: value.detach().clone() for name, value in _statistics(module)}
        lam = adaptation.lam
        return lam * loss + (1.0 - lam) * public if lam > 0.0 else public

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Mix the running statistics that the two batches have left."""
        adaptation = self._mixing()
        if adaptation is not None:
            for name, value in _statistics(pl_module):
                value.copy_(torch.lerp(adaptation.moved[name], value, adaptation.lam))

    def _mixing(self) -> _Adaptation | None:
        """Return the adaptation that runs, if it is one with public data."""
        client = self.client
        mixing = client.phase.name.startswith(f"{PHASE}-") and client.phase.terms_of == (self.key,)
        return client.scratch[self.key] if mixing else None


@dataclass
class _Adaptation:
    """One client's adaptation.

    Attributes:
        lam: The share of the own data in the phase that runs.
        public: Batches of public data of this phase.
        before: Running statistics before the step, by name.
        moved: What the public batch has made of them.
        inside: Whether the step on the public batch runs, which calls this loss term again.
        least: The least loss so far.
    """

    lam: float = 1.0
    public: Iterator[Any] = field(default_factory=lambda: iter(()))
    before: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, Tensor] = field(default_factory=dict)
    inside: bool = False
    least: float = math.inf


def _statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the float buffers of a module by name."""
    return ((name, value) for name, value in module.named_buffers() if value.is_floating_point())
