"""FedRep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fedlightning.algorithm import NEWCOMER, Client, Job, Phase, Server, Setup, WeightingName, requires
from fedlightning.callbacks.partial import FedPer
from fedlightning.ranges import NonNegativeInt, PositiveInt, Range, at_most_one

FINAL = "head"


class FedRep(FedPer):
    """A shared representation and a personal head, trained one after the other.

    Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for personalized federated learning",
    ICML 2021.

    * Client: ``tau_h`` epochs on the head ``v_i`` with the representation ``u`` fixed, its running statistics too. Then
      ``tau_u`` epochs on ``u`` with ``v_i`` fixed.
    * Server: ``u = mean_i(u_i)``.
    * After the last round every client, sampled before or not, trains its head once more on the final ``u`` (the
      authors' code).
    * Down: ``u``. Up: ``u_i``. State: ``v_i`` at each client.
    * Deployed: ``(u, v_i)``. There is no global model.

    Corrections of other methods (FedProx, SCAFFOLD) act on ``u``.

    Args:
        personal: Name or names of the head's entries or modules. ``None`` (default): the last ``num_layers`` layers.
        num_layers: Number of layers in the head, used where ``personal`` is ``None``. Default 1.
        head_epochs: ``tau_h``, always epochs. Default 10 (authors).
        body_epochs: ``tau_u``, always epochs (authors: 1 or 5). ``None`` (default): the trainer's local epochs or
            steps.
        final_head: Train the heads once more after the last round. Default: yes (authors).
        weighting: ``"uniform"`` (paper, default) or ``"samples"`` (authors' code).

    Raises:
        ValueError: If a number of epochs is negative.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> from fedlightning.callbacks import FedRep
        >>> module = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> client = SimpleNamespace(module=module, message=SimpleNamespace(tag=""))
        >>> for phase in FedRep(head_epochs=3).local_phases(client):
        ...     print(phase.name, phase.train, phase.work)
        head ('2.weight', '2.bias') 3
        fit ('0.weight', '0.bias') None
    """

    facts = FedPer.facts.extend(
        requires=[
            requires.SomethingTrains("", "Set head_epochs=0, or use FedAvg().", "head_names", when="_trains_head"),
            requires.SomethingTrains("", "Set body_epochs=0, or use Local().", "body_names", when="_trains_body"),
        ]
    )

    @at_most_one("personal", "num_layers", why="it counts the layers where none are named. Use one of them.")
    def __init__(
        self,
        personal: str | list[str] | None = None,
        num_layers: PositiveInt = 1,
        head_epochs: NonNegativeInt = 10,
        body_epochs: Annotated[int, Range("[0, inf)", "None is the trainer's.")] | None = None,
        final_head: bool = True,
        weighting: WeightingName | None = "uniform",
    ) -> None:
        super().__init__(personal, num_layers, weighting)
        self.head_epochs = head_epochs
        self.body_epochs = body_epochs
        self.final_head = final_head

    def _trains_head(self, setup: Setup) -> bool:
        return self.head_epochs > 0 and bool(self.head_names(setup.module))

    @property
    def _trains_body(self) -> bool:
        return self.body_epochs != 0

    def claims(self, role: str) -> bool:
        """Decline visits after the last round where heads do not train then."""
        return super().claims(role) and (role != "final_jobs" or (self.final_head and self.head_epochs > 0))

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train the head first, then the body; of a client that joins a fitted federation the head only, as in the paper."""
        head = self.head_names(client.module)
        if client.message.tag == NEWCOMER and head:
            yield Phase("head", tuple(head), unit="epochs", federated=False)
            return
        if self.head_epochs and head:
            yield Phase("head", tuple(head), work=self.head_epochs, unit="epochs", federated=False)
        if client.message.tag != FINAL and self.body_epochs != 0:
            body = tuple(self.body_names(client.module))
            yield Phase(train=body, work=self.body_epochs, unit=None if self.body_epochs is None else "epochs")

    def final_jobs(self, server: Server) -> list[Job]:
        """Plan a visit to every client, to train its head on the final representation."""
        return [Job(client, tag=FINAL) for client in server.clients if server.num_samples[client]]
