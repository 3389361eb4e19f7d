"""Shapley values of a game that somebody else plays: :func:`shapley_values` asks for coalitions, and is told what they
are worth.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial

import torch

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
    known = {frozenset(): nobody, everybody: all_together}
    if 2 ** len(players) - 2 <= max_evaluations:
        others = [frozenset(some) for size in range(1, len(players)) for some in combinations(players, size)]
        worths = (yield others) if others else []
        known |= dict(zip(others, worths, strict=True))
        return Shapley(_exact(players, known), len(others), exact=True)
    return (yield from _sampled(players, known, max_evaluations, truncate_walk, draw))


def play(game: Game, worth: Callable[[Coalition], float]) -> Shapley:
    """Answer a game from a function of coalitions, and return the values."""
    try:
        asked = next(game)
        while True:
            asked = game.send([worth(coalition) for coalition in asked])
    except StopIteration as end:
        found: Shapley = end.value
        return found


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
    known: dict[Coalition, float],
    max_evaluations: int,
    close_enough: float,
    draw: torch.Generator | None,
) -> Game:
    assert draw is not None, "sampling needs a generator"
    m, evaluations = len(players), 0
    nobody, all_together = known[frozenset()], known[frozenset(players)]
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
            if coalition not in known:
                (known[coalition],) = yield [coalition]
                evaluations += 1
            marginal[place] = known[coalition] - before
            before = known[coalition]
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
