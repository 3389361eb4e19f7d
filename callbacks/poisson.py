"""Poisson sampling of participants."""

from __future__ import annotations

import torch

from fedlightning.algorithm import ClientSelection, Facts, Server
from fedlightning.ranges import PositiveShare


class PoissonSampling(ClientSelection):
    """Every client takes part in a round with the same probability, independently of the others.

    The number of participants varies; a round may have nobody, and then changes nothing. It stands beside any method, also
    one that plans its rounds by `server.participants()`. Leave the trainer's `participation` alone.

    Args:
        rate: Probability ``q`` that a client takes part in a round, in (0, 1].

    Raises:
        ValueError: If it is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from fedlightning.callbacks.poisson import PoissonSampling
        >>> draws = lambda *purpose: torch.Generator().manual_seed(0)
        >>> everybody = [str(client) for client in range(1000)]
        >>> server = SimpleNamespace(clients=everybody, is_reachable=lambda client: True, rng=draws)
        >>> len(PoissonSampling(0.1).participants(server))
        88
    """

    facts = Facts(mixes_architectures=True)

    def __init__(self, rate: PositiveShare = 0.1) -> None:
        self.rate = rate

    def participants(self, server: Server) -> list[str]:
        """Return the clients that take part: a coin for each, whoever else can be reached."""
        draws = server.rng("poisson", "participation")
        drawn = torch.rand(len(server.clients), generator=draws, dtype=torch.float64) < self.rate
        return [
            client
            for client, takes_part in zip(server.clients, drawn.tolist(), strict=True)
            if takes_part and server.is_reachable(client)
        ]
