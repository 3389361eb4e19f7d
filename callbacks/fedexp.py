"""FedExP."""

from __future__ import annotations

from typing import Annotated, Literal

from lightning.pytorch import LightningModule

from fedlightning.algorithm import (
    Change,
    Facts,
    Job,
    Message,
    Need,
    Newcomers,
    Server,
    ServerModels,
    State,
    Update,
    WeightingName,
)
from fedlightning.callbacks.shared.server_models import reported_module, send_reported
from fedlightning.ranges import NonNegativeFloat, Range, make_init
from fedlightning.tensors import narrow, widen

WHOLE_CHANGES = Need(
    "compares the lengths of the participants' whole changes with that of their mean, once a round",
    (*("plan_round", "model_of", Change.PARTS, Change.SMALLER, "encode"), *("reduce", "on_reduced", "denominator")),
)


@make_init
class FedExP(ServerModels):
    """The server goes beyond the clients' mean, the further the more their changes differ.

    Jhunjhunwala, Wang, Joshi, "FedExP: speeding up federated averaging via extrapolation", ICLR 2023.

    * Client: as in FedAvg. ``Delta_i = w - w_i`` is its change.
    * Server, with ``Dbar = sum_i p_i Delta_i`` over the m participants and all norms over all trainable parameters
      that travel: ``eta_g = max(1, sum_i p_i ||Delta_i||^2 / (2 (||Dbar||^2 + m eps)))``, ``w <- w - eta_g Dbar``.
      Buffers are averaged.
    * Down: ``w``. Up: ``w_i``; the server takes the norms itself.
    * State: the model of the round before, and the last ``eta_g``, at the server.
    * Deployed: the mean of the last two server models, since extrapolated ones oscillate. It is what is scored,
      selected and exported, and what a client that is evaluated is sent; training goes on from ``w``.

    Where all changes are alike, ``eta_g`` is 1, and the method FedAvg; for m orthogonal changes of one length it is m/2.
    The norms are those of single clients: a method that makes the mean otherwise, from parts, under a bound or with
    noise, is refused.

    Args:
        eps: Keeps ``eta_g`` small where ``Dbar`` is near 0. Default 1e-3 (authors, CIFAR-10; 0.1 for EMNIST).
        eps_per_client: Add ``m eps`` to ``||Dbar||^2`` (the authors' code, default); False: ``eps`` (the paper).
        eps_decay: Factor of ``eps`` from round to round. Default 1; the authors' code has the square of the decay of the
            learning rate.
        average_last: Number of server models whose mean is deployed: 2 (default; paper and code) or 1.
        weighting: ``"samples"`` (the authors' code, default) or ``"uniform"`` (the paper).

    Raises:
        ValueError: If an argument is out of range.

    Example:
        Two clients that move at a right angle: the server takes the mean. Five: it goes 2.5 times as far.

        >>> import torch
        >>> from fedlightning.callbacks import FedExP
        >>> FedExP(eps=0.0).extrapolation(squares=1.0, square_of_mean=0.5, clients=2)
        1.0
        >>> round(FedExP(eps=0.0).extrapolation(squares=1.0, square_of_mean=0.2, clients=5), 6)
        2.5
    """

    facts = Facts(needs=[WHOLE_CHANGES], newcomers=Newcomers(join=True))

    eps: NonNegativeFloat = 1e-3
    eps_per_client: bool = True
    eps_decay: Annotated[float, Range("(0, 1]")] = 1.0
    average_last: Literal[1, 2] = 2
    weighting: WeightingName | None = None

    def claims(self, role: str) -> bool:
        """Decline a model of its own for stage G where it is ``w``."""
        return super().claims(role) and not (role in ("global_module", "on_broadcast") and self.average_last == 1)

    def extrapolation(self, squares: float, square_of_mean: float, clients: int, round: int = 0) -> float:
        """Return ``eta_g``.

        Args:
            squares: ``sum_i p_i ||Delta_i||^2``.
            square_of_mean: ``||Dbar||^2``.
            clients: Participants m.
            round: Round, counted from 0.
        """
        eps = self.eps * self.eps_decay**round * (clients if self.eps_per_client else 1)
        below = 2.0 * (square_of_mean + eps)
        return max(1.0, squares / below) if below > 0.0 else 1.0

    def on_update(self, server: Server, update: Update) -> None:
        """Add ``||Delta_i||^2`` to the sum of the round, in float64."""
        weight = server.weight(update)
        if weight == 0.0:
            return
        names = [name for name in server.trainable if name in update.state]
        square = sum(float((widen(server.model[n]) - widen(update.state[n])).square().sum()) for n in names)
        server_state = server.state.get(self.key, {})
        total, weights, clients = server_state.get("sums", (0.0, 0.0, 0))
        server.state[self.key] = {**server_state, "sums": [total + weight * square, weights + weight, clients + 1]}

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Return ``w - eta_g Dbar`` on trainable parameters; every other entry is the clients' mean."""
        state = server.state.get(self.key, {})
        if "sums" not in state:  # nobody took part
            return reduced
        total, weights, clients = state["sums"]
        names = [name for name in server.trainable if name in reduced]
        mean = {name: widen(old[name]) - widen(reduced[name]) for name in names}
        square_of_mean = sum(float(delta.square().sum()) for delta in mean.values())
        eta = self.extrapolation(total / weights, square_of_mean, clients, server.round)
        kept = {"previous": {name: old[name] for name in names}} if self.average_last == 2 and "eta" in state else {}
        server.state[self.key] = {"eta": eta, **kept}
        if eta == 1.0:
            return reduced
        return {**reduced, **{name: narrow(widen(old[name]) - eta * mean[name], old[name]) for name in names}}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send a client that is evaluated the mean of the last two models."""
        send_reported(job, message, self._average(server))

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the mean of the last two server models; in round 1 the one there is."""
        return reported_module(server, self._average(server))

    def _average(self, server: Server) -> State:
        """Return the trainable entries of the mean of the last two models; nothing before there are two."""
        previous: State = server.state.get(self.key, {}).get("previous", {})
        return {name: narrow((widen(server.model[name]) + widen(value)) / 2, value) for name, value in previous.items()}
