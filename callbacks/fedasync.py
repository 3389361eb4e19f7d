"""FedAsync."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from fedlightning.algorithm import Arrivals, AsynchronousMethod, Facts, GradientContext, Server, Update, requires
from fedlightning.ranges import PositiveInt, Range, Share, needs

StalenessName = Literal["constant", "polynomial", "hinge"]
DecayRate = Annotated[float, Range("[0, inf)", "An older update must not count more.")]
MaxStaleness = Annotated[int, Range("[0, inf)", "None is not a limit.", strict=True)]


def staleness_weight(kind: StalenessName, staleness: float, a: float, b: float) -> float:
    """Return the factor ``s(d)`` of an update that is ``d`` steps of the server old.

    * ``"constant"``: 1
    * ``"polynomial"``: ``(d + 1)^-a``
    * ``"hinge"``: 1 up to ``d = b``, then ``1 / (a (d - b) + 1)``

    Example:
        >>> from fedlightning.callbacks.fedasync import staleness_weight
        >>> staleness_weight("polynomial", 3, a=0.5, b=4), staleness_weight("hinge", 5, a=10, b=4)
        (0.5, 0.09090909090909091)
    """
    if kind == "polynomial":
        return float((staleness + 1.0) ** -a)
    if kind == "hinge" and staleness > b:
        return 1.0 / (a * (staleness - b) + 1.0)
    return 1.0


class FedAsync(AsynchronousMethod):
    """Asynchronous federated optimisation: every model that arrives is mixed into the server's at once.

    Xie, Koyejo, Gupta, "Asynchronous federated optimization", OPT workshop 2020.

    * Client: minimise ``F_i(x) + (rho/2) ||x - x_tau||^2`` from the server's model ``x_tau`` of version ``tau``.
    * Server, on every arrival: ``x_t = (1 - alpha_t) x_{t-1} + alpha_t x_new`` with ``alpha_t = alpha s(d)``; ``d`` is the
      number of versions that the server has made since ``tau``. Samples have no weight. Running statistics are mixed alike.
    * Down: ``x_tau``. Up: ``x_new``. State: none.
    * Deployed: the global model ``x``.

    ``s(d)`` is constant, polynomial ``(d + 1)^-a``, or a hinge: 1 up to ``d = b``, then ``1 / (a (d - b) + 1)``. It needs an
    asynchronous loop (`trainer.loop`), in which every arrival is a round.

    Args:
        alpha: Share ``alpha`` of a fresh model. Default 0.6 (paper, beside 0.9); 0 freezes the server's model.
        staleness: ``"constant"``, ``"polynomial"`` (default) or ``"hinge"``.
        a: How fast ``s`` falls. Default: 0.5 for polynomial, 10 for hinge (paper).
        b: Staleness up to which the hinge is 1. Default 4 (paper).
        rho: Strength of the proximal term. Default 0; the paper takes 0.005 to 0.01.
        max_staleness: Older updates are dropped and make no round. Default: none is.
        paper_index: Count staleness as the paper writes it, where a fresh update has ``d = 1``. Default: 0.
        decay: Factor on ``alpha`` from round `decay_at` on. Default 0.5 (paper).
        decay_at: Round from which ``alpha`` is lower; the paper takes 800. Default: never.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> from fedlightning.algorithm import Update
        >>> from fedlightning.callbacks import FedAsync
        >>> server = SimpleNamespace(round=3)
        >>> [FedAsync(alpha=0.8).weighting(server, Update(0, "a", staleness=d)) for d in (0, 3)]
        [0.8, 0.4]
    """

    @needs("b", "staleness", value="hinge", why="only the hinge has a bend. Leave it out, or set staleness='hinge'.")
    @needs("decay", "decay_at", why="alpha is lower from no round on. Leave it out, or set decay_at.")
    def __init__(
        self,
        alpha: Share = 0.6,
        staleness: StalenessName = "polynomial",
        a: DecayRate | None = None,
        b: DecayRate = 4.0,
        rho: Annotated[float, Range("[0, inf)", "0 is not a proximal term.")] = 0.0,
        max_staleness: MaxStaleness | None = None,
        paper_index: bool = False,
        decay: Share = 0.5,
        decay_at: PositiveInt | None = None,
    ) -> None:
        self.alpha = alpha
        self.staleness = staleness
        self.a = (10.0 if staleness == "hinge" else 0.5) if a is None else a
        self.b = b
        self.rho = rho
        self.max_staleness = max_staleness
        self.paper_index = paper_index
        self.decay = decay
        self.decay_at = decay_at

    @property
    def facts(self) -> Facts:
        """Models travel."""
        return super().facts.extend(requires=[requires.Travels("mixes models that arrive")])

    @property
    def arrivals(self) -> Arrivals:  # type: ignore[override]
        """Make a round of every arrival, and take the model that came."""
        return Arrivals(count=1, models=True, max_staleness=self.max_staleness)

    def weighting(self, server: Server, update: Update) -> float:
        """Return ``alpha_t``."""
        late = update.staleness + (1 if self.paper_index else 0)
        decayed = self.decay if self.decay_at is not None and server.round + 1 >= self.decay_at else 1.0
        return self.alpha * decayed * staleness_weight(self.staleness, late, self.a, self.b)

    def denominator(self, server: Server) -> float:
        """Return 1: the update's weight is its share in the mixture."""
        return 1.0

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return ``g + rho (x - x_tau)``."""
        if name not in ctx.anchor or self.rho == 0.0:
            return gradient
        return gradient + self.rho * (parameter - ctx.anchor[name])
