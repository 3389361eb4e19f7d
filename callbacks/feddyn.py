"""FedDyn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    GradientContext,
    Job,
    Message,
    Need,
    Newcomers,
    Server,
    ServerModels,
    State,
    Update,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.server_models import reported_module, send_reported
from fedlightning.ranges import Range, make_init
from fedlightning.tensors import add, narrow, select, subtract, widen, zeros_like

WHOLE_CHANGES = Need(
    "adds up the whole change of every participant, once a round, in h",
    (*("plan_round", "model_of", Change.PARTS, Change.SMALLER, "encode"), *("reduce", "on_reduced", "denominator")),
)


@make_init
class FedDyn(ServerModels):
    """Every client's objective is corrected so that its minimiser agrees with the server's.

    Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic regularization", ICLR 2021.

    * Client: minimise ``L_k(w) - <g_k, w> + (alpha/2) ||w - theta||^2``. Every step's gradient is
      ``g - g_k + alpha (w - theta)``. After training ``g_k <- g_k - alpha (theta_k - theta)``: where the minimum is
      found exactly, this is the gradient of ``L_k`` at ``theta_k``.
    * Server: ``h <- h - (alpha/N) sum_{k in S} (theta_k - theta)`` with N *all* clients and S the participants, then
      ``theta <- (1/|S|) sum_{k in S} theta_k - h / alpha``. So ``h`` is the mean of all ``g_k``.
    * Down: ``theta`` (with ``size_scaled`` the client's strength too). Up: ``theta_k``.
    * State: ``g_k`` at each client for ever, ``h`` at the server. Both start at 0 and exist for trainable parameters
      only; buffers are averaged.
    * Deployed: the global model ``theta``.

    The mean counts every participant once. Momentum, Adam and clipping change the steps' direction, so that ``g_k`` is
    no gradient of ``L_k``: a warning says so. PFLlib penalises the distance to ``theta``, not its square, which is
    another method.

    Args:
        alpha: Strength of the regulariser. Default 0.1; the paper tunes it in {0.1, 0.01, 0.001}. SGD needs
            ``eta alpha < 2``.
        size_scaled: Give client ``k`` the strength ``alpha (n/N) / n_k``, so that larger clients are pulled less (the
            authors' code). ``h`` adds up changes as before, so that it is not a mean of the ``g_k`` then. Default: one
            strength for all (the paper).
        report: Model that is scored, selected and exported: ``"model"`` is ``theta`` (default), ``"average"`` is
            ``theta + h / alpha``, the mean of the participants' last models, which is less noisy in early rounds. Training
            goes on from ``theta``.

    Raises:
        ValueError: If ``alpha`` is not positive or ``report`` is unknown.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import GradientContext
        >>> from fedlightning.callbacks import FedDyn
        >>> sent, own = {"w": torch.zeros(2)}, {"g": {"w": torch.tensor([1.0, 0.0])}}
        >>> ctx = GradientContext(anchor=sent, payload={}, state=own, client="0", num_samples=8, lr=0.1)
        >>> FedDyn(alpha=0.5).correct_gradient(ctx, "w", torch.tensor([2.0, 2.0]), torch.zeros(2))
        tensor([0., 1.])
    """

    weighting = "uniform"

    alpha: Annotated[float, Range("(0, inf)", "Use FedAvg() for no regulariser.")] = 0.1
    size_scaled: bool = False
    report: Literal["model", "average"] = "model"

    @property
    def facts(self) -> Facts:
        """`h` agrees with the `g_k`, which the clients keep; strengths by the mean size would change with new clients."""
        newcomers = Newcomers() if self.size_scaled else Newcomers(join=self._join)
        return Facts(
            changes={Change.IN_STEP},
            keeps=True,
            counts_steps=True,
            needs=[WHOLE_CHANGES],
            requires=[
                requires.PlainSGD("is stated for SGD without momentum", "Another rescales its correction."),
                requires.NoOvershoot("pulls a client by lr * alpha", of="alpha", pull="_largest_strength"),
                requires.NoClipping("reads its g_k off the movement of the parameters"),
            ],
            newcomers=newcomers,
        )

    def claims(self, role: str) -> bool:
        """Decline what the options do not use."""
        unused = {
            "wire": not self.size_scaled,
            "on_broadcast": not self.size_scaled and self.report == "model",
            "global_module": self.report == "model",
        }
        return super().claims(role) and not unused.get(role, False)

    def wire(self, module: nn.Module) -> Wire:
        """Declare the client's strength down, where it has one of its own."""
        return Wire(down={"alpha": "scalar"} if self.size_scaled else {})

    # -- client --------------------------------------------------------------------------------------------------------
    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return ``g - g_k + alpha (w - theta)``."""
        if name not in ctx.anchor:  # it does not travel
            return gradient
        g = ctx.state.get("g", {}).get(name, gradient.new_zeros(()))
        alpha = float(ctx.payload.get("alpha", self.alpha))
        return gradient - g.to(gradient.device) + alpha * (parameter - ctx.anchor[name])

    def on_send(self, client: Client, update: Update) -> None:
        """Set ``g_k <- g_k - alpha (theta_k - theta)``."""
        moved = subtract(update.state, select(client.received, set(update.state) & set(client.lr_sums)))
        alpha = float(client.message.extras.get(self.key, {}).get("alpha", self.alpha))
        g = zeros_like(moved) | client.state.get(self.key, {}).get("g", {})
        client.state[self.key] = {"g": add(g, moved, alpha=-alpha)}

    # -- server --------------------------------------------------------------------------------------------------------
    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the client's own strength; for evaluation, the model that is reported."""
        if self.size_scaled:
            strength = self._strength(server.num_samples, server.num_samples.get(job.client, 0))
            message.extras[self.key] = {"alpha": strength}
        if self.report == "average":
            send_reported(job, message, self._average(server))

    def on_update(self, server: Server, update: Update) -> None:
        """Add ``theta_k - theta`` to the sum of the round, in float64."""
        if not update.contributed:
            return
        server_state = server.state.get(self.key, {})
        total = dict(server_state.get("sum", {}))
        for name in server.trainable:
            if name in update.state:
                moved = widen(update.state[name]) - widen(server.model[name])
                total[name] = total[name] + moved if name in total else moved
        server.state[self.key] = {**server_state, "sum": total}

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Move ``h``, and return ``mean(theta_k) - h / alpha``; buffers are the clients' mean."""
        server_state = server.state.get(self.key, {})
        if "sum" not in server_state:  # nobody took part, and there is no mean
            return reduced
        h: State = dict(server_state.get("h", {}))
        for name, moved in server_state["sum"].items():
            change = (self.alpha / len(server.clients)) * moved
            h[name] = h[name] - change if name in h else -change
        server.state[self.key] = {"h": h}
        return {**reduced, **_shifted(reduced, h, -1.0 / self.alpha)}

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the model with the mean of the participants' last models (``report="average"``)."""
        return reported_module(server, self._average(server))

    def _average(self, server: Server) -> State:
        """Return ``theta + h / alpha``."""
        return _shifted(server.model, server.state.get(self.key, {}).get("h", {}), 1.0 / self.alpha)

    def _largest_strength(self, sizes: Mapping[str, int]) -> float:
        return self._strength(sizes, min((count for count in sizes.values() if count), default=1))

    def _strength(self, sizes: Mapping[str, int], size: int) -> float:
        """Return the strength of a client with `size` samples."""
        if not self.size_scaled or size == 0:
            return self.alpha
        return self.alpha * sum(sizes.values()) / len(sizes) / size

    def _join(self, server: Server, clients: Sequence[str]) -> None:
        """Set ``h <- h N_old / N``: it stays the mean of all ``g_k``, and those of new clients are 0."""
        state = server.state.get(self.key)
        if not state:
            return
        share = 1.0 - len(clients) / len(server.num_samples)
        server.state[self.key] = {**state, "h": {name: share * value for name, value in state["h"].items()}}


def _shifted(state: State, h: State, factor: float) -> State:
    """Return the entries that `h` has, moved by `factor h`."""
    return {name: narrow(widen(state[name]) + factor * h[name], state[name]) for name in h if name in state}
