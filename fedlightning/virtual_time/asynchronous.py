"""Asynchronous rounds on a virtual clock: nobody is waited for.

Which algorithms need synchronous rounds: :func:`refuse_synchronous` refuses them in asynchronous ones.

Asynchronous rounds without a clock: the staleness of each update is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch

from fedlightning.client.requests import Evaluate
from fedlightning.contract import Arrivals, AsynchronousMethod, FederatedCallback
from fedlightning.contract.messages import Outcome, Update
from fedlightning.engines.attempts import FederationError
from fedlightning.engines.contract import Engine
from fedlightning.errors import ConfigurationError
from fedlightning.ranges import Counts, PositiveShare, Range
from fedlightning.seeding import generator
from fedlightning.server.loop import Loop, apply_job_hooks, keep_last_scores, keep_local_record
from fedlightning.server.server import Server
from fedlightning.server.update_collector import UpdateCollector
from fedlightning.virtual_time.clock import VirtualClock, unreachable
from fedlightning.virtual_time.in_flight import PendingJob, PendingRecords, SampleForecast
from fedlightning.virtual_time.speed import FixedSpeed

AT_THE_SERVER = (
    "participants",
    "on_broadcast",
    "on_federation_start",
    "on_round_start",
    "on_round_end",
    "on_update",
    "reduce",
    "on_reduced",
    "denominator",
    "server_step",
    "model_of",
)
"""Methods by which an algorithm works at the server, where it may count on rounds in which everybody answers one model."""


def refuse_synchronous(callback: FederatedCallback) -> None:
    """Refuse an algorithm that needs synchronous rounds."""
    if callback.claims("plan_round"):
        raise ConfigurationError(
            f"{callback.key} plans its rounds, and an asynchronous loop has no rounds to plan: its plan would be ignored. "
            "Leave out trainer.loop, or take an algorithm that runs there (docs/explanation/time.md)."
        )
    facts = callback.facts
    if facts.asynchronous is None and facts.takes_part:
        work = [name for name in AT_THE_SERVER if callback.claims(name)]
        runs = not work
    else:
        work, runs = [], facts.asynchronous is not False
    if not runs:
        reason = f"works at the server ({', '.join(work)})" if work else "is defined for synchronous rounds"
        raise ConfigurationError(
            f"{callback.key} {reason}, and nothing says that it is right where updates arrive one by one and late. Leave out "
            "trainer.loop; or, if it is your own and right there, say so in its facts: Facts(asynchronous=True)."
        )


class Asynchronous(Loop):
    """Clients train at their own pace, and the server takes in what arrives: a round is a number of arrivals.

    A fixed number of clients is at work at any time. Each starts from the server's model as it is when its message leaves;
    when its update arrives, another client starts, drawn uniformly from those that are idle and available. Updates are taken
    in by the order of their arrivals; those of one time are all taken in before anybody starts. The staleness of an update is
    the number of steps that the server's model has made since its message left.

    After every `arrivals` updates the server makes a step: that is a round, and everything that is counted in rounds
    (``max_rounds``, ``evaluation.every``, ``lr_decay``) counts these. `FedAsync` makes a step for every arrival, `FedBuff`
    for every buffer. Without such a callback a round's updates are averaged as in FedAvg, each taken as the client's change
    since its message, ``w + (w_i - w_sent)``; running statistics are averaged as they are.

    The time is virtual (:class:`~fedlightning.virtual_time.VirtualClock`): a message takes the link's time for its bytes,
    computing the client's time for its planned samples (fits that an algorithm adds in phases of its own are not
    planned), an update the link's time for the bytes that it really has. Jobs in flight are part of the saved state,
    so a resumed run goes on as if it had not been interrupted. After the last round they are forgotten, or waited
    for. Scores of stage L2 come with the updates, those of a client that arrives more than once in a round with its
    last: a job that was carried out ahead of its arrival, in a round that was not evaluated, has none.

    Args:
        clock: Speeds, links and availability. Default: 0.01 seconds for each sample, bytes take no time.
        concurrency: Number (int) or share (float in (0, 1]) of the clients that are at work at a time.
        arrivals: Updates that make a round. Default: as the algorithm says (`FedBuff` its buffer, `FedAsync` 1), else 1.
        max_staleness: Updates of a larger staleness are dropped when they arrive, and count for nothing. Default: none is.
        at_end: What becomes of the jobs in flight when the last round is full. ``"drop"``: they are forgotten; ``"flush"``:
            the last round waits for them all, and takes them in, too: into its last buffer, or, where an algorithm mixes in
            models (`FedAsync`), one after another, each by a step of its own.

    Raises:
        ConfigurationError: If a number is out of range.

    Example:
        >>> from fedlightning.virtual_time import SampleSpeed, VirtualClock
        >>> Asynchronous(VirtualClock(SampleSpeed(0.01, slowdown={"3": 10})), concurrency=4, arrivals=2).concurrency
        4
    """

    holds_records = True

    def __init__(
        self,
        clock: VirtualClock | None = None,
        concurrency: Annotated[
            int, Range("[1, inf)", "It counts clients, or is a share.", strict=True), Counts("clients")
        ]
        | PositiveShare = 1.0,
        arrivals: Annotated[int, Range("[1, inf)", strict=True)] | None = None,
        max_staleness: Annotated[int, Range("[0, inf)", strict=True)] | None = None,
        at_end: Literal["drop", "flush"] = "drop",
    ) -> None:
        self.clock: VirtualClock = VirtualClock() if clock is None else clock
        self.concurrency = concurrency
        self.arrivals = arrivals
        self.max_staleness = max_staleness
        self.at_end = at_end
        self._in_flight: list[PendingJob] = []
        self._planned: SampleForecast | None = None
        self._departures = 0
        self._visits: dict[str, int] = {}

    # -- before round 1 --------------------------------------------------------------------------------------------
    def check(self, server: Server) -> None:
        """Refuse what cannot run without synchronous rounds, by name."""
        for callback in server.callbacks:
            refuse_synchronous(callback)
        self._rule(server)
        if not server.participation.is_everybody:
            raise ConfigurationError(
                f"participation={server.participation.share} has no meaning in an asynchronous loop, where "
                f"{self.concurrency!r} (concurrency) says how many clients are at work at a time. Leave it out."
            )
        self.clock.check(server.clients)

    def _rule(self, server: Server) -> Arrivals:
        """Return how updates are taken in: as an algorithm says, and the options here."""
        rules = {method.key: method.arrivals for method in server.callbacks if isinstance(method, AsynchronousMethod)}
        if len(rules) > 1:
            raise ConfigurationError(
                f"{' and '.join(rules)} both say how updates are taken in as they arrive. Remove one of them."
            )
        name, rule = next(iter(rules.items()), ("", Arrivals(count=self.arrivals or 1)))
        if self.arrivals is not None and self.arrivals != rule.count:
            raise ConfigurationError(
                f"Asynchronous got arrivals={self.arrivals}, and {name} makes a step of every {rule.count}. Leave arrivals "
                f"out, or set the same number on {name}."
            )
        limits = [limit for limit in (self.max_staleness, rule.max_staleness) if limit is not None]
        return replace(rule, max_staleness=min(limits, default=None))

    def _width(self, server: Server) -> int:
        if isinstance(self.concurrency, int):
            return self.concurrency
        return min(max(round(self.concurrency * len(server.clients)), 1), len(server.clients))

    def absent(self) -> str:
        """Return the loop's name: a round is of those who arrive."""
        return f"the loop {type(self).__name__}"

    @property
    def flushes(self) -> bool:
        """Whether the last round waits for the jobs in flight."""
        return self.at_end == "flush"

    def visits(self, server: Server) -> int:
        """Return how many updates make a round."""
        return self._rule(server).count

    # -- a round ---------------------------------------------------------------------------------------------------
    def round(
        self, server: Server, engine: Engine, evaluate: Evaluate, report: Callable[[Update], None] = lambda update: None
    ) -> list[Update]:
        """Take in updates as they arrive until there are enough for a step: see :meth:`Loop.round`.

        Raises:
            ClientFailedError: If a client failed and that is to end the run.
            FederationError: If nobody can be reached any more, or every visit fails.
            TooFewClientsError: If fewer clients than needed contributed.
        """
        server.callbacks.event("on_round_start", server)
        rule, width = self._rule(server), self._width(server)
        planned, collector = self._planned_by(engine), UpdateCollector(server, engine.attempts.policy, report)
        self.trips = trips = []
        taken = failed = steps = 0
        flush = self.at_end == "flush" and server.round + 1 == server.rounds
        while taken < rule.count or (flush and self._in_flight):
            start = partial(self._depart, server, planned, 0 if taken >= rule.count else width)
            wanted = rule.count - taken if taken < rule.count else len(self._in_flight)
            job = self._next(server, engine, evaluate, wanted, start)
            if job is None:
                raise unreachable(server, f", with nobody at work and {taken} of {rule.count} updates taken in")
            if rule.models and taken >= rule.count * (steps + 1):  # a share of each, not the sum of all shares at once
                collector.step()
                steps += 1
            before = engine.store.get(job.client)
            update = self._arrived(server, engine, evaluate, job, steps)
            collector.count(update)
            if update.error is not None:
                failed += 1
            elif rule.max_staleness is not None and update.staleness > rule.max_staleness:
                reason = f"its update is {update.staleness} steps old, more than max_staleness={rule.max_staleness}"
                if job.record is not None:
                    engine.store.put(job.client, keep_local_record(server, before, job.record))
                update = replace(update, error=f"client '{update.client}': {reason}", left_out=True)
            else:
                sent, kinds = job.message.state, server.architecture(update.model).kinds
                # the change of a running variance, taken at another one, may leave it below 0
                base = {name: value for name, value in sent.items() if kinds[name] in ("trainable", "frozen")}
                collector.fold(update, sent, None if rule.models else base, trained=bool(update.state))
                taken += 1
            outcome: Outcome = "stale" if update.left_out else "failed" if update.error is not None else "taken"
            trips.append(job.trip(server.round, update.staleness, outcome))
            collector.close(update)
            if not taken and failed >= max(rule.count, width, len(server.clients)):
                collector.refuse_if_all_failed()
                raise FederationError(f"Round {server.round + 1}: {failed} visits have failed; {update.error}.")
        collector.refuse_if_too_few()
        collector.step()
        return keep_last_scores(collector.done)

    def _arrived(self, server: Server, engine: Engine, evaluate: Evaluate, job: PendingJob, steps: int) -> Update:
        """Let a visit take effect. Scores from a round that was evaluated do not go into one that is not."""
        assert job.update is not None
        if job.record is not None:
            job.select_in(server.round, engine.store.get(job.client))
            engine.store.put(job.client, job.record)
        scores = [entry for entry in job.update.evaluations if entry[2] in evaluate.splits]
        gaps = [entry for entry in job.update.gaps if entry[2] in evaluate.splits]
        late = server.round + steps - job.message.round
        return replace(job.update, staleness=late, evaluations=scores, gaps=gaps)

    def _planned_by(self, engine: Engine) -> SampleForecast:
        """Return what knows of planned samples: one for the whole run, for to find out may take time."""
        if self._planned is None or self._planned.engine is not engine:
            self._planned = SampleForecast(engine)
        return self._planned

    # -- what comes next -------------------------------------------------------------------------------------------
    def _next(
        self, server: Server, engine: Engine, evaluate: Evaluate, wanted: int, start: Callable[[], float]
    ) -> PendingJob | None:
        """Go on to the next arrival, and take the job out. Before that, everybody starts who can."""
        first = self._earliest(server, engine, evaluate, wanted)
        while first is None or first.arrival > server.costs.virtual_time:
            waking = start()
            first = self._earliest(server, engine, evaluate, wanted)
            if first is not None and first.arrival <= waking:
                break
            if math.isinf(waking):
                return None
            server.costs.virtual_time = waking
        self._in_flight.remove(first)
        server.costs.virtual_time = first.arrival
        return first

    def _earliest(self, server: Server, engine: Engine, evaluate: Evaluate, wanted: int) -> PendingJob | None:
        """Return the job that arrives next, carried out. What its own bytes take may let another one pass."""
        while self._in_flight:
            ahead = sorted(self._in_flight, key=lambda job: job.order)
            if ahead[0].update is not None:
                return ahead[0]
            waiting = [job for job in ahead[: max(wanted, 1)] if job.update is None]
            self._carry_out(server, engine, evaluate, waiting)
        return None

    def _carry_out(self, server: Server, engine: Engine, evaluate: Evaluate, flights: list[PendingJob]) -> None:
        """Carry out jobs together; what the clients keep is held back until the updates arrive."""
        store, records = engine.store, PendingRecords(engine.store)
        engine.store = records
        try:
            messages = (job.message for job in flights)
            answers = engine.run(messages, evaluate, server.round)
            for job, update in zip(flights, answers, strict=True):
                job.carried_out(self.clock, update, records.new(job.client))
        finally:
            engine.store = store

    def _depart(self, server: Server, planned: SampleForecast, width: int) -> float:
        """Start idle clients that are available until `width` are at work."""
        free = width - len(self._in_flight)
        if free <= 0:
            return math.inf
        busy = {job.client for job in self._in_flight}
        idle = [client for client in server.clients if client not in busy and server.num_samples[client]]
        draws = generator(server.seed_of("participation"), "departures", self._departures, server.costs.virtual_time)
        chosen: dict[str, Any] = {}
        for place in torch.randperm(len(idle), generator=draws).tolist():
            if len(chosen) == free:
                break
            if self.clock.available(idle[place], server.costs.virtual_time):
                job = apply_job_hooks(server, server.job(idle[place]))
                if job is not None and job.work != 0:
                    chosen[idle[place]] = job
        for client in (client for client in idle if client in chosen):
            self._in_flight.append(self._sent_off(server, chosen[client], planned))
        if len(chosen) == free:
            return math.inf
        later = (
            self.clock.next_available(client, server.costs.virtual_time) for client in idle if client not in chosen
        )
        return min((time for time in later if time > server.costs.virtual_time), default=math.inf)

    def _sent_off(self, server: Server, job: Any, planned: SampleForecast) -> PendingJob:
        message = server.message(job)
        client, clock = job.client, self.clock
        message.visit = self._visits.get(client, 0)
        self._visits[client] = message.visit + 1
        server.costs.bytes_down += message.num_bytes
        computed = server.costs.virtual_time + clock.download(client, message.visit, message.num_bytes)
        computed += clock.compute(client, message.visit, planned(client, job.work))
        self._departures += 1
        arrival = computed + clock.upload(client, message.visit, 0)
        return PendingJob(self._departures - 1, message, server.costs.virtual_time, computed, arrival)

    # -- what is saved ---------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Return the jobs in flight, and how often each client has started."""
        flights = [job.plain() for job in self._in_flight]
        return {"departures": self._departures, "visits": dict(self._visits), "flights": flights}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned.

        Raises:
            ValueError: If it is the state of another loop.
        """
        if set(state) != {"departures", "visits", "flights"}:
            super().load(state or {"nothing": "no jobs in flight"})
        self._departures, self._visits = int(state["departures"]), dict(state["visits"])
        self._in_flight = [PendingJob.of(job) for job in state["flights"]]


class DrawnStaleness(Asynchronous):
    """Updates arrive one after another, each with a staleness drawn uniformly from 0 to a maximum.

    The setting in which FedAsync was published: no devices, no speeds, only the question what staleness does. The t-th update
    comes from a client drawn uniformly (of those that none of the `max_staleness` updates before it comes from, so that
    nobody has two jobs at a time) and answers the model as it was `d` arrivals ago, `d` uniform in 0 ... `max_staleness`.
    The loop's time counts arrivals. Where every arrival makes a step, as with `FedAsync`, `d` is the update's staleness.

    Args:
        max_staleness: Largest staleness; the paper takes 4 and 16.
        arrivals: Updates that make a round. Default: as the algorithm says, else 1.

    Raises:
        ConfigurationError: If a number is out of range.

    Example:
        >>> DrawnStaleness(16)
        DrawnStaleness(max_staleness=16, arrivals=None)
    """

    def __init__(self, max_staleness: int = 4, arrivals: int | None = None) -> None:
        super().__init__(VirtualClock(FixedSpeed(0.0)), arrivals=arrivals, max_staleness=max_staleness)
        self._draws: list[
            tuple[str, int]
        ] = []  # client and staleness of each arrival: draws, so they need not be saved

    def check(self, server: Server) -> None:
        """Refuse too few clients, and callbacks that leave jobs out."""
        super().check(server)
        assert self.max_staleness is not None
        if len(server.clients) <= self.max_staleness:
            raise ConfigurationError(
                f"DrawnStaleness got max_staleness={self.max_staleness}, and {len(server.clients)} clients with at most one "
                "job at a time can be at most one less behind. Lower it."
            )
        picky = next((callback.key for callback in server.callbacks if callback.claims("on_job")), None)
        if picky is not None:
            raise ConfigurationError(
                f"{picky} changes jobs or leaves them out, and here each has its turn. Leave it out."
            )

    def _drawn(self, server: Server, number: int) -> tuple[str, int]:
        """Return client and staleness of an arrival."""
        assert self.max_staleness is not None
        able = [client for client in server.clients if server.num_samples[client]]
        while len(self._draws) <= number:
            place = len(self._draws)
            draws = generator(server.seed, "drawn staleness", place)
            recent = {client for client, _ in self._draws[max(place - self.max_staleness, 0) :]}
            free = [client for client in able if client not in recent] or able
            client = free[int(torch.randint(len(free), (1,), generator=draws))]
            most = min(self.max_staleness, place)
            self._draws.append((client, int(torch.randint(most + 1, (1,), generator=draws))))
        return self._draws[number]

    def _depart(self, server: Server, planned: SampleForecast, width: int) -> float:
        """Send the present model to those whose updates will be as old as was drawn."""
        assert self.max_staleness is not None
        now = int(server.costs.virtual_time)
        for number in range(now, now + self.max_staleness + 1):
            client, staleness = self._drawn(server, number)
            if number - staleness == now:
                job = self._sent_off(server, server.job(client), planned)
                job.computed = job.arrival = number + 1.0
                self._in_flight.append(job)
        return math.inf
