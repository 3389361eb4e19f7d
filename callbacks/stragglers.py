"""Clients that do less than they are asked to: the stragglers of FedProx's experiments."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from fedlightning.algorithm import POOLED, Change, ClientSelection, Facts, Job, Server, Setup, generator
from fedlightning.ranges import Share


class Stragglers(ClientSelection):
    """A share of each round's participants does fewer epochs than it is asked to; they are kept, or left out.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks", MLSys 2020, section 5.2:
    0, 50 or 90 % of the participants are stragglers and do a number of epochs drawn uniformly from 1 to E. FedProx takes in
    what they have done (``keep=True``), FedAvg leaves them out (``keep=False``).

    Who straggles, and how far each gets, depends on the run's seed and the round alone: two methods of one seed meet the same
    stragglers. It changes jobs and nothing else, so it stands beside any method, one that plans its rounds too. Of a client
    outside the participants (a plan may visit anybody) each visit is a straggler's with probability `share`. Phases whose
    work a method fixes itself are left alone.

    Args:
        share: Share of a round's participants that are stragglers, in [0, 1]. Default 0.5.
        keep: True: their partial work counts (default); False: they have no part in the round.
        epochs: ``"paper"``: 1 to E epochs (default); ``"code"``: 1 to E - 1, as in the authors' code.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> from fedlightning.callbacks.stragglers import Stragglers
        >>> Stragglers(share=0.9, keep=False)
        Stragglers(share=0.9, keep=False, epochs='paper')
    """

    def __init__(self, share: Share = 0.5, keep: bool = True, epochs: Literal["paper", "code"] = "paper") -> None:
        self.share = share
        self.keep = keep
        self.epochs = epochs

    @property
    def facts(self) -> Facts:
        """Stragglers may be left out; who is at work in an asynchronous loop is not a draw of a round."""
        away = {Change.ABSENCE} if not self.keep and self.share > 0 else set()
        return Facts(changes=away, mixes_architectures=True, asynchronous=False)

    def check(self, setup: Setup) -> None:
        """Refuse a federation in which nobody could do less.

        Raises:
            ValueError: If a visit is one epoch or one step, and stragglers are to be kept.
        """
        work = setup.run.local_epochs if setup.run.local_steps is None else setup.run.local_steps
        unit = "local_epochs" if setup.run.local_steps is None else "local_steps"
        if self.keep and self.share > 0 and work is not None and work < 2:
            raise ValueError(
                f"{self.key} lets clients do a part of their epochs, and {unit}={work} has no part. Raise {unit}, or use "
                "keep=False, which leaves stragglers out."
            )

    def on_job(self, server: Server, job: Job) -> Job | None:
        """Give a straggler less to do, or leave it out."""
        if job.work == 0 or job.client == POOLED or not self._straggles(server, job.client):
            return job
        if not self.keep:
            return None
        work = server.blueprint.settings.work if job.work is None else job.work
        most = max(work - (self.epochs == "code"), 1)
        draws = generator(server.seed, server.round, job.client, "stragglers")
        return replace(job, work=1 + int(torch.randint(most, (1,), generator=draws)))

    def _straggles(self, server: Server, client: str) -> bool:
        """Return whether a client straggles in this round: exactly the share of the participants does, rounded."""
        clients = server.participants()
        draws = generator(server.seed, server.round, "stragglers")
        if client not in clients:
            alone = generator(server.seed, server.round, client, "straggles")
            return bool(torch.rand(1, generator=alone) < self.share)
        order = torch.randperm(len(clients), generator=draws).tolist()
        return order.index(clients.index(client)) < round(self.share * len(clients))
