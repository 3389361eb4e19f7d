"""MaxFL."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Annotated

from torch import nn

from fedlightning.algorithm import (
    GLOBAL,
    Change,
    Client,
    Extra,
    Facts,
    FederatedCallback,
    Job,
    Need,
    Newcomers,
    Plan,
    Server,
    Setup,
    State,
    Update,
    Wire,
    add_round,
    contributors,
    requires,
    warn,
)
from fedlightning.callbacks.shared.server_models import one_visit
from fedlightning.ranges import NonNegativeFloat, Range, make_init
from fedlightning.tensors import clone, interpolate, module_state, select

ALONE = "alone"
"""Tag of visits that only find a requirement, and key of the model that they begin from."""
FILE = "appeal.csv"
COLUMNS = ("round", "client", "weight", "satisfied")
"""Columns of `appeal.csv`."""
DISTANCE_LIMIT = 20.0
"""Distance from a requirement beyond which a client counts no less: sigmoids of more are 0 in floating point."""

ONE_MODEL = Need("weighs the changes that clients make to one model", (Change.START, "reduce", "on_reduced"))


@make_init
class MaxFL(FederatedCallback):
    r"""Global model appeal: a model that as many clients as possible find better than what they reach alone.

    Cho, Jhunjhunwala, Li, Smith, Joshi, "Maximizing global model appeal in federated learning", TMLR 2024.

    A client is satisfied if `F_i(w) < rho_i`: the global model has a smaller training loss than its requirement, the loss of
    a model that it has trained alone. The number of satisfied clients is the global model's appeal (GMA); what is minimised
    in its place is `1/N sum_i sigmoid(F_i(w) - rho_i)`.

    * Client: on receiving `w` it finds `F_i(w)`, the mean training loss over its data in eval mode, and `q_i = sigmoid(z)
      (1 - sigmoid(z))` with `z = F_i(w) - rho_i`, cut to [-20, 20]; then it trains as under FedAvg.
    * Server: `w <- w + server_lr / (sum_i q_i + eps) sum_i q_i Delta_i`. Clients near their requirement count most: those
      that are satisfied already, or cannot be, least.
    * `rho_i` is found once, from the model that the federation began with. In round 1 the client's own training gives it.
      Who comes later, or everybody if `alone` is set, first trains alone, in a visit of which nothing is sent. Who fails
      in that visit is left out of the round. With `participation=1.0` and `alone=None` only who failed in round 1 comes
      later; it trains alone in one round, and with the others from the next.

    Down: `w`. Up: `w_i`, `q_i` and whether the client is satisfied. State of a client: `rho_i`. State at the server: who has
    one. Deployed: the global model.

    `appeal.csv` in the run's folder has, for each round and participant, `q_i` and whether the model that it was sent
    satisfies it. `fedlightning compare` counts the GMA of every method against Local (column `gma`).

    Args:
        server_lr: `eta_g`. Default 1.
        eps: Added to the sum of weights. Default 1e-6. With 0 and equal weights this is FedAvg with uniform weights.
        alone: Epochs or steps, as the trainer counts work, after which a client's own model sets its requirement; the paper
            says "a few". More work, a stricter client. `None`: as many as in a round.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> [round(appeal_weight(loss, requirement=0.5), 4) for loss in (0.5, 1.5, -0.5)]
        [0.25, 0.1966, 0.1966]
    """

    server_lr: Annotated[float, Range("(0, inf)", "1 takes the mean.")] = 1.0
    eps: NonNegativeFloat = 1e-6
    alone: Annotated[int, Range("[1, inf)", "A requirement comes from a model that has trained.")] | None = None

    def weighting(self, server: Server, update: Update) -> float:
        """Return `q_i`, which the client has sent."""
        return max(float(update.extras[self.key]["weight"]), 0.0)  # the check has some slack

    @property
    def facts(self) -> Facts:
        """The changes of one model are weighed; who has no requirement yet may train alone first."""
        what = "lets a client train alone before it trains the global model"
        return Facts(
            needs=[ONE_MODEL, one_visit(what, "use participation=1.0 and alone=None", self._twice_in)],
            requires=[
                requires.AutomaticOptimization("compares losses that training_step returns"),
                requires.FreshOptimizers(what, when="_twice_in"),
            ],
            most_work=lambda usual: max(usual, self.alone or 0),
            newcomers=Newcomers(join=True),
        )

    def _twice_in(self, setup: Setup) -> bool:
        return self._twice(setup.run.participation, len(setup.run.clients))

    def _twice(self, participation: float, clients: int) -> bool:
        """Return whether a client may train alone and with the others in one round.

        Not where all begin in round 1: then nothing is refused that clients keep, and it would train in both visits.
        """
        share = participation < clients if isinstance(participation, int) else participation < 1.0
        return share or self.alone is not None

    def wire(self, module: nn.Module) -> Wire:
        """Declare the weight and whether the client is satisfied, up."""
        flag = Extra("scalar", low=0, high=1, due=("",))
        return Wire(up={"weight": Extra("scalar", low=0.0, high=0.25, due=("",)), "satisfied": flag})

    # -- server --------------------------------------------------------------------------------------------------------
    def on_federation_start(self, server: Server) -> None:
        """Refuse models of which a part stays with the clients.

        Raises:
            ValueError: If something that training changes does not travel.
        """
        shared = set(server.shared_names())
        kept = [
            name for name, kind in server.kinds.items() if kind in ("trainable", "float_buffer") and name not in shared
        ]
        if kept:
            raise ValueError(
                f"MaxFL asks whether one model for all satisfies each client, but here '{kept[0]}' stays with the clients. "
                "Remove the callback that keeps it, and leave float_buffers at 'average'."
            )
        server.state[self.key] = {"known": [], "rows": []}

    def plan_round(self, server: Server) -> Plan:
        """Let clients without a requirement find one; then train."""
        server.state[self.key] = {**server.state[self.key], "rows": []}
        clients = server.participants()
        ready = set(server.state[self.key]["known"])
        new = [client for client in clients if client not in ready]
        if new and (self.alone is not None or server.round > 0):
            joined = yield from self._find_requirements(server, new)
            twice = self._twice(server.participation.share, len(server.clients))
            clients = [client for client in clients if client in ready or (twice and client in joined)]
        if clients:
            yield [Job(client) for client in clients]

    def _find_requirements(self, server: Server, new: Sequence[str]) -> Generator[list[Job], list[Update], set[str]]:
        """Let clients train alone; return those that have a requirement now."""
        server.models[ALONE] = clone(module_state(server.module))
        answers = yield [Job(client, model=ALONE, work=self.alone, returns=(), tag=ALONE) for client in new]
        del server.models[ALONE]
        joined = {update.client for update in contributors(answers)}
        state = server.state[self.key]
        ready = joined.union(state["known"])
        server.state[self.key] = {**state, "known": [client for client in server.clients if client in ready]}
        return joined

    def on_update(self, server: Server, update: Update) -> None:
        """Note the answer, and that the client has a requirement."""
        extras = update.extras.get(self.key)
        if extras is None:
            return
        state = server.state[self.key]
        ready = {*state["known"], update.client}
        row = (update.client, float(extras["weight"]), bool(extras["satisfied"]))
        server.state[self.key] = {"known": [c for c in server.clients if c in ready], "rows": [*state["rows"], row]}

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Return `w + server_lr sum q_i / (sum q_i + eps) (mean - w)` on trainable parameters."""
        total = sum(weight for _, weight, _ in server.state[self.key]["rows"])
        share = self.server_lr * (total / (total + self.eps))
        if share < 0.5 * self.server_lr:
            warn(
                f"Round {server.round + 1}: all clients are so far from their requirements that MaxFL takes {share:.2g} of a "
                f"step (their weights sum to {total:.2g}, and eps={self.eps}). Use a smaller eps, or a larger `alone`."
            )
        if share == 1.0:
            return reduced
        names = [name for name in server.trainable if name in reduced]
        return {**reduced, **interpolate(select(reduced, names), select(old, names), share)}

    def on_round_end(self, server: Server) -> None:
        """Add the round to `appeal.csv`; rows of this round and later ones, left by a run that was resumed, go."""
        if server.run_dir is None:
            return
        rows = [(server.round + 1, c, f"{weight:.6g}", int(ok)) for c, weight, ok in server.state[self.key]["rows"]]
        add_round(server.run_dir / FILE, COLUMNS, server.round + 1, rows)

    # -- client --------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """Find `F_i(w)` before training."""
        if client.message.model == GLOBAL:
            client.scratch[self.key] = client.loss()

    def on_send(self, client: Client, update: Update) -> None:
        """Set the requirement if there is none yet; send the weight.

        Raises:
            FloatingPointError: If a loss is NaN. The core then drops the update.
        """
        if not client.contributed:
            return
        if client.message.tag == ALONE or "requirement" not in client.state.get(self.key, {}):
            client.state[self.key] = {"requirement": client.loss()}
        if self.key in client.scratch:
            loss, requirement = client.scratch[self.key], client.state[self.key]["requirement"]
            if math.isnan(loss) or math.isnan(requirement):
                raise FloatingPointError(f"its loss is {loss} and its requirement {requirement}")
            update.extras[self.key] = {"weight": appeal_weight(loss, requirement), "satisfied": int(loss < requirement)}


def appeal_weight(loss: float, requirement: float) -> float:
    """Return `q = sigmoid(z) (1 - sigmoid(z))` with `z = loss - requirement`, cut to [-20, 20]."""
    z = min(max(loss - requirement, -DISTANCE_LIMIT), DISTANCE_LIMIT)
    falling = 1.0 / (1.0 + math.exp(abs(z)))  # symmetric to the last bit
    return falling * (1.0 - falling)
