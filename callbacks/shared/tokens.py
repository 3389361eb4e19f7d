"""Tokens that clients pay to take part and earn by contributing: :class:`Ledger`, the accounts of PI-FL."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from fedlightning.algorithm import sheets
from fedlightning.tensors import ties

COLUMNS = ("round", "cluster", "client", "paid", "refunded", "rewarded", "contribution", "error")
"""Columns of `ledger.csv`."""


@dataclass
class Ledger:
    """Accounts of clients and pools of clusters. No step makes tokens or loses them.

    Khan et al., "PI-FL: personalized and incentivized federated learning", 2023, Eq. 4, 5, 7 and 8.

    Attributes:
        balances: Tokens by client.
        pools: Tokens by cluster.
        entries: What has happened in this round: `cluster`, `client`, `paid`, `refunded`, `rewarded`.

    Example:
        >>> ledger = Ledger({"a": 10.0, "b": 10.0, "c": 10.0}, {"one": 0.0})
        >>> for client in "abc":
        ...     ledger.pay(client, "one", 1.0)
        >>> ledger.refund("one", refund_share(0.525, best=0.5, eta=0.5, gamma=0.1))
        >>> ledger.reward("one", contribution_ranks({"a": 0.1, "b": 0.2, "c": 0.3}))
        >>> ledger.balances, ledger.pools
        ({'a': 9.625, 'b': 10.0, 'c': 10.375}, {'one': 0.0})
    """

    balances: dict[str, float]
    pools: dict[str, float]
    entries: list[dict[str, object]] = field(default_factory=list)

    @property
    def total(self) -> float:
        """All tokens: what conservation is measured by."""
        return sum(self.balances.values()) + sum(self.pools.values())

    def can_pay(self, client: str, price: float) -> bool:
        """Return True if a client has the price, after all that it has paid in this round."""
        return self.balances[client] >= price * (1 - 1e-9)  # what rounding takes away does not count

    def pay(self, client: str, cluster: str, price: float) -> None:
        """Move the price of one round from a client to a cluster's pool (Eq. 4, 5)."""
        if not self.can_pay(client, price):
            raise ValueError(f"Client '{client}' has {self.balances[client]} tokens and cannot pay {price}.")
        paid = min(price, self.balances[client])  # what rounding took away is not made up
        self.balances[client] -= paid
        self.pools[cluster] += paid
        self._entry(cluster, client)["paid"] = paid

    def give_back(self, client: str, cluster: str) -> None:
        """Return the whole price to a client that paid and did not answer; it earns no reward."""
        entry = self._entry(cluster, client)
        price = float(entry["paid"])  # type: ignore[arg-type]
        self.pools[cluster] -= price
        self.balances[client] += price
        entry["refunded"] = price

    def refund(self, cluster: str, share: float) -> None:
        """Return a share of the pool to those who paid for this round and answered, in equal parts (Eq. 7).

        The equation as printed takes the tokens from every client; the text of the paper, and conservation, say this.
        """
        payers = [entry for entry in self.entries if entry["cluster"] == cluster and not entry["refunded"]]
        if not payers:
            return
        each = share * self.pools[cluster] / len(payers)
        for entry in payers:
            self.balances[str(entry["client"])] += each
            entry["refunded"] = each
        self.pools[cluster] -= each * len(payers)

    def reward(self, cluster: str, ranks: Mapping[str, float]) -> None:
        """Pay out the pool by the providers' ranks: rank 1 (worst) one part, rank P as many as P (Eq. 8)."""
        parts = sum(ranks.values())
        if not parts:
            return
        each = self.pools[cluster] / parts
        for client, rank in ranks.items():
            self.balances[client] += rank * each
            self._entry(cluster, client)["rewarded"] = rank * each
        self.pools[cluster] = 0.0

    def _entry(self, cluster: str, client: str) -> dict[str, object]:
        for entry in self.entries:
            if (entry["cluster"], entry["client"]) == (cluster, client):
                return entry
        entry = {"cluster": cluster, "client": client, "paid": 0.0, "refunded": 0.0, "rewarded": 0.0}
        self.entries.append(entry)
        return entry


def refund_share(accuracy: float, best: float, eta: float, gamma: float) -> float:
    r"""Return `theta = eta (gamma - min(gamma, d)) / gamma` with `d = max(0, (accuracy - best) / best)` (Eq. 6).

    It lies in [0, eta]: eta where the cluster's model has not improved, 0 where it has by `gamma` or more.

    Example:
        >>> [round(refund_share(accuracy, 0.5, 0.5, 0.1), 9) for accuracy in (0.40, 0.50, 0.525, 0.55, 0.60)]
        [0.5, 0.5, 0.25, 0.0, 0.0]
    """
    better = max(0.0, (accuracy - best) / max(best, 1e-8))
    return eta * (gamma - min(gamma, better)) / gamma if gamma < float("inf") else eta


def contribution_ranks(
    contributions: Mapping[str, float], taken_part: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Return each provider's rank from 1 (worst) to P; of equal ones, those who took part more often rank higher.

    Clients that are equal in both share the mean rank, so that ranks always add up to P (P + 1) / 2. Rounding separates
    nobody: contributions are compared as in :func:`levels`.

    Example:
        >>> contribution_ranks({"a": 0.2, "b": 0.1, "c": 0.2}, {"a": 1, "b": 9, "c": 2})
        {'a': 2.0, 'b': 1.0, 'c': 3.0}
        >>> contribution_ranks({"a": 0.3, "b": 0.1 + 0.2})
        {'a': 1.5, 'b': 1.5}
    """
    keys = [(level, (taken_part or {}).get(client, 0)) for client, level in levels(contributions).items()]
    order: Sequence[tuple[int, int]] = sorted(set(keys))
    ranks = rankdata(np.array([order.index(key) for key in keys])) if keys else []
    return {client: float(rank) for client, rank in zip(contributions, ranks, strict=True)}


def levels(contributions: Mapping[str, float]) -> dict[str, int]:
    """Return the place of each contribution among the different ones, from 0 (least); rounding makes no difference.

    Equal clients get Shapley values that differ in the last digit, since the terms of their sums come in another order.

    Example:
        >>> levels({"a": 0.3, "b": 0.1, "c": 0.1 + 0.2})
        {'a': 1, 'b': 0, 'c': 1}
    """
    order = sorted(contributions, key=contributions.__getitem__)
    found, level = {}, 0
    for before, client in zip([None, *order], order, strict=False):
        if before is not None and contributions[client] - contributions[before] > ties.CLOSE:
            level += 1
        found[client] = level
    return {client: found[client] for client in contributions}


def write_ledger(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    """Write the entries of all rounds as a table, in one go."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w", newline="") as file:
        sheets.write_table(file, COLUMNS, entries)
    os.replace(beside, path)
