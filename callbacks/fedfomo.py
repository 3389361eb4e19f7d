"""FedFomo."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from fedlightning.algorithm import Change, Client, Extra, Facts, Job, Message, Server, State, Update, Wire, requires
from fedlightning.callbacks.shared.representations import refuse_classes
from fedlightning.callbacks.shared.server_models import KeepsClientModels, NoAnchors, combine, sent_models
from fedlightning.ranges import NonNegativeFloat, Range, Share, make_init
from fedlightning.tensors import clone, distance, module_state, select, ties

ITSELF = "itself"


@make_init
class FedFomo(KeepsClientModels):
    """First-order model optimisation: a client downloads others' models and moves towards those that help it.

    Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order model optimization", ICLR
    2021.

    Client i has its own ``th_i`` and gets up to M models ``th_n`` of others:

    * ``s_n = (L_i(th_i) - L_i(th_n)) / ||th_n - th_i||`` on its validation data, 0 where the two are the same
      (:func:`score`);
    * ``w_n = max(s_n, 0) / sum_m max(s_m, 0)``; if all are zero it keeps ``th_i`` (:func:`first_order_weights`);
    * ``th_i <- th_i + sum_n w_n (th_n - th_i)`` (stage L1), then local training (stage L2).

    The server picks the M models that i gets by a preference matrix ``P[i, n] += s_n`` (from 0), or at random with
    probability ``epsilon``. Only models of the last round are eligible. Evaluation downloads without such exploration.

    * Down: M models, as extras: there is no model for all. Up: ``th_i`` and the M scores.
    * State: ``P`` and the last round's models at the server (O(m * model) memory for m participants), ``th_i`` at the
      client, which stays as it is while absent.
    * Deployed: ``th_i``. There is no global model.

    Distances are L2 over trainable parameters, in float64. Float buffers (BatchNorm) are moved with the same weights;
    integers are the client's own. A client without validation samples scores on its training samples.

    Args:
        num_models: M. Default 5 (paper: 5 or 10). 0 is Local.
        epsilon: Share of random choices in round 1. Default 0.3 (authors).
        epsilon_decay: Decrease of that share per round. Default 0.05 (authors).
        baseline: Which model ``th_i`` is. ``"own"`` (default): the model as it was trained last. ``"start"`` (authors'
            code): the model that this training started from; the trained one is then a candidate like the others, at no
            download, and dropped if it does not help on validation data. ``"own"`` is the default because it was better where
            validation splits are small: 0.905 against 0.886 on digits over ten clients (one seed; worst 0.833 and 0.667).

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        Two of three models lower the client's loss of 1.0, and the nearer one more per unit of distance.

        >>> from fedlightning.callbacks.fedfomo import first_order_weights, score
        >>> scores = [score(1.0, loss, distance) for loss, distance in ((0.5, 1.0), (0.5, 3.0), (2.0, 1.0))]
        >>> [round(weight, 3) for weight in first_order_weights(scores)]
        [0.75, 0.25, 0.0]
    """

    @property
    def facts(self) -> Facts:
        """Training starts from a mixture with the client's own model, and of others' models, none of which is its own."""
        loss = requires.AutomaticOptimization("compares models by the loss that training_step returns")
        return super().facts.extend(
            changes={Change.START, Change.ONE_WAY}, requires=[loss, NoAnchors(of=("correct_gradient",))]
        )

    num_models: Annotated[int, Range("[0, inf)", "0 is Local.")] = 5
    epsilon: Share = 0.3
    epsilon_decay: NonNegativeFloat = 0.05
    baseline: Literal["own", "start"] = "own"

    def wire(self, module: nn.Module) -> Wire:
        """Declare M models down, by their client's place in the order of clients; these places and their scores up."""
        return Wire(
            down={"models": "states"},
            up={"candidates": Extra(("models",), whole=True, low=0), "scores": Extra(("models",))},
        )

    # -- server --------------------------------------------------------------------------------------------------------
    def preferences(self, server: Server) -> Tensor:
        """Return ``P``, shape ``(num_clients, num_clients)``, clients in order."""
        count = len(server.clients)
        stored: Tensor | None = server.state.get(self.key, {}).get("P")
        return torch.zeros(count, count, dtype=torch.float64) if stored is None else stored

    def candidates(self, server: Server, client: str, explore: bool) -> list[str]:
        """Return the clients whose models ``client`` gets: its top M of the last round's, or M at random.

        Args:
            server: The server.
            client: The client that downloads.
            explore: Allow a random choice.
        """
        eligible = [c for c in server.clients if c in server.state.get(self.key, {}).get("models", {}) and c != client]
        draw = server.rng(f"{self.key} {client}")
        epsilon = max(self.epsilon - self.epsilon_decay * server.round, 0.0)
        random = float(torch.rand((), generator=draw)) < epsilon
        shuffled = [eligible[index] for index in torch.randperm(len(eligible), generator=draw).tolist()]
        if not (explore and random):  # a stable sort, so that equal preferences are in random order
            row = ties.levelled(self.preferences(server)[server.clients.index(client)])
            shuffled.sort(key=lambda other: -float(row[server.clients.index(other)]))
        return shuffled[: self.num_models]

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send M models of others instead of a global one."""
        if job.client not in server.clients:
            return
        chosen = self.candidates(server, job.client, explore=job.work != 0)
        models = server.state.get(self.key, {}).get("models", {})
        down = {str(server.clients.index(other)): select(models[other], message.state) for other in chosen}
        message.extras[self.key] = {"models": down}
        message.state = {}

    # -- client --------------------------------------------------------------------------------------------------------
    def on_receive(self, client: Client, message: Message) -> None:
        """Set the client's model to ``th_i + sum_n w_n (th_n - th_i)`` (stage L1)."""
        kept = client.state.get(self.key)
        if kept is None:
            return
        base: State = kept["start" if self.baseline == "start" else "own"]
        models: dict[str, State] = message.extras.get(self.key, {}).get("models", {})
        others = models | ({ITSELF: kept["own"]} if self.baseline == "start" else {})
        scores = self.scores(client, base, others) if others else {}
        weights = first_order_weights(list(scores.values()))
        message.state = combine(base, zip(weights, others.values(), strict=True))
        client.scratch[self.key] = {place: scores[place] for place in models}

    def scores(self, client: Client, base: State, others: Mapping[str, State]) -> dict[str, float]:
        """Return ``s_n`` of every candidate."""
        loader = client.loader("val")
        split = "val" if loader is not None and len(loader) > 0 else "train"
        parameters = [n for n, p in client.module.named_parameters() if p.requires_grad and n in base]
        loss = client.loss(base, split)
        return {
            other: score(loss, client.loss(base | model, split), distance(base | model, select(base, parameters)))
            for other, model in others.items()
        }

    def on_visit_start(self, client: Client) -> None:
        """Note the model that training starts from, for ``baseline="start"``."""
        if self.baseline == "start":
            client.scratch[f"{self.key} start"] = client.model_state()

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``th_i``, since the core does not keep what a client sends. Send the scores."""
        if not client.contributed:
            return
        names = client.message.returns
        client.state[self.key] = {"own": clone(module_state(client.module, names), "cpu")}
        if self.baseline == "start":
            client.state[self.key]["start"] = select(client.scratch[f"{self.key} start"], names)
        scores = client.scratch.get(self.key)
        if scores:
            update.extras[self.key] = {
                "candidates": torch.tensor([int(place) for place in scores]),
                "scores": torch.tensor(list(scores.values()), dtype=torch.float64),
            }

    # -- server, after the visits --------------------------------------------------------------------------------------
    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse scores of models that were not sent."""
        if extras := update.extras.get(self.key):
            refuse_classes(extras["candidates"], len(server.clients), "client")

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Add ``s_n`` to ``P[i, n]``, and replace the last round's models by this round's."""
        preferences = self.preferences(server).clone()
        for update in updates:
            extras = update.extras.get(self.key)
            if extras:
                preferences[server.clients.index(update.client), extras["candidates"]] += extras["scores"]
        server.state[self.key] = {"P": preferences, "models": sent_models(updates)}
        return {}


def score(own_loss: float, loss: float, length: float) -> float:
    """Return ``(L_i(th_i) - L_i(th_n)) / ||th_n - th_i||``; 0 for the same model and for losses that are not numbers.

    Example:
        >>> score(1.0, 0.5, 2.0), score(1.0, float("nan"), 2.0)
        (0.25, 0.0)
    """
    gain = (own_loss - loss) / length if length > 0 else 0.0
    return gain if math.isfinite(gain) else 0.0


def first_order_weights(scores: Sequence[float]) -> list[float]:
    """Return ``max(s_n, 0)`` divided by their sum; all 0 if no model helps.

    Example:
        >>> first_order_weights([3.0, -1.0, 1.0])
        [0.75, 0.0, 0.25]
    """
    positive = [max(score, 0.0) for score in scores]
    total = sum(positive)
    return [value / total if total > 0 else 0.0 for value in positive]
