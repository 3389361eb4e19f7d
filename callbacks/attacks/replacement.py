"""Model replacement: one bad client whose model becomes everybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import Change, Client, Facts, Message, Need, Server, Update, UpdateInterception
from fedlightning.callbacks.attacks.bad_clients import Attack, Positive
from fedlightning.ranges import Range, needs
from fedlightning.tensors import narrow, widen


class SignFlip(Attack):
    """Bad clients send the opposite of their change: ``-scale (w_i - w)``.

    Args:
        clients: The bad clients' ids.
        scale: How much longer than the honest change it is. Default 1.

    Example:
        >>> SignFlip(clients=[3], scale=2.0).attacked(None, torch.ones(1), "w")
        tensor([-2.])
    """

    def __init__(self, clients: Sequence[str | int], scale: Positive = 1.0) -> None:
        super().__init__(clients)
        self.scale = scale

    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return the opposite."""
        return -self.scale * change


class GaussianAttack(Attack):
    """Bad clients send Gaussian noise instead of their change.

    Args:
        clients: The bad clients' ids.
        std: Its standard deviation, for every number. Default 1.
    """

    def __init__(self, clients: Sequence[str | int], std: Positive = 1.0) -> None:
        super().__init__(clients)
        self.std = std

    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return noise from an address of its own, so that a resumed run attacks alike."""
        draws = client.rng(f"attack {name}")
        return self.std * torch.randn(change.shape, generator=draws, dtype=torch.float64)


KNOWN_WEIGHTS = Need(
    "has to know its share in the mean of every entry",
    (Change.PARTS, Change.SMALLER, "on_build", "encode", "denominator", "neighbours", "server_step"),
    instead="give a number for scale",
)
"""Of entries that only some clients send, each would have a share of its own; a server's optimizer moves elsewhere."""


class ModelReplacement(UpdateInterception, Attack):
    """Bad clients send ``scale (w_i - w)``, so that a mean over ``scale`` clients becomes their model plus what others add.

    The mean is ``w + sum_i a_i u_i``: where the bad weigh ``1 / scale``, it is their model plus the weighted changes
    of the honest. Near the end of training these are small (the paper's setting); before, the mean is another model.

    Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How to backdoor federated learning", AISTATS 2020 (arXiv:1807.00459).
    Beside :class:`~fedlightning.callbacks.attacks.Backdoor` with the same clients it is their attack. *Constrain and scale*:
    with `alpha` below 1 bad clients train on ``alpha loss + (1 - alpha) ||w - w_sent||``, to pass rules that look at
    distances.

    Args:
        clients: The bad clients' ids.
        scale: A number (default 10), usually the number of participants over the number of bad clients; `"exact"`:
            ``n_total / (n_bad server_lr)`` by the weights of the mean in each round, which the attackers are taken to know;
            refused beside a server's optimizer, whose step is not a multiple of the mean's.
        server_lr: Factor on changes at the server, such as a rule's, that `"exact"` makes up for. Default 1: none.
        alpha: Share of the task's loss in the loss of bad clients, in (0, 1]. Default 1.

    Example:
        >>> ModelReplacement(clients=[3], scale=4.0).attacked(None, torch.ones(1), "w")
        tensor([4.])
    """

    @needs("server_lr", "scale", value="exact", why="a number is taken as it is. Leave it out, or set scale='exact'.")
    def __init__(
        self,
        clients: Sequence[str | int],
        scale: Positive | Literal["exact"] = 10.0,
        server_lr: Positive = 1.0,
        alpha: Annotated[float, Range("(0, 1]")] = 1.0,
    ) -> None:
        super().__init__(clients)
        self.scale = scale
        self.server_lr = server_lr
        self.alpha = alpha

    @property
    def facts(self) -> Facts:
        """Weights of a round are known where everybody's updates are held together."""
        facts = super().facts
        return facts.extend(needs=[KNOWN_WEIGHTS], asynchronous=False) if self.scale == "exact" else facts

    def claims(self, name: str) -> bool:
        """Return True for what the options ask for."""
        wanted = {"intercept": self.scale == "exact", "on_send": self.scale != "exact", "training_loss": self.alpha < 1}
        return wanted.get(name, True) and super().claims(name)

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss of a bad client with the distance from the model that it was sent."""
        if client.id not in self.clients or self.alpha == 1:
            return loss
        apart = [
            (parameter - client.received[name].to(parameter)).flatten()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name in client.received
        ]
        return self.alpha * loss + (1 - self.alpha) * torch.linalg.vector_norm(torch.cat(apart))

    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return the change, scaled."""
        return change if self.scale == "exact" else self.scale * change

    def intercept(self, server: Server, sent: Sequence[Message], updates: Sequence[Update]) -> None:
        """Scale by the share of the bad clients in the mean of their model."""
        answered = [pair for pair in zip(sent, updates, strict=True) if pair[1].error is None and pair[1].state]
        for model in dict.fromkeys(update.model for _, update in answered):
            pairs = [pair for pair in answered if pair[1].model == model]
            total = sum(server.weight(update) for _, update in pairs)
            pairs = [pair for pair in pairs if pair[1].client in self.clients]
            bad = sum(server.weight(update) for _, update in pairs)
            for message, update in pairs if bad else ():
                factor, old = total / (bad * self.server_lr), server.models[model]
                scaled = {}
                for name in (name for name in server.architecture(model).trainable if name in update.state):
                    start, value = widen(message.state.get(name, old[name])), update.state[name]
                    scaled[name] = narrow(start + factor * (widen(value) - start), value)
                update.state = {**update.state, **scaled}
