"""FedLAMA: layer-wise intervals of averaging."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.algorithm import (
    Change,
    Facts,
    Job,
    Message,
    Plan,
    Server,
    ServerModels,
    State,
    Update,
    WeightingName,
    Wire,
)
from fedlightning.callbacks.shared.server_models import parameter_names
from fedlightning.layers import partition
from fedlightning.ranges import Range, make_init
from fedlightning.tensors import as_reals, distance, select, ties

Interval = Annotated[int, Range("[1, inf)", "An interval in rounds.", strict=True)]


@make_init
class FedLAMA(ServerModels):
    r"""Layer-wise adaptive model aggregation: layers on which the clients agree are averaged less often.

    Lee, Zhang, Avestimehr, "Layer-wise adaptive model aggregation for scalable federated learning", AAAI 2023.

    Layer `l` is averaged every `tau_l` rounds, `tau_l` in `{tau, phi tau}`; in between it stays as each client trained
    it. Everything is averaged every `phi tau` rounds and in the last one, which a run that is made longer does again.

    Up: the layers due. Down: the layers averaged since the client's last visit. State: the model at each client; `tau_l`
    and `d_l` at the server.

    * When `l` is averaged to `u_l`: `d_l = sum_i p_i ||u_l - x_il||^2 / (tau_l dim_l)` over trainable parameters.
    * Every `phi tau` rounds, when all have just been averaged: with the layers in ascending order of `d`, let
      `delta = sum d dim` and `lambda = sum dim` of the first ones as shares of the whole. The layers up to where `delta`
      crosses `1 - lambda` get `phi tau`, the others `tau`.

    One unit of the paper's intervals is one round. Participants are drawn anew only when all is averaged (paper). The
    global model holds the newest average of every layer.

    Args:
        phi: Factor of the long interval (paper: 2, 4, 8). 1 is FedAvg every `tau` rounds.
        tau: Base interval in rounds (paper: 6 to 10 local steps, which a round of local epochs has anyway).
        cut: The layers with the long interval end with the `"crossing"` one (the authors' code) or where the two curves
            are `"nearest"`.
        weighting: Weights of the clients in the mean and in `d`: `"samples"` or `"uniform"`.

    Raises:
        ValueError: If an interval is not a whole number from 1 on, or `cut` is unknown.

    Example:
        >>> from fedlightning.callbacks import FedLAMA
        >>> discrepancies, sizes = [0.1, 5.0, 0.2, 4.0], [10, 10, 10, 10]
        >>> less_critical(discrepancies, sizes, FedLAMA().cut)  # only layer 1 is averaged every tau rounds
        [0, 2, 3]
    """

    phi: Interval = 2
    tau: Interval = 1
    cut: Literal["crossing", "nearest"] = "crossing"
    weighting: WeightingName | None = None

    # -- the server's state --------------------------------------------------------------------------------------------
    @property
    def facts(self) -> Facts:
        """Layers come only when they are new to a client, and go back when they are due."""
        return super().facts.extend(changes={Change.ONE_WAY}, last_round=self._last_round)

    def _last_round(self, rounds: int) -> str:
        """What the last round does before its time."""
        return "averaged all layers" if rounds % (self.phi * self.tau) else ""

    def _own(self, server: Server) -> dict[str, Any]:
        """The state; at first every layer has the base interval."""
        layers = partition(server.module)
        fresh = {
            "tau": dict.fromkeys(layers, self.tau),
            "d": dict.fromkeys(layers, 0.0),
            "averaged": dict.fromkeys(layers, -1),  # the round in which the server last averaged a layer
            "seen": {},  # the round in which a client last trained
        }
        return {**fresh, **server.state.get(self.key, {})}

    # -- which layers travel when --------------------------------------------------------------------------------------
    def _full_average(self, server: Server) -> bool:
        """True if everything is averaged at the end of this round."""
        done = server.round + 1
        return done % (self.phi * self.tau) == 0 or done == server.rounds

    def _due(self, server: Server) -> list[str]:
        """The layers that are averaged at the end of this round."""
        everything, tau = self._full_average(server), self._own(server)["tau"]
        return [layer for layer, tau_l in tau.items() if everything or (server.round + 1) % tau_l == 0]

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the entries of the layers that are averaged at the end of this round."""
        layers = partition(module)
        return [name for layer in self._due(server) for name in layers[layer]]

    def wire(self, module: nn.Module) -> Wire:
        """Declare that every layer may leave: each is averaged at the end of some round."""
        return Wire(entries="all")

    def plan_round(self, server: Server) -> Plan:
        """Visit the same participants until everything has been averaged."""
        server_state = self._own(server)
        clients = server_state.get("participants") or server.participants()
        server.state[self.key] = server_state | {"participants": [] if self._full_average(server) else clients}
        yield [Job(client, down=self._news(server, client)) for client in clients]

    def _news(self, server: Server, client: str) -> tuple[str, ...]:
        """The entries averaged since the client's last visit; its other layers go on from where they are."""
        server_state, layers = self._own(server), partition(server.module)
        seen = server_state["seen"].get(client, -1)
        new = {name for layer, when in server_state["averaged"].items() if when >= seen for name in layers[layer]}
        return tuple(name for name in server.shared_names(without=self) if name in new)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send only what is new to the client, also for evaluation."""
        message.state = select(server.models[job.model], self._news(server, job.client))

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the newest average of every layer; `None` if another callback keeps layers with the clients."""
        complete = len(server.shared_names(without=self)) == len(server.kinds)
        return server.module_with(server.model) if complete else None

    # -- discrepancies and intervals -----------------------------------------------------------------------------------
    def on_update(self, server: Server, update: Update) -> None:
        """Add `p_i ||x_il - w_l||^2` for each layer, with the old `w_l`: the mean `u_l` is not known yet."""
        server_state, p_i = self._own(server), server.weight(update)
        sums = dict(server_state.get("sums", {}))
        for layer, names in self._trainable(server, update.state).items():
            apart = distance(server.model, select(update.state, names)) ** 2
            total, weights = sums.get(layer, (0.0, 0.0))
            sums[layer] = (total + p_i * apart, weights + p_i)
        seen = {**server_state["seen"], update.client: server.round}
        server.state[self.key] = server_state | {"seen": seen, "sums": sums}

    def on_reduced(self, server: Server, state: State) -> State:
        """Compute `d_l` of the layers just averaged, and every `phi tau` rounds the new intervals."""
        server_state, layers = self._own(server), self._trainable(server, state)
        sums, d, tau = server_state.pop("sums", {}), dict(server_state["d"]), server_state["tau"]
        sizes = {layer: sum(as_reals(state[name]).numel() for name in names) for layer, names in layers.items()}
        for layer, names in layers.items():
            total, weights = sums.get(layer, (0.0, 0.0))
            if weights > 0:  # sum_i p_i ||x_i - u||^2 = sum_i p_i ||x_i - w||^2 - ||u - w||^2, as u is the mean
                spread = total / weights - distance(server.model, select(state, names)) ** 2
                d[layer] = max(spread, 0.0) / (tau[layer] * sizes[layer])
        averaged = server_state["averaged"] | dict.fromkeys(self._due(server), server.round)
        if (server.round + 1) % (self.phi * self.tau) == 0:
            order = list(sizes)
            long = less_critical([d[layer] for layer in order], [sizes[layer] for layer in order], self.cut)
            tau = dict.fromkeys(tau, self.tau) | {order[index]: self.phi * self.tau for index in long}
        server.state[self.key] = server_state | {"d": d, "averaged": averaged, "tau": tau}
        return state

    def _trainable(self, server: Server, state: State) -> dict[str, list[str]]:
        """The trainable parameters in `state` by layer, tied ones once."""
        counted = set(parameter_names(server, state))
        layers = {layer: [n for n in names if n in counted] for layer, names in partition(server.module).items()}
        return {layer: names for layer, names in layers.items() if names}


def less_critical(d: Sequence[float], sizes: Sequence[int], cut: str) -> list[int]:
    """Return the numbers of the layers that get the long interval, in ascending order of `d`.

    Example:
        >>> less_critical(d=[0.1, 5.0, 0.2, 4.0], sizes=[10, 10, 10, 10], cut="nearest")
        [0, 2, 3]
        >>> less_critical(d=[9.0, 0.1, 0.1, 9.0], sizes=[10, 10, 10, 10], cut="crossing")
        [1, 2, 0]
    """
    d = d if any(d) else [1.0] * len(d)
    level = ties.levelled(torch.tensor(d, dtype=torch.float64)).tolist()
    order = sorted(range(len(d)), key=lambda index: level[index])  # ties by index
    mass, total = sum(value * size for value, size in zip(d, sizes, strict=True)), sum(sizes)
    delta = share = 0.0  # the paper's delta and lambda
    gaps: list[float] = []
    for index in order:
        delta += d[index] * sizes[index] / mass
        share += sizes[index] / total
        gaps.append(delta - (1.0 - share))
        if cut == "crossing" and gaps[-1] > ties.CLOSE:
            break
    nearest = ties.first_least(torch.tensor(gaps, dtype=torch.float64).abs(), floor=ties.CLOSE)
    count = len(gaps) if cut == "crossing" else int(nearest) + 1
    return order[:count]
