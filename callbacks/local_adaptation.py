"""Fine-tuning after the last round: local adaptation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from torch import nn

from fedlightning.algorithm import Client, Job, Message, Phase, Server, Setup, select
from fedlightning.callbacks.checkpoints import _better, _monitored
from fedlightning.callbacks.own_models import KeepsModel
from fedlightning.callbacks.partial import other_names, part_names

Part = Literal["all", "head", "body"]


class AdaptsAtEnd(KeepsModel):
    """Base: after the last round every client fine-tunes a copy of the global model and deploys that.

    The global model is the one that GlobalCheckpoint selected, where there is one, else the last. Adaptation starts
    with new optimizers, is no federated phase (no corrections act), and changes nothing but the client's own copy.
    """

    epochs: int
    part: Part
    head: Sequence[str] | None
    num_layers: int
    lr_factor: float

    def _set(self, epochs: int, part: Part, head: list[str] | None, num_layers: int, lr_factor: float) -> None:
        if epochs < 0 or lr_factor <= 0:
            raise ValueError(
                f"{self.key} got epochs={epochs} and lr_factor={lr_factor}. Use epochs from 0 (0: the global model is "
                "deployed) and a positive factor."
            )
        if part not in ("all", "head", "body"):
            raise ValueError(f"{self.key} got part={part!r}. Use 'all', 'head' (the base is frozen) or 'body'.")
        self.epochs, self.part, self.head, self.num_layers, self.lr_factor = epochs, part, head, num_layers, lr_factor

    def adapted_names(self, module: nn.Module) -> list[str] | None:
        """State names of what fine-tuning trains; ``None``: everything."""
        if self.part == "all":
            return None
        head = part_names(module, self.head, self.num_layers)
        return head if self.part == "head" else other_names(module, head)

    def check(self, setup: Setup) -> None:
        """Refuse names that are not there, and a part without anything to train."""
        names = self.adapted_names(setup.module)
        if names is not None and not any(setup.kinds[name] == "trainable" for name in names):
            raise ValueError(
                f"{self.key}(part={self.part!r}, head={self.head}, num_layers={self.num_layers}) has no trainable "
                f"parameter of {type(setup.template).__name__} to fine-tune. Choose another part."
            )

    def final_jobs(self, server: Server) -> list[Job]:
        """Everybody adapts, sampled before or not."""
        return [Job(client, tag=self.key) for client in server.clients if server.num_samples[client]]

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Adaptation starts from the selected global model."""
        if job.tag == self.key and server.checkpoints:
            selected = next(iter(server.checkpoints.values()))["model"]
            message.state = select(selected, message.state)

    def federated_phases(self, client: Client) -> Iterable[Phase]:
        """What a visit does before the last round is over."""
        yield Phase()

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """The method's own phases, or the adaptation."""
        if client.message.tag != self.key:
            client.state.pop(self.key, None)  # a finished federation that goes on: what was adapted is out of date
            yield from self.federated_phases(client)
            return
        self.keep(client)
        if self.epochs:
            names = self.adapted_names(client.module)
            yield Phase(
                "adapt",
                None if names is None else tuple(names),
                work=self.epochs,
                unit="epochs",
                lr_factor=self.lr_factor,
                federated=False,
                keep_as=self.keep_adapted,
            )

    def keep_adapted(self, client: Client) -> None:
        """Store the adapted model."""
        self.keep(client)


class LocalAdaptation(AdaptsAtEnd):
    """Local adaptation: after the federation every client fine-tunes its copy of the global model.

    Yu, Bagdasaryan, Shmatikov, "Salvaging federated learning by local adaptation", 2020.

    Training is FedAvg's, or that of the method it stands beside, and its global model stays what it is. After the last
    round each client, sampled before or not, copies the global model (GlobalCheckpoint's, where there is one, else the
    last) and trains it on its own training split. Down: ``w``. Up: nothing of the copies. State: the adapted copy.
    Deployed: the adapted copy; the global model is ``w``.

    Args:
        epochs: epochs of adaptation (PLayer-FL's code: 1).
        part: ``"all"`` (the paper's FT), ``"head"`` (FB: the base and its statistics are frozen) or ``"body"``.
        head: names or module prefixes of the head; or
        num_layers: the last K layers are the head; used when ``head`` is ``None``.
        lr_factor: factor on the module's learning rate during adaptation (PLayer-FL's code: 1).
        keep_if_better: deploy the adapted copy only where it is better on the client's own validation split.
        monitor, mode: what "better" means: a metric the module logs in validation, and ``"min"`` or ``"max"``.
    """

    def __init__(
        self,
        epochs: int = 1,
        part: Part = "all",
        head: list[str] | None = None,
        num_layers: int = 1,
        lr_factor: float = 1.0,
        keep_if_better: bool = False,
        monitor: str = "val_loss",
        mode: Literal["min", "max"] = "min",
    ) -> None:
        self._set(epochs, part, head, num_layers, lr_factor)
        self.keep_if_better = keep_if_better
        self.monitor = monitor
        self.mode = mode

    def keep_adapted(self, client: Client) -> None:
        """Store the adapted model, if it is to be had at any price or is better."""
        if self.keep_if_better:
            before, after = (client.evaluate(state) for state in (self.kept(client), None))
            if before and not _better(_monitored(self, after), _monitored(self, before), self.mode):
                return
        self.keep(client)
