"""FedRep."""

from __future__ import annotations

from collections.abc import Iterable

from fedlightning.algorithm import Client, Job, Phase, Server, WeightingName
from fedlightning.callbacks.partial import FedPer, other_names, part_names

FINAL = "head"


class FedRep(FedPer):
    """A shared representation and a personal head, trained one after the other.

    Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for personalized federated learning",
    ICML 2021.

    Up and down: the representation ``u``. State: the head ``v_i``. In a visit

    * ``tau_h`` epochs on ``v_i`` with ``u`` fixed, its running statistics too;
    * ``tau_u`` epochs on ``u`` with ``v_i`` fixed.

    Server: ``u = mean_i(u_i)``. After the last round every client, sampled before or not, trains its head once more on
    the final ``u`` (the authors' code). Deployed: ``(u, v_i)``; there is no global model. Corrections of other methods
    (FedProx, SCAFFOLD) act on ``u``.

    Args:
        personal: names or module prefixes of the head; or
        num_layers: the last K layers are the head; used when ``personal`` is ``None``.
        head_epochs: ``tau_h`` (authors: 10), always epochs.
        body_epochs: ``tau_u`` (authors: 1 or 5), always epochs; ``None``: the trainer's local epochs or steps.
        final_head: whether heads are trained once more after the last round.
        weighting: ``"uniform"`` (paper) or ``"samples"`` (authors' code).
    """

    def __init__(
        self,
        personal: list[str] | None = None,
        num_layers: int = 1,
        head_epochs: int = 10,
        body_epochs: int | None = None,
        final_head: bool = True,
        weighting: WeightingName = "uniform",
    ) -> None:
        super().__init__(personal, num_layers, weighting)
        if head_epochs < 0 or (body_epochs is not None and body_epochs < 0):
            raise ValueError(
                f"FedRep got head_epochs={head_epochs} and body_epochs={body_epochs}. Use epochs from 0 "
                "(none), or body_epochs=None for the trainer's."
            )
        self.head_epochs = head_epochs
        self.body_epochs = body_epochs
        self.final_head = final_head

    def claims(self, role: str) -> bool:
        """Without head training at the end there are no jobs after the last round."""
        return super().claims(role) and (role != "final_jobs" or (self.final_head and self.head_epochs > 0))

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Head first, then body."""
        head = part_names(client.module, self.personal, self.num_layers)
        if self.head_epochs and head:
            yield Phase("head", tuple(head), work=self.head_epochs, unit="epochs", federated=False)
        if client.message.tag != FINAL and self.body_epochs != 0:
            body = tuple(other_names(client.module, head))
            yield Phase(train=body, work=self.body_epochs, unit=None if self.body_epochs is None else "epochs")

    def final_jobs(self, server: Server) -> list[Job]:
        """Heads on the final representation."""
        return [Job(client, tag=FINAL) for client in server.clients if server.num_samples[client]]
