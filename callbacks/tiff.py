"""TIFF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import GLOBAL, Client, Server, State, WeightingName
from fedlightning.callbacks.pi_fl import PIFL, Steps
from fedlightning.callbacks.shared.memberships import cluster_module
from fedlightning.ranges import Range


class TIFF(PIFL):
    r"""Federated averaging that clients pay tokens for and are paid by for what they contribute.

    Han, Khan, Zawad, Anwar, Baracaldo Angel, Zhou, Yan, Butt, "TIFF: tokenized incentive for federated learning", IEEE
    CLOUD 2022. Its full text was not available to us: this follows what the PI-FL paper says of it, and is the token
    manager of :class:`PIFL` for one model.

    In every round

    * each client that can pay `price` bids to take part; the first `performance_slots` go to those that have contributed
      most (ties: to those that took part least), `random_slots` to others. Who is chosen pays;
    * they train, and the model becomes the mean of theirs, as in FedAvg;
    * `theta = eta (gamma - min(gamma, d)) / gamma` of the pool goes back to those who paid, where d is by how much the
      accuracy on the server's data has risen relative to its best value so far;
    * what is left is divided by the ranks of the clients' contributions: Shapley values of the round on the server's data.

    The server's data are the pooled validation data of all clients, and each coalition's model is scored there, not sent.
    Down: `w`. Up: `w_i`. State at the server: the model (`"cluster 1"`), balances, contributions. Deployed: the global
    model. The accounts are in `ledger.csv` and `figures/ledger.png`. With slots for all this trains what FedAvg does, as long
    as everybody can pay.

    Args:
        performance_slots: Slots for the best contributors. Default 8. `None`: for everybody.
        random_slots: Slots drawn from the others. Default 2.
        price: Tokens for one round.
        tokens: What every client has at the start. `None`: `2 price max_rounds`, so that nobody runs out.
        eta: Largest share of the price that is refunded, in [0, 1].
        gamma: Relative improvement from which nothing is refunded, above 0.
        utility: `"pooled"` (default): Shapley values on the server's data. `"gradient"`: the cosine of a client's step with
            the mean step, which scores no coalition.
        monitor: Metric of the validation step; accuracy, so more is better.
        max_evaluations: Coalitions that may be scored in a round.
        weighting: `"samples"` (default) or `"uniform"`.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> TIFF(random_slots=1).clusters
        ['cluster 1']
    """

    def __init__(
        self,
        performance_slots: int | None = 8,
        random_slots: int = 2,
        price: float = 1.0,
        tokens: float | None = None,
        eta: float = 0.5,
        gamma: Annotated[float, Range("(0, inf]")] = 0.1,
        utility: Literal["pooled", "gradient"] = "pooled",
        monitor: str = "val_accuracy",
        max_evaluations: int = 100,
        weighting: WeightingName | None = "samples",
    ) -> None:
        super().__init__(
            num_clusters=1,
            performance_slots=performance_slots,
            random_slots=random_slots,
            price=price,
            tokens=tokens,
            eta=eta,
            gamma=gamma,
            utility=utility,
            monitor=monitor,
            max_evaluations=max_evaluations,
            weighting=weighting,
        )

    elsewhere = "PIFL with utility='local', or an engine that has all data in one process (engine='sequential')"

    def on_federation_start(self, server: Server) -> None:
        """Open the accounts.

        Raises:
            ValueError: If some entries stay with the clients.
        """
        if len(server.returned_names()) < len(server.kinds):
            raise ValueError(
                "TIFF scores whole models on the server's data, and here some entries stay with the clients. Remove the "
                "callback that keeps them, and leave float_buffers at 'average'."
            )
        super().on_federation_start(server)

    def _first(self, server: Server) -> bool:
        """There are no random groups to begin with: all bid from round 1 on."""
        return False

    def _bids(self, server: Server, available: Sequence[str]) -> Steps:
        """Everybody bids for the one model there is; nothing is asked for that."""
        yield from ()
        return {self.clusters[0]: list(available)}

    @property
    def _in_one_place(self) -> bool:
        """The server scores on its own data, whatever decides about contributions."""
        return True

    def weights(self, client: Client, states: Sequence[State]) -> Tensor:
        """Return 1: there is one model, whatever it does on the client's data."""
        return torch.ones(len(states))

    def memberships(self, server: Server) -> Mapping[str, Mapping[str, float]]:  # type: ignore[override]
        """Return nothing: all belong to one model."""
        return {}

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the model."""
        return cluster_module(server, self.clusters[0] if self.clusters[0] in server.models else GLOBAL)
