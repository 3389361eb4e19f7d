"""Robust aggregation: rules under which a few bad clients cannot move the server's model wherever they want."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedlightning.callbacks.shared.robust_rules import Bad, RobustRule, capped, clipped, middle, squared_distances
from fedlightning.ranges import PositiveShare, Range, needs

Radius = Annotated[float, Range("(0, inf)")] | Literal["median"]


class NormClippedMean(RobustRule):
    """Mean of changes, each at most as long as a limit: the rule that keeps weights.

    Sun, Kairouz, Suresh, McMahan, "Can you really backdoor federated learning?", 2019 (arXiv:1911.07963):
    ``w <- w + sum_i a_i u_i min(1, M / ||u_i||)``, so one client moves the model by ``a_i M`` at most. Weights are those of
    the method (samples by default), none above `max_share`. It bears any number of bad clients in that sense: they move the
    model by their weights times ``M`` in a round, towards where they want.

    Args:
        max_norm: ``M``. ``"median"`` (default): the median norm of the round, right while fewer than half are bad.
        max_share: Largest share of one client in the mean, in (0, 1]. Default 0.5.
        mixing: As in :class:`~fedlightning.callbacks.shared.robust_rules.RobustRule`: nearest-neighbour mixing first.

    Example:
        >>> rule = NormClippedMean(max_norm=1.0)
        >>> rule.combine(torch.tensor([[0.0, 1.0], [0.0, 1000.0]]), torch.tensor([0.5, 0.5]))
        tensor([0., 1.])
    """

    def __init__(self, max_norm: Radius = "median", max_share: PositiveShare = 0.5, mixing: Bad = 0) -> None:
        super().__init__(mixing)
        self.max_norm = max_norm
        self.max_share = max_share

    def least(self) -> int:
        """Return 3 for the median norm: that of two clients is half of a bad one's."""
        return 3 if isinstance(self.max_norm, str) else 1

    def combine(self, changes: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean of the clipped changes."""
        limit = middle(changes.norm(dim=1)) if isinstance(self.max_norm, str) else self.max_norm
        return capped(weights, self.max_share) @ clipped(changes, limit)


class CoordinateMedian(RobustRule):
    """Median of each coordinate. Weights are not used. It bears fewer than half of the clients.

    Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning", ICML 2018 (arXiv:1803.01498).

    Args:
        mixing: As in :class:`~fedlightning.callbacks.shared.robust_rules.RobustRule`: nearest-neighbour mixing first.

    Example:
        >>> CoordinateMedian().combine(torch.tensor([[1.0], [2.0], [1e6]]), torch.ones(3))
        tensor([2.])
    """

    def least(self) -> int:
        """Return 3: of two clients the median is the mean."""
        return 3

    def combine(self, changes: Tensor, weights: Tensor) -> Tensor:
        """Return the coordinate-wise median."""
        return middle(changes)


class TrimmedMean(RobustRule):
    """Mean of each coordinate without its smallest and largest values. Weights are not used.

    Yin, Chen, Ramchandran, Bartlett, ICML 2018 (arXiv:1803.01498): of ``m`` values the ``floor(trim m)`` smallest and as
    many of the largest are left out. It bears that many bad clients.

    Args:
        trim: Share of the values that is left out at each end, in [0, 0.5). 0 is the uniform mean.
        mixing: As in :class:`~fedlightning.callbacks.shared.robust_rules.RobustRule`: nearest-neighbour mixing first.

    Example:
        >>> TrimmedMean(trim=0.25).combine(torch.tensor([[1.0], [2.0], [3.0], [1e6]]), torch.ones(4))
        tensor([2.5000])
    """

    def __init__(self, trim: Annotated[float, Range("[0, 0.5)")] = 0.2, mixing: Bad = 0) -> None:
        super().__init__(mixing)
        self.trim = trim

    def least(self) -> int:
        """Return how many clients there must be for one value to be left out at each end."""
        return 1 if self.trim == 0 else max(3, math.ceil((1 - 1e-9) / self.trim))

    def combine(self, changes: Tensor, weights: Tensor) -> Tensor:
        """Return the coordinate-wise trimmed mean."""
        count = min(int(self.trim * len(changes) + 1e-9), (len(changes) - 1) // 2)
        return changes.sort(dim=0).values[count : len(changes) - count].mean(dim=0)


class Krum(RobustRule):
    """The change, or the mean of some changes, with the smallest distances to its nearest neighbours. Weights are not used.

    Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries", NeurIPS 2017 (arXiv:1703.02757): the score
    of a change is the sum of its squared distances to its ``m - f - 2`` nearest others. Krum is the change with the lowest
    score, Multi-Krum the mean of the `chosen` lowest. It needs ``m >= 2 f + 3``.

    Args:
        bad: ``f``, the number of bad clients that it is to bear.
        chosen: Number of changes whose mean is taken. Default 1.
        mixing: As in :class:`~fedlightning.callbacks.shared.robust_rules.RobustRule`: nearest-neighbour mixing first.

    Example:
        >>> Krum(bad=1).combine(torch.tensor([[1.0], [1.1], [1.2], [0.9], [1e6]]), torch.ones(5))
        tensor([1.])
    """

    def __init__(self, bad: Bad = 1, chosen: Annotated[int, Range("[1, inf)")] = 1, mixing: Bad = 0) -> None:
        super().__init__(mixing)
        self.bad = bad
        self.chosen = chosen

    def least(self) -> int:
        """Return 2 f + 3, or as many as leave the bad ones out of the choice."""
        return max(2 * self.bad + 3, self.chosen + self.bad)

    def combine(self, changes: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of the changes with the lowest scores; of equal scores the first."""
        near = squared_distances(changes).sort(dim=1).values[:, 1 : len(changes) - self.bad - 1]
        order = near.sum(dim=1).argsort(stable=True)
        return changes[order[: self.chosen]].mean(dim=0)


class GeometricMedian(RobustRule):
    """The point whose distances to all changes have the smallest sum (RFA). It bears fewer than half of the weights.

    Pillutla, Kakade, Harchaoui, "Robust aggregation for federated learning", IEEE TSP 2022 (arXiv:1912.13445): smoothed
    Weiszfeld iterations ``b_i = a_i / max(nu, ||v - u_i||)``, ``v = sum b_i u_i / sum b_i``, from the coordinate-wise median
    on.

    Args:
        weighted: Use the method's weights (samples by default), none above `max_share`. Default: all count alike.
        max_share: Largest share of one client, below a half: such a client alone would decide. Default 0.4.
        nu: Smoothing. Default 1e-6 (the paper).
        iterations: Most iterations; they end where the point moves no more. Default 1000.
        mixing: As in :class:`~fedlightning.callbacks.shared.robust_rules.RobustRule`: nearest-neighbour mixing first.

    Example:
        >>> GeometricMedian().combine(torch.tensor([[0.0], [1.0], [1e6]]), torch.ones(3)).round(decimals=4)
        tensor([1.])
    """

    @needs("max_share", "weighted", why="all count alike. Leave it out, or use weighted=True.")
    def __init__(
        self,
        weighted: bool = False,
        max_share: Annotated[float, Range("(0, 0.5)")] = 0.4,
        nu: Annotated[float, Range("(0, inf)")] = 1e-6,
        iterations: Annotated[int, Range("[1, inf)")] = 1000,
        mixing: Bad = 0,
    ) -> None:
        super().__init__(mixing)
        self.weighted = weighted
        self.max_share = max_share
        self.nu = nu
        self.iterations = iterations

    def least(self) -> int:
        """Return 3: of two clients either is as good."""
        return 3

    def combine(self, changes: Tensor, weights: Tensor) -> Tensor:
        """Return the smoothed geometric median."""
        shares = capped(weights, self.max_share) if self.weighted else torch.full_like(weights, 1 / len(weights))
        point = middle(changes)
        for _ in range(self.iterations):
            pull = shares / (changes - point).norm(dim=1).clamp(min=self.nu)
            moved = pull @ changes / pull.sum()
            step = float((moved - point).norm())
            point = moved
            if step <= 1e-12 * max(1.0, float(point.norm())):
                break
        return point


class CenteredClipping(RobustRule):
    """Mean of changes that are clipped around a centre, which moves to that mean. Weights are not used.

    Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021 (arXiv:2012.10333):
    ``v <- v + 1/m sum_i (u_i - v) min(1, tau / ||u_i - v||)``, a few times. The centre begins at the server's model.

    Args:
        radius: ``tau``. ``"median"`` (default): the median distance from the centre, right while fewer than half are bad.
        iterations: Times that the centre moves. Default 3.
        mixing: As in :class:`~fedlightning.callbacks.shared.robust_rules.RobustRule`: nearest-neighbour mixing first.

    Example:
        >>> CenteredClipping(radius=1.0, iterations=1).combine(torch.tensor([[0.5], [1.0], [1e6]]), torch.ones(3))
        tensor([0.8333])
    """

    def __init__(
        self, radius: Radius = "median", iterations: Annotated[int, Range("[1, inf)")] = 3, mixing: Bad = 0
    ) -> None:
        super().__init__(mixing)
        self.radius = radius
        self.iterations = iterations

    def least(self) -> int:
        """Return 3: the median distance of two clients is half of a bad one's."""
        return 3 if isinstance(self.radius, str) else 1

    def combine(self, changes: Tensor, weights: Tensor) -> Tensor:
        """Return the centre after its last move."""
        centre = torch.zeros_like(changes[0])
        for _ in range(self.iterations):
            apart = changes - centre
            limit = middle(apart.norm(dim=1)) if isinstance(self.radius, str) else self.radius
            centre = centre + clipped(apart, limit).mean(dim=0)
        return centre
