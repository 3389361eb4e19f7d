"""Synchronous rounds: everybody who takes part is waited for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from fedlightning.clock import AlwaysAvailable, VirtualClock
from fedlightning.errors import ConfigurationError
from fedlightning.federation.aggregation import Aggregation
from fedlightning.federation.door import checked
from fedlightning.federation.engine import Engine
from fedlightning.federation.failures import FailurePolicy, FederationError, TooFewClientsError
from fedlightning.federation.loops.base import Loop, allowed, left_out
from fedlightning.federation.loops.timing import Late, RoundTimes
from fedlightning.federation.server import Server
from fedlightning.federation.terms import note_work
from fedlightning.hooks import AsynchronousMethod, Job, Plan
from fedlightning.messages import Message, Update
from fedlightning.visit.requests import Evaluate

ROUNDS = 2**32
"""More rounds than any run has, so that no two visits of a client have one number."""


def default_plan(server: Server) -> Plan:
    """Visit each participant once."""
    yield [server.job(client) for client in server.participants()]


def no_plan() -> Plan:
    """Visit nobody."""
    yield from ()


class Synchronous(Loop):
    """Rounds in which everybody who takes part is waited for: the default.

    With a clock a round lasts as long as its slowest participant, in virtual seconds; of a plan with several lists of jobs
    the lists follow one another. Clients that cannot be reached as a round begins are not drawn, and jobs of such clients
    are left out; where nobody can be reached, the round begins when somebody can. A client that comes after the deadline
    has trained, and its bytes are counted, but it has no part in the round: its weight is 0, and it is no failure.

    Args:
        clock: Speeds, links and availability. Default: none, and time has no part in anything.
        deadline: Virtual seconds after which a list of jobs is over. Default: never.
        late: What becomes of clients that would not be in time. ``"drop"``: they are late; ``"partial"``: they do as many
            epochs (or steps) as are in time, at least 1 (phases whose work an algorithm fixes are left alone).
        first: Number of updates that suffice: the first that come are taken in, and the round is over (over-selection: let
            more take part than that). Their models are in memory together. Default: all.

    Raises:
        ConfigurationError: If a number is out of range, or there is no clock for it.

    Example:
        >>> from fedlightning.clock import SampleSpeed, VirtualClock
        >>> Synchronous(), Synchronous(VirtualClock(SampleSpeed(0.01)), deadline=60, late="partial").deadline
        (Synchronous(clock=None, deadline=None, late='drop', first=None), 60)
    """

    def __init__(
        self,
        clock: VirtualClock | None = None,
        deadline: float | None = None,
        late: Late = "drop",
        first: int | None = None,
    ) -> None:
        if late not in ("drop", "partial"):
            raise ConfigurationError(f"Synchronous got late={late!r}. Choose 'drop' or 'partial'.")
        if deadline is not None and (isinstance(deadline, bool) or not 0 < deadline < math.inf):
            raise ConfigurationError(
                f"Synchronous got deadline={deadline!r}. Give positive virtual seconds, or leave it out."
            )
        if first is not None and (not isinstance(first, int) or isinstance(first, bool) or first < 1):
            raise ConfigurationError(
                f"Synchronous got first={first!r}. Give the number of updates that suffice, from 1."
            )
        given = next((name for name, value in (("deadline", deadline), ("first", first)) if value is not None), None)
        if clock is None and given is not None:
            raise ConfigurationError(
                f"Synchronous got {given}, and no clock to tell who is late. Give it a VirtualClock."
            )
        if late == "partial" and deadline is None:
            raise ConfigurationError("Synchronous got late='partial', and no deadline to be in time for. Give it one.")
        self.clock = clock
        self.deadline = deadline
        self.late = late
        self.first = first

    def check(self, server: Server) -> None:
        """Refuse algorithms that take updates in as they arrive.

        Raises:
            ConfigurationError: Naming one.
        """
        for callback in server.callbacks:
            if isinstance(callback, AsynchronousMethod):
                raise ConfigurationError(
                    f"{callback.key} takes updates in as they arrive, and synchronous rounds wait for everybody. Give the "
                    "trainer an asynchronous loop: loop=fedlightning.federation.loops.Asynchronous() (trainer.loop)."
                )
        if self.clock is not None:
            self.clock.check(server.clients)

    def absent(self) -> str:
        """Return what lets clients be late or away."""
        for name in ("deadline", "first"):
            if getattr(self, name) is not None:
                return f"the loop's {name}={getattr(self, name)}"
        always = self.clock is None or isinstance(self.clock.availability, AlwaysAvailable)
        return "" if always else "the clock's availability"

    def round(
        self, server: Server, engine: Engine, evaluate: Evaluate, report: Callable[[Update], None] = lambda update: None
    ) -> list[Update]:
        """Carry out the round that the algorithm plans; see :func:`run_round`."""
        server.clock = self.clock
        times = RoundTimes.of(self.clock, server, engine, self.deadline, self.late, self.first)
        updates = run_round(server, engine, evaluate, report, times)
        self.trips = () if times is None else times.trips
        return updates


def run_round(
    server: Server,
    engine: Engine,
    evaluate: Evaluate,
    report: Callable[[Update], None] = lambda update: None,
    times: RoundTimes | None = None,
) -> list[Update]:
    """Carry out one round: plan, visit, fold, step."""
    server.explosions.forget_round()
    policy, door = engine.attempts.policy, partial(checked, server)
    server.callbacks.event("on_round_start", server)
    owner = server.callbacks.role("plan_round")
    plan = default_plan(server) if owner is None else owner.plan_round(server)
    chooser = server.callbacks.role("participants")
    if chooser is not None and not server.participants():
        plan, chooser = no_plan(), None  # a round of nobody, which no algorithm need foresee
    server.asked = False
    aggregation = Aggregation(server)
    done: list[Update] = []
    cause: BaseException | None = None  # of the first failure; each holds its client's model by its traceback
    jobs = next(plan, None)
    if chooser is not None and not server.asked:
        assert owner is not None
        raise ConfigurationError(
            f"{chooser.key} says who takes part in a round, and {owner.key} plans round {server.round + 1} without asking: "
            f"that would have no effect. Leave {chooser.key} out."
        )
    somebody = False
    visits: Counter[str] = Counter()
    while jobs is not None:
        light: list[Update] = []
        whole: list[Update] = []
        if not jobs:
            aggregation.finish()
            aggregation = Aggregation(server)
        asked = [allowed(server, job) for job in jobs]
        asked = asked if times is None else times.reached(asked)
        carried_out = [job for job in asked if job is not None]
        somebody = somebody or bool(carried_out)
        sent = messages(server, carried_out, visits)
        answers = engine.run(sent if times is None else times.noted(sent), evaluate, door)
        reasons: list[str | None] = []  # why updates are too late
        if times is not None and times.first is not None:
            held = list(answers)
            reasons, answers = times.all_came(held), iter(held)
        number = 0
        for wanted, job in zip(jobs, asked, strict=True):
            if job is None:
                light.append(left_out(server, wanted))
                whole.append(light[-1])
                continue
            update = next(answers)
            if update.error is not None:
                policy.stop_at(update.client, update.error, f"Round {server.round + 1}")
            server.bytes_up += update.num_bytes
            server.steps += update.steps if job.work != 0 else 0  # such a job reports the steps of an earlier one
            note_work(server, update)
            if times is not None and times.first is None:
                reasons.append(times.came(len(reasons), update))
            number += 1
            if times is not None and update.error is None and reasons[number - 1] is not None:
                times.leave_behind(update.client)
                said = f"client '{update.client}' came too late: {reasons[number - 1]}"
                light.append(
                    replace(update, state={}, extras={}, cause=None, evaluations=[], error=said, left_out=True)
                )
                whole.append(light[-1])
                report(light[-1])
                continue
            if update.error is None and job.work != 0:
                server.explosions.look(update, server.models[update.model], server.architecture(update.model).trainable)
            if update.error is None and update.state:
                aggregation.fold(update)
            elif update.error is None:
                server.callbacks.event("on_update", server, update)
            cause = cause or update.cause
            light.append(replace(update, state={}, extras=update.extras if job.work == 0 else {}, cause=None))
            whole.append(replace(update, cause=None) if job.keep else light[-1])
            report(light[-1])
        for _ in answers:  # the engine may have something to do after its last answer
            raise AssertionError("an engine answered more than it was asked")
        done += light
        if times is not None and carried_out:
            times.over(reasons)
        if len(light) > 1:  # a plan of single jobs, one client after another, goes on without one that fails
            refuse_if_all_failed(server, light, cause)
        try:
            jobs = plan.send(whole)
        except StopIteration:
            jobs = None
    refuse_if_all_failed(server, done, cause)
    refuse_if_too_few(server, done, policy, cause)
    aggregation.finish(nobody=not somebody)
    return done


def refuse_if_all_failed(server: Server, updates: list[Update], cause: BaseException | None) -> None:
    """End the run where every visit has failed."""
    updates = [update for update in updates if not update.left_out]
    failed = [update for update in updates if update.error is not None]
    if updates and len(failed) == len(updates):
        reasons = {str(update.error).replace(f"client '{update.client}' failed: ", "") for update in failed}
        if server.round == 0 and len(failed) > 1 and len(reasons) == 1:
            raise FederationError(
                f"{reasons.pop().rstrip('.')}. All {len(failed)} clients failed with this error in round 1: no client could "
                "contribute."
            ) from cause
        raise FederationError(
            f"Round {server.round + 1}: no client could contribute; {str(failed[0].error).rstrip('.')}"
            + (f" ({len(failed) - 1} more failed)." if len(failed) > 1 else ".")
        ) from cause


def refuse_if_too_few(
    server: Server, updates: list[Update], policy: FailurePolicy, cause: BaseException | None
) -> None:
    """End the run where fewer clients than needed contributed."""
    updates = [
        update
        for update in updates
        if update.client in server.num_samples and not update.left_out  # a score on all data is no client
    ]
    visited = dict.fromkeys(update.client for update in updates)
    failed = {update.client: update.error for update in updates if update.error is not None}
    needed, there = policy.needed(len(visited)), len(visited) - len(failed)
    if there < needed:
        raise TooFewClientsError(
            f"Round {server.round + 1}: {there} of {len(visited)} clients contributed, and min_clients="
            f"{policy.min_clients} asks for {needed}; {str(next(iter(failed.values()))).rstrip('.')}"
            + (f" ({len(failed) - 1} more failed)" if len(failed) > 1 else "")
            + ". The state of the rounds before is intact, and resume goes on from there."
        ) from cause


def messages(server: Server, jobs: list[Job], visits: Counter[str] | None = None) -> Iterator[Message]:
    """Yield the jobs' messages, made when an engine asks for them, and count their bytes."""
    for job in jobs:
        message = server.message(job)
        if visits is not None and job.work != 0:
            message.visit = server.round + ROUNDS * visits[job.client]
            visits[job.client] += 1
        server.bytes_down += message.num_bytes
        yield message
