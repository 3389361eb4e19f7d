"""The end of a federation: where scores no longer improve, or a budget is spent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from fedlightning.algorithm import (
    Change,
    Facts,
    FederatedCallback,
    ModelSelection,
    Newcomers,
    Server,
    Setup,
    requires,
    warn,
)
from fedlightning.callbacks.model_selection import ValidationScores, monitor_of
from fedlightning.ranges import NonNegativeFloat, Range, at_least_one, make_init, needs

Values = Mapping[str, float]
"""A metric's value by client."""


@needs("min_samples", "criterion", value="worst client", why="no other leaves clients out. Set it, or leave this out.")
@make_init
class FederatedEarlyStopping(ModelSelection):
    """End the federation when the clients' validation scores have not improved for `patience` evaluations.

    Scores are compared client by client with those of the best evaluation so far, over the clients that have both: one
    that could not be scored, or whose metric is undefined, changes no mean. An infinite or NaN loss is not an improvement.
    One more round follows, so that it is known to be the last: methods that treat their last round in another way, test
    scores of stage L2 and jobs in flight are as in any run. Terminal, `summary.json` and report say why it ended. What is
    exported is what checkpoint callbacks have kept (`LocalCheckpoint`, `GlobalCheckpoint`):
    without one in the list it is the models of the last round, some evaluations after the best.

    Args:
        monitor: Metric that the module logs in validation. Default ``"val_loss"``, or the only loss that it logs.
        stage: Whose scores: ``"L1"`` (default) the models that clients hold after aggregation; ``"G"`` the server's;
            ``"L2"`` the models after local training, where all clients take part in every round.
        mode: ``"min"`` (default) or ``"max"``.
        patience: Evaluations without an improvement after which it ends. Default 10.
        min_delta: What counts as an improvement: a change of more than this. Default 0.
        criterion: What must improve. ``"mean"`` (default): the uniform mean over clients. ``"worst client"``: the worst
            client's score. ``"share improved"``: more than half of the clients.
        min_samples: Validation samples below which a client is left out of ``criterion="worst client"``: the worst of many
            scores on a handful of samples is noise. Default 20.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> from fedlightning.callbacks import FederatedEarlyStopping
        >>> FederatedEarlyStopping(patience=3).better({"a": 0.5, "b": 0.4}, than={"a": 0.7, "b": 0.3})
        True
    """

    monitor: str = "val_loss"
    stage: Literal["G", "L1", "L2"] = "L1"
    mode: Literal["min", "max"] = "min"
    patience: Annotated[int, Range("[1, inf)", "It counts evaluations.")] = 10
    min_delta: NonNegativeFloat = 0.0
    criterion: Literal["mean", "worst client", "share improved"] = "mean"
    min_samples: Annotated[int, Range("[1, inf)", "It counts validation samples.")] = 20

    @property
    def facts(self) -> Facts:
        """It reads scores that are there after any round; clients that join are compared once they have two."""
        all_train = requires.EveryClient("compares the scores of the clients that trained", "Use stage='L1'.")
        required = [ValidationScores(), *([all_train] if self.stage == "L2" else [])]
        return super().facts.extend(requires=required, asynchronous=True, newcomers=Newcomers(join=True))

    def check(self, setup: Setup) -> None:
        """Warn where nothing keeps the best models."""
        kept = {Change.LOCAL_SELECTION, Change.GLOBAL_SELECTION}
        if not any(kept & set(other.facts.changes) for other in setup.callbacks):
            setup.warn(
                "FederatedEarlyStopping ends the run some rounds after the best one, and nothing keeps the best models. Add "
                "LocalCheckpoint() or GlobalCheckpoint() to the callbacks."
            )

    def on_round_end(self, server: Server) -> None:
        """Compare this round's scores with the best so far, and end the run if there was nothing better for too long.

        Raises:
            ValueError: If validation does not give the monitored metric.
        """
        scores = self._values(server)
        if not scores:
            return
        kept = server.state.get(self.key, {})
        best: Values = kept.get("values", {})
        broken = not any(map(math.isfinite, best.values()))  # nothing to compare with: whatever is finite is better
        if not best or (broken and any(map(math.isfinite, scores.values()))) or self.better(scores, best):
            server.state[self.key] = {"values": scores, "round": server.round + 1, "waited": 0}
            return
        waited = kept["waited"] + 1
        server.state[self.key] = kept | {"waited": waited}
        if waited >= self.patience:
            what = {
                "mean": "the clients' mean",
                "worst client": "the worst client's",
                "share improved": "most clients'",
            }
            server.stop(
                self,
                f"{what[self.criterion]} {self._monitored(server)} ({self.stage}) has not improved in {waited} "
                f"evaluation{'s' if waited > 1 else ''}; the best was in round {kept['round']}",
                after=1,
            )

    def better(self, scores: Values, than: Values) -> bool:
        """Return whether scores are better than others, over the clients that have both.

        Args:
            scores: Values by client.
            than: Values by client, of the best evaluation so far.
        """
        sign = -1.0 if self.mode == "min" else 1.0
        now = {client: sign * scores[client] for client in scores if client in than and math.isfinite(than[client])}
        now = {client: value for client, value in now.items() if not (self.mode == "max" and math.isnan(value))}
        before = {client: sign * than[client] for client in now}
        if not now or not all(map(math.isfinite, now.values())):
            return False
        if self.criterion == "share improved":
            return 2 * sum(now[client] > before[client] + self.min_delta for client in now) > len(now)
        worth = min if self.criterion == "worst client" else _mean
        return worth(now.values()) > worth(before.values()) + self.min_delta

    def _monitored(self, server: Server) -> str:
        """Return the metric of the scores of this round that is compared."""
        scored = (self.stage, "local", "val")
        stages = sorted({stage for _, stage, _, split, _ in server.scores if split == "val"})
        if stages and self.stage not in stages and self.key not in server.state:
            raise ValueError(
                f"FederatedEarlyStopping goes by scores of stage {self.stage}, and this run has those of "
                f"{', '.join(stages)}. Set stage=... to one that is scored, or add it to evaluation.stages."
            )
        metrics = {metric for _, *place, metric in server.scores if tuple(place) == scored}
        return monitor_of(self, metrics) if metrics else self.monitor

    def _values(self, server: Server) -> dict[str, float]:
        """Return the monitored value of every client of this round; none in a round that is not evaluated."""
        scores = server.score(self._monitored(server), stage=self.stage)
        fewest = self.min_samples if self.criterion == "worst client" else 0
        values = {client: value for client, (value, size) in scores.items() if size >= fewest}
        if scores and not values:
            warn(
                f"FederatedEarlyStopping(criterion='worst client') will not end the run: none of {len(scores)} clients has "
                f"min_samples={self.min_samples} validation samples. Lower it, or use criterion='mean'."
            )
        return values


@at_least_one("max_megabytes", "max_seconds", "max_steps", why="it has no limit. Give it one of them.")
@make_init
class Budget(FederatedCallback):
    """End the federation before it has cost more than it may.

    After every round it asks whether one more, as dear as the dearest so far, would fit. The last round that fits is known
    beforehand, so it is scored and tested as any last round. The first round is always carried out; visits that a
    method makes after its last round come on top. Terminal, `summary.json` and report say what ended the run.

    Args:
        max_megabytes: Megabytes (10^6 bytes) that messages and updates may have in all, down and up.
        max_seconds: Virtual seconds of the loop's clock. For real time there is the trainer's `max_time`.
        max_steps: Optimizer steps of all clients together.

    Raises:
        ValueError: If a number is out of range, or none is given.

    Example:
        >>> from fedlightning.callbacks import Budget
        >>> Budget(max_megabytes=100)
        Budget(max_megabytes=100, max_seconds=None, max_steps=None)
    """

    rank = -100  # what others do at the end of a round may depend on whether it is the last one
    facts = Facts(
        requires=[requires.Clock("limits virtual seconds (max_seconds)", when="max_seconds")],
        mixes_architectures=True,
        asynchronous=True,
        newcomers=Newcomers(join=True),
    )

    max_megabytes: Annotated[float, Range("(0, inf)")] | None = None
    max_seconds: Annotated[float, Range("(0, inf)", "In virtual seconds.")] | None = None
    max_steps: Annotated[int, Range("[1, inf)")] | None = None

    def on_round_end(self, server: Server) -> None:
        """End the run after this round or the next, if a further one would not fit."""
        limits = {"megabytes": self.max_megabytes, "virtual seconds": self.max_seconds, "steps": self.max_steps}
        spent = {
            "megabytes": (server.costs.bytes_up + server.costs.bytes_down) / 1e6,
            "virtual seconds": server.costs.virtual_time,
            "steps": server.costs.steps,
        }
        before = server.state.get(self.key, {"spent": {}, "dearest": {}})
        cost = {what: value - before["spent"].get(what, 0) for what, value in spent.items()}
        dearest = {what: max(value, before["dearest"].get(what, 0)) for what, value in cost.items()}
        server.state[self.key] = {"spent": spent, "dearest": dearest}
        for what, limit in limits.items():
            rounds = math.inf if limit is None or not dearest[what] else (limit - spent[what]) // dearest[what]
            if limit is not None and rounds < 2:
                server.stop(self, f"a further round would not fit into its {limit:g} {what}", after=int(max(rounds, 0)))
                return


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
