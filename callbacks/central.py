"""The central baseline."""

from __future__ import annotations

from fedlightning.algorithm import POOLED, FederatedCallback, Job, Plan, Server, Setup


class Central(FederatedCallback):
    """One model trained on the union of all clients' data; evaluated on each client's own.

    The baseline of the FENDA-FL paper: what could be had if data could move. Optimizers go on from round to round, so
    that R rounds of E epochs are one ordinary training of R*E epochs on the pooled training set.
    """

    optimizer_state = "keep"

    def check(self, setup: Setup) -> None:
        """Refuse company: there are no clients to federate."""
        roles = ("shared_names", "personal_module")
        others = [callback.key for callback in setup.callbacks if any(map(callback.claims, roles))]
        if others:
            raise ValueError(
                f"Central trains one model on pooled data, so {others[0]} has no clients to act on. Run them one by one."
            )

    def plan_round(self, server: Server) -> Plan:
        """One visit to the virtual client that holds everything."""
        yield [Job(POOLED, data="pooled")]
