"""The central baseline: one model on pooled data."""

from __future__ import annotations

from fedlightning.algorithm import POOLED, FederatedCallback, Job, Plan, Server, Setup


class Central(FederatedCallback):
    """One model trained on the union of all clients' data, as if data could move.

    The central baseline of the FENDA-FL paper (Tavakoli et al., 2024). The model is evaluated on each client's own
    data. Optimizers go on from round to round, so R rounds of E epochs are one ordinary training of R*E epochs on the
    pooled training set.

    Example:
        >>> from fedlightning.callbacks import Central
        >>> [job] = next(Central().plan_round(server=None))
        >>> job.client, job.data
        ('pooled', 'pooled')
    """

    optimizer_state = "keep"

    def check(self, setup: Setup) -> None:
        """Refuse data that are not in one place, and algorithms that act on clients: there are none.

        Raises:
            ValueError: If there is no union of the data, or another callback decides who takes part, what is shared or sent,
                keeps something at a client, deploys a model per client, or works on what several clients send.
        """
        if not setup.has_pooled("train"):
            raise ValueError(
                "Central trains one model on the union of all clients' data, which cannot be had in one place here. Use "
                "an engine that has all data in one process (engine='sequential'), or another algorithm."
            )
        acts = ("shared_names", "personal_module", "global_module", "on_reduced", "reduce", "server_step")
        for other in setup.callbacks:
            if other.claims("participants"):
                raise ValueError(
                    f"Central trains on all data in every round, and {other.key} says who takes part in a round: that would "
                    f"have no effect. Leave {other.key} out."
                )
            if other.merges or other.keeps or other.sends_less or any(map(other.claims, acts)):
                raise ValueError(
                    f"Central trains one model on pooled data, so {other.key} has no clients to act on. Run them one by one."
                )

    def plan_round(self, server: Server) -> Plan:
        """Plan one visit to the virtual client that holds all data."""
        yield [Job(POOLED, data=POOLED)]
