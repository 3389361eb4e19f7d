"""Fine-tuning after the last round: local adaptation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.algorithm import NEWCOMER, Change, Client, Facts, Job, Message, Phase, Server, Stage, requires
from fedlightning.callbacks.model_selection import is_better, monitored
from fedlightning.callbacks.own_models import KeepsModel
from fedlightning.callbacks.partial import other_names, part_names
from fedlightning.ranges import NonNegativeInt, PositiveFloat, PositiveInt, at_most_one, make_init, needs
from fedlightning.tensors import select

ADAPTED = "adapted"
"""Label of what the server sends to clients to be scored once the visits after the last round are over."""
Part = Literal["all", "head", "body"]


class AdaptsAtEnd(KeepsModel):
    """Base of methods in which every client fine-tunes a copy of the global model after the last round, and deploys it.

    The global model is the one that :class:`GlobalCheckpoint` selected, where there is one, else the last. Adaptation
    starts with new optimizers. It is not a federated phase, so no corrections act, and it changes nothing but the client's
    own copy.

    Attributes:
        epochs: Epochs of fine-tuning; 0 deploys the global model.
        part: What is fine-tuned: ``"all"``, ``"head"`` or ``"body"``.
        head: Name or names of the head's entries or modules; ``None`` means the last ``num_layers`` layers.
        num_layers: Number of layers in the head, used where ``head`` is ``None``.
        lr_factor: Factor on the module's learning rate in fine-tuning.
    """

    # the copy is made once, after the last round
    facts = Facts(requires=[requires.SomethingTrains(instead="Choose another part.", of="adapted_names")], keeps=False)

    epochs: int
    part: Part
    head: str | list[str] | None
    num_layers: int
    lr_factor: float

    def adapted_names(self, module: nn.Module) -> list[str] | None:
        """Return the state names that fine-tuning trains, or ``None`` for everything."""
        if self.part == "all":
            return None
        head = part_names(module, self.head, self.num_layers)
        return head if self.part == "head" else other_names(module, head)

    def final_jobs(self, server: Server) -> list[Job]:
        """Plan a visit to every client with training data, sampled before or not."""
        return [Job(client, tag=self.key) for client in server.clients if server.num_samples[client]]

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the selected global model to adaptation."""
        if job.work == 0 and server.round >= server.rounds:
            message.tag = ADAPTED
        if (job.tag == self.key or (job.tag == NEWCOMER and job.work != 0)) and server.checkpoints:
            selected = next(iter(server.checkpoints.values()))["model"]
            message.state = select(selected, message.state)

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the adapted copy; in a federation that goes on, where it is out of date, the model that was received."""
        stale = client.evaluating and client.message.tag != ADAPTED
        return client.copy_module() if stale else super().personal_module(client, stage)

    def federated_phases(self, client: Client) -> Iterable[Phase]:
        """Return the phases of a visit before the last round is over."""
        yield Phase()

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train the method's own phases or, in a visit after the last round and for a client that joins then, adapt."""
        joins = client.message.tag == NEWCOMER
        if client.message.tag != self.key and not joins:
            client.state.pop(self.key, None)  # a finished federation that goes on: what was adapted is out of date
            yield from self.federated_phases(client)
            return
        self.keep(client)
        if self.epochs or joins:
            names = self.adapted_names(client.module)
            yield Phase(
                "adapt",
                None if names is None else tuple(names),
                work=None if joins else self.epochs,
                unit="epochs",
                lr_factor=self.lr_factor,
                federated=False,
                keep_as=self.keep_adapted,
            )

    def keep_adapted(self, client: Client) -> None:
        """Store the adapted model."""
        self.keep(client)


@at_most_one("head", "num_layers", why="it counts the layers where none are named. Use one of them.")
@needs(("head", "num_layers"), "part", why="all is adapted. Set part='head' or 'body'.")
@needs(("monitor", "mode"), "keep_if_better", why="the adapted model is kept anyway. Use keep_if_better=True.")
@make_init
class LocalAdaptation(AdaptsAtEnd):
    """Local adaptation: after the federation every client fine-tunes its copy of the global model.

    Yu, Bagdasaryan, Shmatikov, "Salvaging federated learning by local adaptation", 2020.

    * Training is FedAvg's, or that of the method beside it, and its global model ``w`` stays what it is.
    * After the last round each client, sampled before or not, copies the global model (the one that
      :class:`GlobalCheckpoint` selected, where there is one, else the last) and trains it on its own training split.
    * Down: ``w``. Up: nothing of the copies. State: the adapted copy.
    * Deployed: the adapted copy. The global model is ``w``.

    Args:
        epochs: Epochs of adaptation. Default 4 (what the league chose, and better than one on other data; PLayer-FL's
            code has 1). 0: the global model is deployed.
        part: What is adapted: ``"all"`` (the paper's FT, default), ``"head"`` (FB: the base and its statistics are
            frozen) or ``"body"``.
        head: Name or names of the head's entries or modules. ``None`` (default): the last ``num_layers`` layers.
        num_layers: Number of layers in the head, used where ``head`` is ``None``. Default 1.
        lr_factor: Factor on the module's learning rate during adaptation. Default 1 (PLayer-FL's code).
        keep_if_better: Deploy the adapted copy only where it is better on the client's own validation split. Default:
            no, as in the paper; it needs a validation split and ``monitor``. One epoch alone can spoil a client with few
            labels: on digits over ten clients (one seed) the worst one has 0.333 without it and 0.722 with it, the mean
            0.818 and 0.896. `configs/algorithms/localadaptation.yaml` sets it.
        monitor: Metric by which it is better, logged in validation. Default ``"val_loss"``.
        mode: ``"min"`` (default) or ``"max"``.

    Raises:
        ValueError: If ``epochs`` is negative, ``lr_factor`` is not positive or ``part`` is unknown.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import LocalAdaptation
        >>> LocalAdaptation(part="head").adapted_names(nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1)))
        ['2.weight', '2.bias']
    """

    epochs: NonNegativeInt = 4
    part: Part = "all"
    head: str | list[str] | None = None
    num_layers: PositiveInt = 1
    lr_factor: PositiveFloat = 1.0
    keep_if_better: bool = False
    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"

    @property
    def facts(self) -> Facts:  # type: ignore[override]
        """It compares two models on the client's samples, if it keeps the better one."""
        return AdaptsAtEnd.facts.extend(changes={Change.READS} if self.keep_if_better else ())

    def keep_adapted(self, client: Client) -> None:
        """Store the adapted model if ``keep_if_better`` is off or the model is better on validation data."""
        if self.keep_if_better:
            before, after = (client.evaluate(state) for state in (self.read_kept(client), None))
            if before and not is_better(monitored(self, after), monitored(self, before), self.mode):
                return
        self.keep(client)
