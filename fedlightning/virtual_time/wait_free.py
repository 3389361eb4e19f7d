"""Clients without a server, each at its own pace, on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fedlightning.client.requests import Evaluate
from fedlightning.contract import Decentralised
from fedlightning.contract.messages import JobTrace, Message, Outcome, Update
from fedlightning.engines.contract import Engine
from fedlightning.errors import ConfigurationError
from fedlightning.ranges import Range, at_most_one
from fedlightning.server.loop import Loop, keep_last_scores
from fedlightning.server.round_clock import NO_CLOCK, RoundClock
from fedlightning.server.server import Server
from fedlightning.server.update_collector import UpdateCollector
from fedlightning.tensors import State
from fedlightning.virtual_time.clock import VirtualClock, unreachable
from fedlightning.virtual_time.in_flight import SampleForecast

Step = tuple[int, float, float]
"""A step that a client is taking: how many it has taken before, when it began, when it ends."""


class WaitFree(Loop):
    """Every client takes step after step at its own pace, sends its model to its neighbours and waits for nobody.

    A step begins with the client's model leaving for its neighbours, by which it is not held up; they have it when the
    sender's link has sent all copies of it, and the receiver's has taken in one. The step ends when the client has
    computed, and takes with it the latest model that has come from each neighbour. Then the next step begins, at once or as
    soon as the client is available. Steps that end at one time are all taken in before anybody begins the next.

    It is for algorithms with neighbours and no server (`SWIFT`). In every visit a client takes the trainer's `local_steps`,
    which for SWIFT is one. The number of its steps addresses a visit's randomness, so that a client draws the same batches
    whatever the others do.

    In the timeline a job is a step, its version the number of steps that the client has taken before, and its staleness
    the number of its steps since the oldest of its neighbours' models came.

    A round is over when the clients have taken `steps` steps each on average, or after `period` virtual seconds. Everything
    that is counted in rounds (`max_rounds`, `evaluation.every`) counts these. Scores and logs of stage L2 are those of a
    client's last step in a round.

    Args:
        clock: Speeds, links and availability. Default: 0.01 seconds for each sample, bytes take no time.
        steps: Steps that make a round, for each client on average. Default: 1.
        period: Virtual seconds that make a round, instead of steps.

    Raises:
        ConfigurationError: If a number is out of range, or both are given.

    Example:
        >>> from fedlightning.virtual_time import SampleSpeed, VirtualClock
        >>> WaitFree(VirtualClock(SampleSpeed(0.01, slowdown={"3": 10})), steps=5).steps
        5
    """

    clock: VirtualClock

    @at_most_one("steps", "period", why="a round is a number of steps or a time. Leave out one.")
    def __init__(
        self,
        clock: VirtualClock | None = None,
        steps: Annotated[int, Range("[1, inf)", strict=True)] | None = None,
        period: Annotated[float, Range("(0, inf)", "The virtual seconds of a round.")] | None = None,
    ) -> None:
        self.clock = VirtualClock() if clock is None else clock
        self.steps = 1 if steps is None and period is None else steps
        self.period = period
        self._steps: dict[str, Step] = {}
        # by receiver and sender: of which step the latest model is, and in which of the receiver's it came
        self._had: dict[str, dict[str, tuple[int, int]]] = {}
        self._in_flight: list[tuple[float, str, str, int]] = []  # on their way: arrival, receiver, sender, step
        self._models: dict[str, dict[int, State]] = {}  # by sender and step, models that somebody has or will have

    # -- before round 1 --------------------------------------------------------------------------------------------
    def check(self, server: Server) -> None:
        """Refuse federations with a server."""
        if server.callbacks.role("neighbours") is None:
            raise ConfigurationError(
                "The loop WaitFree is for clients that talk to their neighbours, and no callback says who these are. Add "
                "SWIFT, or leave out trainer.loop."
            )
        if not server.participation.is_everybody:
            raise ConfigurationError(
                f"participation={server.participation.share} has no meaning in the loop WaitFree, where every client takes "
                "steps whenever it is available. Leave it out; the clock says when clients are there."
            )
        self.clock.check(server.clients)

    def absent(self) -> str:
        """Return the loop's name: a slow client may have no step in a round."""
        return "the loop WaitFree"

    def visits(self, server: Server) -> int:
        """Return how many steps make a round, about."""
        return len(server.clients) * (self.steps or 1)

    # -- a round ---------------------------------------------------------------------------------------------------
    def round(
        self, server: Server, engine: Engine, evaluate: Evaluate, report: Callable[[Update], None] = lambda update: None
    ) -> list[Update]:
        """Let time pass until the round is over: see :meth:`Loop.round`.

        Raises:
            ClientFailedError: If a client failed and that is to end the run.
            FederationError: If nobody can be reached any more, or every visit fails.
            TooFewClientsError: If fewer clients than needed contributed.
        """
        server.callbacks.event("on_round_start", server)
        owner = server.callbacks.answering(Decentralised, "neighbours")
        assert owner is not None
        planned = SampleForecast(engine)
        for client in server.clients:  # in round 1 all, later those that have joined
            if client not in self._steps and server.num_samples[client]:
                self._begin(server, owner, client, 0, planned)
        collector = UpdateCollector(server, engine.attempts.policy, report)
        done = collector.done
        self.trips = trips = []
        end = math.inf if self.period is None else (server.round + 1) * self.period
        while self.steps is None or len(done) < self.steps * len(self._steps):
            now = min((step[2] for step in self._steps.values()), default=math.inf)
            if math.isinf(now) and math.isinf(end):
                raise unreachable(server, f", with {len(done)} steps taken")
            if now > end:
                break
            server.costs.virtual_time = now
            ending = [client for client in server.clients if client in self._steps and self._steps[client][2] == now]
            self._end(server, engine, evaluate, owner, ending, collector)
            trips += self._trips(server, owner, done[len(done) - len(ending) :])
            for client in ending:
                self._begin(server, owner, client, self._steps[client][0] + 1, planned)
            self._forget_models()
        if self.period is not None:
            server.costs.virtual_time = end
        if done:  # a period may be over before anybody's step is
            collector.refuse_if_all_failed()
            collector.refuse_if_too_few()
        return keep_last_scores(done)

    def _begin(self, server: Server, owner: Decentralised, client: str, taken: int, planned: SampleForecast) -> None:
        """Let a client begin its next step, now or when it is available: its model leaves then."""
        message = server.message(server.job(client))
        begins = self.clock.next_available(client, server.costs.virtual_time)
        ends = begins + self.clock.compute(client, taken, planned(client, None))
        if ends <= begins < math.inf:
            raise ConfigurationError(
                f"{type(self.clock.speed).__name__} lets client '{client}' take a step in no time, and it would never wait. "
                "Give it a time above 0."
            )
        self._steps[client] = (taken, begins, ends)
        self._models.setdefault(client, {})[taken] = message.state
        if math.isinf(begins):
            return
        others = owner.neighbours(server, client)
        sent_at = begins + self.clock.upload(client, taken, message.size * len(others))
        for other in others:
            arrives = sent_at + self.clock.download(other, taken, message.size)
            if taken == 0:
                arrives = server.costs.virtual_time  # all know the model that they begin with
            self._in_flight.append((arrives, other, client, taken))

    def _deliver(self, now: float) -> None:
        """Hand over the models that have come. One that was overtaken by a later one is of no use."""
        for _, receiver, sender, step in (sent for sent in self._in_flight if sent[0] <= now):
            had = self._had.setdefault(receiver, {})
            if step > had.get(sender, (-1, 0))[0]:
                had[sender] = step, self._steps[receiver][0] if receiver in self._steps else 0
        self._in_flight = [sent for sent in self._in_flight if sent[0] > now]

    def _forget_models(self) -> None:
        """Drop models that nobody has and nobody will have."""
        kept = {(sender, step) for had in self._had.values() for sender, (step, _) in had.items()}
        kept |= {(sender, step) for _, _, sender, step in self._in_flight}
        self._models = {
            sender: {step: state for step, state in models.items() if (sender, step) in kept}
            for sender, models in self._models.items()
        }

    def _end(
        self,
        server: Server,
        engine: Engine,
        evaluate: Evaluate,
        owner: Decentralised,
        clients: list[str],
        collector: UpdateCollector,
    ) -> None:
        """Carry out the steps that end now, and let each client combine them with what it has heard."""
        self._deliver(server.costs.virtual_time)
        heard = {client: self._had.get(client, {}) for client in clients}
        server.clock = RoundClock()
        server.clock.neighbour_models = {
            client: {
                other: (theirs[other][0], self._models[other][theirs[other][0]])
                for other in owner.neighbours(server, client)
                if other in theirs
            }
            for client, theirs in heard.items()
        }
        messages: list[Message] = []
        for client in clients:
            message = server.message(server.job(client))
            message.visit = self._steps[client][0]
            server.costs.bytes_down += message.num_bytes
            messages.append(message)
        answers = engine.run(messages, evaluate)
        for message, update in zip(messages, answers, strict=True):
            collector.count(update)
            if update.error is None:
                collector.fold(update, message.state, trained=bool(update.state))
            collector.close(update)
        collector.step()
        server.clock = NO_CLOCK

    def _trips(self, server: Server, owner: Decentralised, updates: list[Update]) -> list[JobTrace]:
        """Return the steps that have ended, for the timeline; staleness is in how many of them the oldest model was there."""
        trips = []
        for update in updates:
            taken, began, ended = self._steps[update.client]
            had = self._had.get(update.client, {})
            others = [other for other in owner.neighbours(server, update.client) if other in had]
            old = max((taken - had[other][1] for other in others), default=0)
            outcome: Outcome = "taken" if update.error is None else "failed"
            trips.append(JobTrace(server.round + 1, update.client, began, ended, ended, taken, old, outcome))
        return trips

    # -- what is saved ---------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Return who is taking which step, and the models that clients have of their neighbours or that are on their way."""
        return {
            "steps": {client: list(step) for client, step in self._steps.items()},
            "had": {
                receiver: {sender: list(which) for sender, which in had.items()} for receiver, had in self._had.items()
            },
            "sent": [list(sent) for sent in self._in_flight],
            "models": {
                sender: {str(step): dict(state) for step, state in models.items()}
                for sender, models in self._models.items()
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned.

        Raises:
            ValueError: If it is the state of another loop.
        """
        if set(state) != {"steps", "had", "sent", "models"}:
            super().load(state or {"nothing": "no steps"})
        self._steps = {client: (int(step[0]), step[1], step[2]) for client, step in state["steps"].items()}
        self._had = {
            receiver: {sender: (int(step), int(came)) for sender, (step, came) in had.items()}
            for receiver, had in state["had"].items()
        }
        self._in_flight = [(arrival, receiver, sender, step) for arrival, receiver, sender, step in state["sent"]]
        self._models = {
            sender: {int(step): dict(model) for step, model in models.items()}
            for sender, models in state["models"].items()
        }
