"""What robust rules of aggregation share: whose changes are judged together, what is refused, what becomes of buffers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import Tensor

from fedlightning.algorithm import Facts, FederatedCallback, Need, Newcomers, Server, Setup, State, Update, warn
from fedlightning.callbacks.shared.single_updates import refuse_other_ways
from fedlightning.ranges import Range
from fedlightning.tensors import add_row, has_mean, narrow, to_row, widen

Bad = Annotated[int, Range("[0, inf)", "It counts bad clients.")]
"""A number of bad clients that a rule is to bear."""
ONE_MODEL = Need("has to judge every update before it moves a model", ("model_of", "place"))
"""Methods that keep several models make some of them out of single updates, as where clusters are founded or split."""


Combine = Callable[[Tensor, Tensor], Tensor]
"""Makes one change of `(m, d)` changes and their weights."""


class RobustRule(FederatedCallback):
    """Base of rules that combine clients' changes of which some may be anything.

    A rule is given the changes ``u_i = w_i - w`` of the clients that trained, as rows of one matrix in float64, and returns
    the change of the server's model. Names that came from different clients (methods that send parts of a model) are
    judged apart, those that came from the same clients as one joint vector over all trainable entries. A name with fewer
    senders than it needs keeps its value, with a warning. Methods that keep several models at the server are refused.
    Floating-point buffers are combined by their coordinate-wise median, integer buffers too.

    Args:
        mixing: Number ``f`` of bad clients before whom each change is first replaced by the mean of its ``m - f`` nearest,
            itself among them (Allouah et al., AISTATS 2023, arXiv:2302.01772). Default 0: no mixing.
    """

    def __init__(self, mixing: Bad = 0) -> None:
        self.mixing = mixing

    def least(self) -> int:
        """Return the least number of clients that the rule needs, mixing apart."""
        return 1

    @property
    def needed(self) -> int:
        """The least number of clients that the rule needs, with mixing."""
        return max(self.least(), 2 * self.mixing + 1 if self.mixing else 1)

    @abstractmethod
    def combine(self, changes: Tensor, weights: Tensor) -> Tensor:
        """Return one change from those of several clients.

        Args:
            changes: A row a client, `(m, d)`, float64.
            weights: Weights of the clients, `(m,)`, which sum to 1.
        """

    def rule_of(self, server: Server, model: str, names: Sequence[str]) -> Combine:
        """Return what combines this round's changes of some entries: :meth:`combine`, unless the server adds to it."""
        return self.combine

    @property
    def facts(self) -> Facts:
        """It holds nothing from round to round, and combines one model."""
        return super().facts.extend(mixes_architectures=True, newcomers=Newcomers(join=True), needs=[ONE_MODEL])

    def check(self, setup: Setup) -> None:
        """Refuse rounds of too few clients, and whatever lets a client into the server's state past the rule.

        Raises:
            ValueError: With what is in the way.
        """
        share, count = setup.run.participation, len(setup.run.clients)
        drawn = share if isinstance(share, int) else max(1, round(share * count))
        if drawn < self.needed:
            raise ValueError(
                f"{self!r} needs {self.needed} clients in a round, and {drawn} take part. Raise participation, or take a "
                "rule that needs fewer."
            )
        refuse_other_ways(self, setup, "does not judge: one bad client would have its way by them")

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Combine the updates of one model."""
        old, trainable = server.models[updates[0].model], set(server.trainable)
        weights = [server.weight(update) for update in updates]
        updates = [update for update, weight in zip(updates, weights, strict=True) if weight > 0]
        weights = [weight for weight in weights if weight > 0]
        senders: dict[tuple[int, ...], list[str]] = {}
        for name in dict.fromkeys(name for update in updates for name in update.state):
            who = tuple(index for index, update in enumerate(updates) if name in update.state)
            senders.setdefault(who, []).append(name)
        new: State = {}
        for who, names in senders.items():
            if len(who) < self.needed:
                warn(
                    f"Round {server.round + 1}: {len(who)} clients sent '{names[0]}', and {self.key} needs {self.needed}: "
                    f"{len(names)} entries keep their values."
                )
                continue
            those = [updates[index].state for index in who]
            judged = [name for name in names if name in trainable]
            new |= {
                name: _median(torch.stack([sent[name] for sent in those])) for name in names if name not in trainable
            }
            if judged:
                shares = torch.tensor([weights[index] for index in who], dtype=torch.float64)
                combine = self.rule_of(server, updates[0].model, judged)
                new |= self._combined(old, judged, those, shares / shares.sum(), combine)
        return new

    def _combined(
        self, old: State, names: Sequence[str], states: Sequence[State], weights: Tensor, combine: Combine | None = None
    ) -> State:
        before = {name: old[name] for name in names}
        changes = torch.stack([to_row(state, names) for state in states]) - to_row(before)
        change = (combine or self.combine)(mixed(changes, self.mixing) if self.mixing else changes, weights)
        return add_row(before, change)


def _median(values: Tensor) -> Tensor:
    """Return the coordinate-wise median; of an even number the mean of the two in the middle, of integers the lower."""
    return narrow(middle(widen(values)), values[0]) if has_mean(values) else values.median(dim=0).values


def middle(values: Tensor) -> Tensor:
    """Return the coordinate-wise median over the first dimension, the mean of the two middle values of an even number.

    Example:
        >>> middle(torch.tensor([[1.0], [5.0], [2.0], [90.0]]))
        tensor([3.5000])
    """
    ordered = values.sort(dim=0).values
    count = len(values)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def squared_distances(changes: Tensor) -> Tensor:
    """Return the squared Euclidean distances of every pair of rows, worked out from their differences.

    Example:
        >>> squared_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).tolist()
        [[0.0, 25.0], [25.0, 0.0]]
    """
    return torch.stack([(changes - row).square().sum(dim=1) for row in changes])


def mixed(changes: Tensor, bad: int) -> Tensor:
    """Return for every row the mean of the `m - bad` rows that are nearest to it, itself among them.

    Example:
        >>> mixed(torch.tensor([[0.0], [1.0], [9.0]]), bad=1).flatten().tolist()
        [0.5, 0.5, 5.0]
    """
    nearest = squared_distances(changes).argsort(dim=1, stable=True)[:, : len(changes) - bad]
    return changes[nearest].mean(dim=1)


def clipped(changes: Tensor, limit: Tensor | float) -> Tensor:
    """Return the rows, none longer than `limit`.

    Example:
        >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    norms = changes.norm(dim=1, keepdim=True)
    return changes * torch.where(norms > limit, limit / norms, torch.ones_like(norms))


def capped(weights: Tensor, most: float) -> Tensor:
    """Return weights that sum to 1, none above `most`: what is cut off goes to the others by their weights.

    Example:
        >>> capped(torch.tensor([0.8, 0.1, 0.1]), 0.5)
        tensor([0.5000, 0.2500, 0.2500])
    """
    most = max(most, 1.0 / len(weights))
    fixed = torch.zeros_like(weights, dtype=torch.bool)
    result = weights.clone()
    while bool((result > most * (1 + 1e-12)).any()):
        fixed |= result > most * (1 + 1e-12)
        free = weights * ~fixed
        rest = 1.0 - most * float(fixed.sum())
        result = torch.where(fixed, torch.full_like(weights, most), free * (rest / free.sum().clamp(min=1e-300)))
    return result
