"""Who pays, who earns and who profits: the ledgers of methods that pay clients in tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedlightning.study.data import StudyData, Table
from fedlightning.study.incentives import appeal
from fedlightning.study.run_scores import mean_of
from fedlightning.study.run_tables import Entry

CONSERVED = 1e-9
"""Tokens by which a round of a cluster may miss; more is a problem."""
MIN_CLIENTS = 3
"""Clients from which a rank correlation is taken."""


def tokens(study: StudyData) -> Table:
    """Return one line for each method and client: what it paid, got and contributed, beside what it gained.

    Means over the seeds with a readable `ledger.csv` (`n_seeds`). A client that was never chosen paid nothing.

    - `paid`, `refunded`, `rewarded`: tokens in the whole run; `balance`: refunded + rewarded - paid.
    - `rounds`: rounds in which it trained and was counted, in one cluster or several.
    - `contribution`: mean of its contributions over these rounds and clusters, then over the seeds in which it has any;
      `contribution_se`: its standard error, s / sqrt(n) over them, of seeds together sqrt(sum se^2) / seeds. `None` for a
      single contribution.
    - `sampling_error`: of that mean, at most, since contributions were sampled (from the column `error`); 0 where all are
      exact.
    - `pma`: what the client's score gains over FedAvg's global model (see
      :func:`fedlightning.study.incentives.appeal`), over `pma_seeds` seeds; `None` without a comparable FedAvg run.
    """
    gains = {(line["method"], line["client"]): line for line in appeal(study)}
    lines = []
    for method in study.methods:
        entries_by_seed = by_seed(study, method)
        runs = [study.finished[method, seed].run for seed in entries_by_seed]
        clients = dict.fromkeys(client for run in runs for client in run.clients)
        clients |= dict.fromkeys(entry.client for entries in entries_by_seed.values() for entry in entries)
        for client in clients:
            each = [
                _account([entry for entry in entries if entry.client == client]) for entries in entries_by_seed.values()
            ]
            gain = gains.get((method, client), {})
            lines.append(
                {"method": method, "client": client}
                | {name: mean_of([account[name] for account in each]) for name in _TOKENS}
                | _contribution(each)
                | {"pma": gain.get("pma"), "pma_seeds": gain.get("n_seeds", 0), "n_seeds": len(entries_by_seed)}
            )
    return lines


def ledgers(study: StudyData) -> Table:
    """Return one line for each method that pays in tokens: all of its clients together, means over seeds.

    - `paid`, `refunded`, `rewarded`: tokens of all clients in the whole run.
    - `missing`: largest amount by which a round of a cluster does not hand out what was paid, in any seed; `conserved`:
      whether that is at most :data:`CONSERVED`.
    - `earners`: clients that end with more tokens than they began with, of `clients`.
    - `gainers`: clients with a positive `pma`, of `compared`; `None` without a comparable FedAvg run.
    - `contribution_gain`, `contribution_balance`, `balance_gain`: Spearman's rank correlations over clients of the columns
      of :func:`tokens`: do those who contribute profit, in accuracy and in tokens? `None` for fewer than three clients, or
      where one side is the same for all.
    """
    by_client = tokens(study)
    lines = []
    for method in study.methods:
        entries_by_seed = by_seed(study, method)
        if not entries_by_seed:
            continue
        accounts = [_account(entries) for entries in entries_by_seed.values()]
        rows = [row for row in by_client if row["method"] == method]
        gains = [row["pma"] for row in rows if row["pma"] is not None]
        gap = max(missing(entries) for entries in entries_by_seed.values())
        line: dict[str, Any] = {"method": method}
        line |= {name: mean_of([account[name] for account in accounts]) for name in ("paid", "refunded", "rewarded")}
        line |= {"missing": gap, "conserved": gap <= CONSERVED, "clients": len(rows)}
        line |= {"earners": sum(row["balance"] > CONSERVED for row in rows)}
        line |= {"gainers": sum(gain > 0 for gain in gains) if gains else None, "compared": len(gains)}
        for name, first, other in (
            ("contribution_gain", "contribution", "pma"),
            ("contribution_balance", "contribution", "balance"),
            ("balance_gain", "balance", "pma"),
        ):
            line[name] = _rank_correlation([(row[first], row[other]) for row in rows])
        lines.append(line | {"n_seeds": len(entries_by_seed), "seeds": len(study.seeds)})
    return lines


def by_seed(study: StudyData, method: str) -> dict[int, Sequence[Entry]]:
    """Return by seed the entries of a method; seeds without a readable `ledger.csv` are left out."""
    entries_by_seed = {seed: study.tables[method, seed].entries for seed in study.seeds_of(method)}
    return {seed: entries for seed, entries in entries_by_seed.items() if entries}


def balances(entries: Sequence[Entry], clients: Iterable[str]) -> dict[str, list[float]]:
    """Return by client how many tokens more than at the start it has after each round, from round 0.

    Example:
        >>> balances([Entry(1, "one", "a", 1.0, 0.5, 0.25, 0.1, 0.0)], ["a", "b"])
        {'a': [0.0, -0.25], 'b': [0.0, 0.0]}
    """
    rounds = max((entry.round for entry in entries), default=0)
    change = {client: np.zeros(rounds + 1) for client in [*clients, *(entry.client for entry in entries)]}
    for entry in entries:
        change[entry.client][entry.round] += entry.refunded + entry.rewarded - entry.paid
    return {client: np.cumsum(changes).tolist() for client, changes in change.items()}


def missing(entries: Iterable[Entry]) -> float:
    """Return the largest amount by which refunds and rewards differ from what was paid, in a round of a cluster.

    Example:
        >>> missing([Entry(1, "one", "a", 1.0, 0.5, 0.25, 0.1, 0.0)])
        0.25
    """
    pools: dict[tuple[int, str], list[float]] = {}
    for entry in entries:
        pools.setdefault((entry.round, entry.cluster), []).extend((entry.paid, -entry.refunded, -entry.rewarded))
    return max((abs(math.fsum(pool)) for pool in pools.values()), default=0.0)


_TOKENS = ("paid", "refunded", "rewarded", "balance", "rounds")


def _account(entries: Sequence[Entry]) -> dict[str, float | None]:
    """Return the sums of some entries of one run, and the mean of their contributions."""
    paid, refunded, rewarded = (
        math.fsum(getattr(entry, name) for entry in entries) for name in ("paid", "refunded", "rewarded")
    )
    contributions = [(entry.contribution, entry.error or 0.0) for entry in entries if entry.contribution is not None]
    values, errors = [value for value, _ in contributions], [error for _, error in contributions]
    count = len(contributions)
    return {
        "paid": paid,
        "refunded": refunded,
        "rewarded": rewarded,
        "balance": refunded + rewarded - paid,
        "rounds": float(len({entry.round for entry in entries if entry.contribution is not None})),
        "contribution": math.fsum(values) / count if count else None,
        "contribution_se": float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else None,
        "sampling_error": math.hypot(*errors) / count if count else None,
    }


def _contribution(each: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the mean contribution over the seeds that have one, with both of its errors."""
    measured = [account for account in each if account["contribution"] is not None]
    errors = {name: [account[name] for account in measured] for name in ("contribution_se", "sampling_error")}
    return {
        "contribution": mean_of([account["contribution"] for account in measured]),
        **{
            name: math.hypot(*(v or 0.0 for v in values)) / len(values) if values and None not in values else None
            for name, values in errors.items()
        },
    }


def _rank_correlation(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    # Scores are numbers of single precision: what differs by rounding is a tie.
    rounded = [(round(x, 6), round(y, 6)) for x, y in pairs if x is not None and y is not None]
    if len(rounded) < MIN_CLIENTS or any(len(set(side)) < 2 for side in zip(*rounded, strict=True)):
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(*zip(*rounded, strict=True)).statistic)
