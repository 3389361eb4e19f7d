"""The central baseline: one model on pooled data."""

from __future__ import annotations

from fedlightning.algorithm import POOLED, Change, Facts, FederatedCallback, Job, Need, Plan, Server, requires


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

    facts = Facts(
        optimizer_state="keep",
        needs=[
            Need(
                "trains one model on pooled data, without clients to act on",
                (
                    *("participants", Change.START, "keeps", Change.PARTS, "shared_names", "personal_module"),
                    *("global_module", "on_reduced", "reduce", "server_step"),
                ),
            )
        ],
        requires=[
            requires.PooledSplit(
                "trains one model on the union of all clients' data",
                "Use an engine that has all data in one process (engine='sequential'), or another algorithm.",
                of="train",
            )
        ],
    )

    def plan_round(self, server: Server) -> Plan:
        """Plan one visit to the virtual client that holds all data."""
        yield [Job(POOLED, data=POOLED)]
