"""What clients pay and are paid: accounts, Shapley values, ranks, and groups by class scores."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import factorial
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor
from torchmetrics.functional.classification import multiclass_f1_score

from fedlightning.algorithm import Client, address, sheets
from fedlightning.callbacks.shared.representations import labels_of
from fedlightning.tensors import ties
from fedlightning.wrappers import FeatureTap

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
    level_by_client, level = {}, 0
    for before, client in zip([None, *order], order, strict=False):
        if before is not None and contributions[client] - contributions[before] > ties.CLOSE:
            level += 1
        level_by_client[client] = level
    return {client: level_by_client[client] for client in contributions}


def write_ledger(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    """Write the entries of all rounds as a table, in one go."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w", newline="") as file:
        sheets.write_table(file, COLUMNS, entries)
    os.replace(beside, path)


def class_scores(client: Client, head: str, owner: str) -> Tensor:
    """Return the validation F1 score of the client's model on each class, `(num_classes,)`; 0 for a class without samples."""
    logits, labels = [], []
    for batch, features in client.feature_pass(lambda module: {"logits": FeatureTap(module, head, at="output")}, "val"):
        logits.append(features["logits"].float().cpu())
        labels.append(labels_of(batch, owner).cpu())
    scores = torch.cat(logits)
    return multiclass_f1_score(scores, torch.cat(labels), num_classes=scores.shape[1], average="none")


def groups_by_class_scores(scores: Mapping[str, Tensor], num_groups: int, seed: int) -> dict[str, int]:
    """Group clients by k-means on the scores of the classes that differ most between clients.

    These are the classes whose variance over clients is at least the mean variance, and no fewer than the groups.

    Example:
        >>> low, high = torch.tensor([0.9, 0.1, 0.5]), torch.tensor([0.1, 0.9, 0.5])
        >>> groups = groups_by_class_scores({"a": low, "b": high, "c": low}, 2, seed=0)
        >>> groups["a"] == groups["c"] != groups["b"]
        True
    """
    from sklearn.cluster import KMeans  # slow to import

    if len(scores) <= num_groups:
        return {client: number for number, client in enumerate(scores)}
    table = torch.stack(list(scores.values())).double().numpy()
    variance = table.var(axis=0)
    many = int((variance >= variance.mean() * (1 - ties.CLOSE)).sum())  # all may be equal, but for rounding
    ranks = -ties.levelled(torch.from_numpy(variance)).numpy()
    varied = np.argsort(ranks, kind="stable")[: max(many, num_groups)]
    means = KMeans(num_groups, n_init=10, random_state=address(seed, "class scores") % 2**32).fit(
        table[:, np.sort(varied)]
    )
    return {client: int(group) for client, group in zip(scores, means.labels_, strict=True)}


Coalition = frozenset[str]
"""Players that work together."""
Game = Generator[list[Coalition], list[float], "Shapley"]
"""Yields coalitions, is sent what each is worth, and returns the players' values."""

PATIENCE = 10
"""Number of the newest running means that are compared to tell whether sampling has settled."""
AT_LEAST = 30
"""Permutations before sampling may end for having settled."""
SETTLED = 0.05
"""Relative change of the running means below which they have settled."""


@dataclass(frozen=True)
class Shapley:
    """The players' values, and what they cost.

    Attributes:
        values: By player.
        evaluations: Number of coalitions whose worth was asked for, without the empty and the full one.
        exact: Whether every coalition was looked at.
        error: Largest standard error of a value; 0 where they are exact.
    """

    values: dict[str, float]
    evaluations: int
    exact: bool
    error: float = 0.0


def shapley_values(
    players: Sequence[str],
    *,
    max_evaluations: int = 100,
    truncate_round: float = 0.0,
    truncate_walk: float = 1e-3,
    draw: torch.Generator | None = None,
) -> Game:
    r"""Compute Shapley values as a generator of the coalitions whose worth is needed.

    `psi_i = sum_{S without i} |S|! (m - |S| - 1)! / m! (v(S + i) - v(S))`, over all `2^m` coalitions where these are not
    more than allowed. Otherwise the mean of the players' marginal worth over random orders. The players lead in turn, each
    counts alike as the leader, and a walk is cut off once it has come as close to `v` of all as `truncate_walk` (guided
    truncated sampling: Liu, Chen, Yu, Liu, Cui, "GTG-Shapley", ACM TIST 2022).

    Example:
        >>> game = shapley_values(["a", "b"])
        >>> worth = {frozenset(): 0.0, frozenset("a"): 1.0, frozenset("b"): 2.0, frozenset("ab"): 4.0}
        >>> play(game, worth.__getitem__).values
        {'a': 1.5, 'b': 2.5}
    """
    everybody = frozenset(players)
    nobody, all_together = yield [frozenset(), everybody]
    if not players:
        return Shapley({}, 0, exact=True)
    if truncate_round > 0 and abs(all_together - nobody) <= truncate_round:
        return Shapley(dict.fromkeys(players, 0.0), 0, exact=False)
    worth_by_coalition = {frozenset(): nobody, everybody: all_together}
    if 2 ** len(players) - 2 <= max_evaluations:
        others = [frozenset(some) for size in range(1, len(players)) for some in combinations(players, size)]
        worths = (yield others) if others else []
        worth_by_coalition |= dict(zip(others, worths, strict=True))
        return Shapley(_exact(players, worth_by_coalition), len(others), exact=True)
    return (yield from _sampled(players, worth_by_coalition, max_evaluations, truncate_walk, draw))


def play(game: Game, worth: Callable[[Coalition], float]) -> Shapley:
    """Answer a game from a function of coalitions, and return the values."""
    try:
        asked = next(game)
        while True:
            asked = game.send([worth(coalition) for coalition in asked])
    except StopIteration as end:
        shapley: Shapley = end.value
        return shapley


def _exact(players: Sequence[str], worth: dict[Coalition, float]) -> dict[str, float]:
    m = len(players)
    weights = [factorial(size) * factorial(m - size - 1) / factorial(m) for size in range(m)]
    values = {}
    for player in players:
        rest = [other for other in players if other != player]
        subsets: Iterable[Coalition] = (frozenset(some) for size in range(m) for some in combinations(rest, size))
        values[player] = sum(weights[len(some)] * (worth[some | {player}] - worth[some]) for some in subsets)
    return values


def _sampled(
    players: Sequence[str],
    worth_by_coalition: dict[Coalition, float],
    max_evaluations: int,
    close_enough: float,
    draw: torch.Generator | None,
) -> Game:
    assert draw is not None, "sampling needs a generator"
    m, evaluations = len(players), 0
    nobody, all_together = worth_by_coalition[frozenset()], worth_by_coalition[frozenset(players)]
    marginals: list[list[float]] = []
    sums, walks = torch.zeros(m, m, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)  # by who leads
    means: list[list[float]] = []
    while not _settled(means) and (len(marginals) < m or evaluations < max_evaluations) and len(marginals) < 20 * m:
        lead = len(marginals) % m
        rest = [place for place in range(m) if place != lead]
        order = [lead, *(rest[place] for place in torch.randperm(m - 1, generator=draw).tolist())]
        marginal, before, coalition = [0.0] * m, nobody, frozenset[str]()
        for place in order:
            coalition |= {players[place]}
            if abs(all_together - before) < close_enough:
                break  # the rest of the walk is worth nothing; what was not asked for is not remembered
            if coalition not in worth_by_coalition:
                (worth_by_coalition[coalition],) = yield [coalition]
                evaluations += 1
            marginal[place] = worth_by_coalition[coalition] - before
            before = worth_by_coalition[coalition]
        marginals.append(marginal)
        sums[lead] += torch.tensor(marginal, dtype=torch.float64)
        walks[lead] += 1
        led = walks > 0  # each leader counts alike, also where the last block of walks was not finished
        means.append((sums[led] / walks[led, None]).mean(0).tolist())
    newest = torch.tensor(marginals, dtype=torch.float64)
    deviations = newest.std(0) / len(marginals) ** 0.5 if len(marginals) > 1 else torch.zeros(m)
    return Shapley(dict(zip(players, means[-1], strict=True)), evaluations, exact=False, error=float(deviations.max()))


def _settled(means: list[list[float]]) -> bool:
    """Return True if the running means of enough permutations have stopped moving."""
    if len(means) < max(AT_LEAST, PATIENCE + 1):
        return False
    newest = torch.tensor(means[-1], dtype=torch.float64)
    before = torch.tensor(means[-PATIENCE - 1 : -1], dtype=torch.float64)
    change = (before - newest).abs() / newest.abs().clamp_min(1e-12)
    return float(change.mean()) < SETTLED


def shares(weights: Tensor) -> list[float]:
    """Return importance weights that sum to 1; equal ones where all are 0."""
    whole = weights.double() if weights.sum() > 0 else torch.ones(len(weights), dtype=torch.float64)
    return (whole / whole.sum()).tolist()
