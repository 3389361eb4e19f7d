"""FedBuff."""

from __future__ import annotations

from fedlightning.algorithm import Arrivals, AsynchronousMethod, Facts, Newcomers, Server, State, Update, requires
from fedlightning.callbacks.fedasync import DecayRate, MaxStaleness, StalenessName, staleness_weight
from fedlightning.ranges import PositiveFloat, PositiveInt, needs
from fedlightning.tensors import narrow, widen


class FedBuff(AsynchronousMethod):
    """Buffered asynchronous aggregation: the server makes a step whenever its buffer of changes is full.

    Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated learning with buffered asynchronous aggregation",
    AISTATS 2022.

    * Client: local training from ``w^tau`` to ``w_i``.
    * Server: adds ``s(d) (w_i - w^tau)`` to its buffer; with ``K`` changes in it,
      ``w <- w + eta_g / K  sum_i s(d_i) (w_i - w^tau_i)``, and the buffer is empty again. ``d`` is the number of steps that
      the server has made since ``w^tau``. Samples have no weight.
    * Down: ``w^tau``. Up: ``w_i``. State: the number of changes in the buffer, within a round.
    * Deployed: the global model ``w``.

    The sum is divided by ``K``, not by the sum of the ``s(d_i)``, so that a buffer of stale changes makes a short
    step (the paper; the authors' FLSim normalises ``s`` by the mean staleness and folds ``1/K`` into ``eta_g``).
    Running statistics are moved towards the clients' own by the same weights, without ``eta_g``. The server's step is
    a change like FedAvg's, so a server optimizer (`FedAdam`, `FedAvgM`) may stand beside it. It needs an asynchronous
    loop (`trainer.loop`).

    Args:
        buffer_size: Changes ``K`` that make a step, which is a round. Default 10 (paper).
        staleness: ``"polynomial"`` (default), ``"constant"`` or ``"hinge"``.
        a: How fast ``s`` falls. Default: 0.5 for polynomial, which is the paper's ``1 / sqrt(1 + d)``; 10 for hinge.
        b: Staleness up to which the hinge is 1.
        server_lr: ``eta_g``, on trainable parameters. Default 1.
        max_staleness: Older updates are dropped and fill no buffer. Default: none is.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> from fedlightning.algorithm import Update
        >>> from fedlightning.callbacks import FedBuff
        >>> [FedBuff(buffer_size=2).weighting(None, Update(0, "a", staleness=d)) for d in (0, 3)]
        [1.0, 0.5]
    """

    @needs("b", "staleness", value="hinge", why="only the hinge has a bend. Leave it out, or set staleness='hinge'.")
    def __init__(
        self,
        buffer_size: PositiveInt = 10,
        staleness: StalenessName = "polynomial",
        a: DecayRate | None = None,
        b: DecayRate = 4.0,
        server_lr: PositiveFloat = 1.0,
        max_staleness: MaxStaleness | None = None,
    ) -> None:
        self.buffer_size = buffer_size
        self.staleness = staleness
        self.a = (10.0 if staleness == "hinge" else 0.5) if a is None else a
        self.b = b
        self.server_lr = server_lr
        self.max_staleness = max_staleness

    @property
    def facts(self) -> Facts:
        """Between rounds the buffer is empty, so that clients may join."""
        travels = requires.Travels("buffers the clients' changes")
        return super().facts.extend(requires=[travels], newcomers=Newcomers(join=True))

    @property
    def arrivals(self) -> Arrivals:  # type: ignore[override]
        """Make a round of `buffer_size` arrivals."""
        return Arrivals(count=self.buffer_size, max_staleness=self.max_staleness)

    def weighting(self, server: Server, update: Update) -> float:
        """Return ``s(d)``."""
        return staleness_weight(self.staleness, update.staleness, self.a, self.b)

    def on_update(self, server: Server, update: Update) -> None:
        """Count the change: the last buffer of a run may hold more than ``K``."""
        server.state[self.key] = {"count": server.state.get(self.key, {}).get("count", 0) + 1}

    def denominator(self, server: Server) -> float:
        """Return the number of changes in the buffer."""
        return float(server.state[self.key]["count"])

    def on_reduced(self, server: Server, state: State) -> State:
        """Scale the change of trainable parameters by ``eta_g``, and empty the buffer."""
        server.state[self.key] = {"count": 0}
        if self.server_lr == 1.0:
            return state
        old, scaled = server.models[server.combining], dict(state)
        for name in set(server.trainable) & set(state):
            before = widen(old[name])
            scaled[name] = narrow(before + self.server_lr * (widen(state[name]) - before), state[name])
        return scaled
