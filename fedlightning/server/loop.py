"""The contract of loops, and synchronous rounds.

When clients are visited: a loop says what a round is. Those that nobody waits in stand in `fedlightning.virtual_time`.

Synchronous rounds: everybody who takes part is waited for.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Evaluate
from fedlightning.contract import POOLED, AsynchronousMethod, Change, ClientSelection, Job, Plan
from fedlightning.contract.messages import JobTrace, Message, Update, contributors
from fedlightning.engines.contract import Engine
from fedlightning.errors import ConfigurationError
from fedlightning.ranges import Counts, Range, check_on_creation, make_init, needs
from fedlightning.server.round_clock import NO_CLOCK, Clock
from fedlightning.server.server import Server
from fedlightning.server.update_collector import UpdateCollector


class Loop(ABC):
    """When clients are visited, and what a round is.

    A round ends with a step of the server's models; after it the federation scores, tells the callbacks and saves. What lives
    from round to round (a clock, messages in flight) is given by :meth:`state` and goes with every saved state. A loop object
    holds options only, each under its argument's name, and what :meth:`load` can put back: the trainer copies it for
    every run.
    """

    clock: Clock | None = None
    """The virtual clock of a loop that has one."""
    holds_records: bool = False
    """Whether clients' records are put into the store later than the visits that made them: they must be here then."""
    trips: Sequence[JobTrace] = ()
    """The jobs that came back in the last round, where there is a clock."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let arguments be checked by their annotations."""
        super().__init_subclass__(**options)
        check_on_creation(cls)

    def check(self, server: Server) -> None:  # noqa: B027 - most loops take everything
        """Refuse before round 1, with ``ValueError`` and a sentence, callbacks that this loop cannot run."""

    @abstractmethod
    def round(
        self, server: Server, engine: Engine, evaluate: Evaluate, report: Callable[[Update], None] = lambda update: None
    ) -> list[Update]:
        """Carry out one round, up to the new models.

        Args:
            server: Holds the models before, and after.
            engine: Carries out the visits.
            evaluate: What to score at stage L2, while the trained models are there.
            report: Called with each update as it comes.

        Returns:
            The updates that came in this round, without their model entries.
        """

    def absent(self) -> str:
        """Return what keeps clients out of rounds, for a sentence; empty: nothing."""
        return ""

    @property
    def flushes(self) -> bool:
        """Whether the last round is none that a longer run would have: it waits for what is in flight."""
        return False

    def visits(self, server: Server) -> int:
        """Return how many visits the next round is expected to have: for the progress bar."""
        return len(server.participants())

    def state(self) -> dict[str, Any]:
        """Return what lives from round to round: tensors and plain values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned.

        Raises:
            ValueError: If it is the state of another loop.
        """
        if state:
            raise ValueError(
                f"The saved state holds {sorted(state)} of another loop than {self!r}. Resume with the run's own loop."
            )

    def hyperparameters(self) -> dict[str, Any]:
        """Return the arguments this loop was made with, read from the attributes of the same names."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name not in ("self", "kwargs")]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def __repr__(self) -> str:
        """Return the class with its options."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.hyperparameters().items())
        return f"{type(self).__name__}({options})"


def apply_job_hooks(server: Server, job: Job) -> Job | None:
    """Return a job as the callbacks let it be carried out (`on_job`, chained), or `None` if one of them leaves it out."""
    if job.client == POOLED:
        return job
    now: Job = job
    for callback in server.callbacks:
        if not isinstance(callback, ClientSelection):
            continue
        answer: Job | None = callback.on_job(server, now)
        if answer is None:
            return None
        if not isinstance(answer, Job) or answer.client != job.client:
            raise ConfigurationError(
                f"{callback.key}.on_job was asked about a job of client '{job.client}' and answered {answer!r:.200}. It "
                "returns the job, a changed one of the same client, or None to leave it out."
            )
        now = answer
    return now


def make_skipped_update(server: Server, job: Job) -> Update:
    """Return the answer that a plan gets for a job that was not carried out: nothing came, and nobody failed."""
    update = Update(server.round, job.client, model=job.model, tag=job.tag)
    return replace(update, error=f"client '{job.client}' was left out of round {server.round + 1}", left_out=True)


def keep_local_record(server: Server, before: ClientRecord, after: ClientRecord) -> ClientRecord:
    """Return what a client keeps of a visit whose update is left out: all, but what has to agree with the server's."""
    keys = [callback.key for callback in server.callbacks.making(Change.IN_STEP)]
    state = {key: value for key, value in after.state.items() if key not in keys}
    return replace(after, state=state | {key: before.state[key] for key in keys if key in before.state})


def keep_last_scores(updates: Sequence[Update]) -> list[Update]:
    """Take scores and training metrics out of all but each client's last update: a round has one of each.

    Where some of a client's updates were scored and others were not, or failed, it is the last one that was scored.
    """

    def rank(update: Update) -> tuple[bool, bool]:
        return bool(update.evaluations or update.gaps), bool(update.metrics)

    last: dict[str, int] = {}
    for place, update in enumerate(updates):
        if rank(update) >= rank(updates[last.get(update.client, place)]):
            last[update.client] = place
    return [
        update if last[update.client] == place else replace(update, evaluations=[], gaps=[], metrics={})
        for place, update in enumerate(updates)
    ]


__all__ = ["Loop", "Synchronous"]


ROUNDS = 2**32
"""More rounds than any run has, so that no two visits of a client have one number."""


def default_plan(server: Server) -> Plan:
    """Visit each participant once."""
    yield [server.job(client) for client in server.participants()]


def no_plan() -> Plan:
    """Visit nobody."""
    yield from ()


@needs("deadline", "clock", why="nothing tells who is late. Give it a VirtualClock.")
@needs("first", "clock", why="nothing tells who is late. Give it a VirtualClock.")
@needs("late", "deadline", why="there is nothing to be in time for. Give it one.")
@make_init
class Synchronous(Loop):
    """Rounds in which everybody who takes part is waited for: the default.

    With a clock a round lasts as long as its slowest participant, in virtual seconds; of a plan with several lists of jobs
    the lists follow one another. Clients that cannot be reached as a round begins are not drawn, and jobs of such clients
    are left out; where nobody can be reached, the round begins when somebody can. A client that comes after the deadline
    has trained, and its bytes are counted, but it has no part in the round: its weight is 0, and it is not a failure.

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
        >>> from fedlightning.virtual_time import SampleSpeed, VirtualClock
        >>> Synchronous(), Synchronous(VirtualClock(SampleSpeed(0.01)), deadline=60, late="partial").deadline
        (Synchronous(clock=None, deadline=None, late='drop', first=None), 60)
    """

    clock: Clock | None = None
    deadline: Annotated[float, Range("(0, inf)", "In virtual seconds.")] | None = None
    late: Literal["drop", "partial"] = "drop"
    first: (
        Annotated[int, Range("[1, inf)", "The number of updates that suffice.", strict=True), Counts("clients")] | None
    ) = None

    def check(self, server: Server) -> None:
        """Refuse algorithms that take updates in as they arrive.

        Raises:
            ConfigurationError: Naming one.
        """
        for callback in server.callbacks:
            if isinstance(callback, AsynchronousMethod):
                raise ConfigurationError(
                    f"{callback.key} takes updates in as they arrive, and synchronous rounds wait for everybody. Give the "
                    "trainer an asynchronous loop: loop=fedlightning.virtual_time.Asynchronous() (trainer.loop)."
                )
        owner = server.callbacks.role("denominator")
        if owner is not None and self.first is not None:
            raise ConfigurationError(
                f"first={self.first} takes in as many updates as that, and {owner.key} divides their sum by a number "
                "of its own, whoever comes. Leave first out, or give the loop a deadline."
            )
        if self.clock is not None:
            self.clock.check(server.clients)

    def absent(self) -> str:
        """Return what lets clients be late or away."""
        for name in ("deadline", "first"):
            if getattr(self, name) is not None:
                return f"the loop's {name}={getattr(self, name)}"
        return "" if self.clock is None or self.clock.is_always_available else "the clock's availability"

    def round(
        self, server: Server, engine: Engine, evaluate: Evaluate, report: Callable[[Update], None] = lambda update: None
    ) -> list[Update]:
        """Carry out the round that the algorithm plans; see :func:`run_round`."""
        server.clock = NO_CLOCK
        if self.clock is not None:
            limits = {"deadline": self.deadline, "late": self.late, "first": self.first}
            server.clock = self.clock.for_round(server, engine, **limits)
        updates = run_round(server, engine, evaluate, report)
        self.trips = server.clock.trips
        return updates


def run_round(
    server: Server, engine: Engine, evaluate: Evaluate, report: Callable[[Update], None] = lambda update: None
) -> list[Update]:
    """Carry out one round: plan, visit, fold, step.

    Args:
        server: Holds the models before, and after, and the round's clock.
        engine: Carries out the visits.
        evaluate: What to score at stage L2, while the trained models are there.
        report: Called with each update as it comes.

    Returns:
        The updates without their model entries. A plan gets the same; extras are kept only for jobs without training,
        since a round of model-sized extras (control variates) is folded in by `on_update` and need not be held. Of a job
        with `keep` the plan gets everything.

    Raises:
        ClientFailedError: If a client failed and that is to end the run.
        FederationError: If every visit of the round, or of a list of several jobs, failed; the first failure is its cause.
        TooFewClientsError: If fewer clients than needed contributed.
    """
    server.callbacks.event("on_round_start", server)
    collector, clock = UpdateCollector(server, engine.attempts.policy, report), server.clock
    visits: Counter[str] = Counter()
    visited = False
    plan, jobs = start_plan(server)
    while jobs is not None:
        if not jobs:
            collector.step()
        asked = clock.begin(apply_job_hooks(server, job) for job in jobs)
        carried_out = [job for job in asked if job is not None]
        visited = visited or bool(carried_out)
        sent = clock.sent(messages(server, carried_out, visits))
        arriving = clock.arrivals(visit_clients(server, engine, sent, evaluate))
        first = len(collector.done)
        updates = [
            collector.close(make_skipped_update(server, wanted))
            if job is None
            else collect_update(collector, job, *next(arriving))
            for wanted, job in zip(jobs, asked, strict=True)
        ]
        for _ in arriving:  # the engine may have something to do after its last answer
            raise AssertionError("an engine answered more than it was asked")
        if carried_out:
            clock.end()
        if len(updates) > 1:  # a plan of single jobs, one client after another, goes on without one that fails
            collector.refuse_if_all_failed(first)
        try:
            jobs = plan.send(updates)
        except StopIteration:
            jobs = None
    collector.refuse_if_all_failed()
    collector.refuse_if_too_few()
    if server.callbacks.role("denominator") is not None:  # a sum over a fixed number, which nobody's work may be too
        visited = bool(contributors(collector.done))
    collector.step(nobody=not visited)
    return collector.done


def start_plan(server: Server) -> tuple[Plan, list[Job] | None]:
    """Return the round's plan and its first jobs; a round of nobody has none.

    Raises:
        ConfigurationError: If a callback says who takes part, and the plan does not ask.
    """
    owner, chooser = server.callbacks.role("plan_round"), server.callbacks.role("participants")
    if chooser is not None and not server.participants():  # a round of nobody, which no algorithm need foresee
        plan = no_plan()
        return plan, next(plan, None)
    plan = default_plan(server) if owner is None else owner.plan_round(server)
    server.participation.is_requested = False
    jobs = next(plan, None)
    if chooser is not None and owner is not None and not server.participation.is_requested:
        raise ConfigurationError(
            f"{chooser.key} says who takes part in a round, and {owner.key} plans round {server.round + 1} without asking: "
            f"that would have no effect. Leave {chooser.key} out."
        )
    return plan, jobs


def visit_clients(server: Server, engine: Engine, sent: Iterator[Message], evaluate: Evaluate) -> Iterator[Update]:
    """Yield the accepted updates of messages; attackers who work together get hold of all of them before."""
    attackers = server.callbacks.intercepting()
    if not attackers:
        yield from engine.run(sent, evaluate)
        return
    all_sent = list(sent)
    updates = list(engine.run(all_sent, evaluate))
    all_sent = [server.message_of_choice(message, update) for message, update in zip(all_sent, updates, strict=True)]
    for attacker in attackers:
        attacker.intercept(server, all_sent, updates)
    yield from map(server.accept, all_sent, updates)


def collect_update(collector: UpdateCollector, job: Job, update: Update, late: str | None) -> Update:
    """Take in the update of a job, and return what the plan sees of it.

    Args:
        collector: Takes in the round's updates.
        job: The job.
        update: Its update.
        late: Why it comes too late; `None`: it does not.
    """
    trained = job.work != 0
    collector.count(update, trained)
    if update.error is None and late is not None:
        reason = f"client '{update.client}' came too late: {late}"
        return collector.close(replace(update, cause=None, evaluations=[], error=reason, left_out=True))
    if update.error is None:
        collector.fold(update, trained=trained)
    light = collector.close(update, extras=not trained)
    return replace(update, cause=None) if job.keep else light


def messages(server: Server, jobs: list[Job], visits: Counter[str] | None = None) -> Iterator[Message]:
    """Yield the jobs' messages, made when an engine asks for them, and count their bytes."""
    for job in jobs:
        message = server.message(job)
        if visits is not None and job.work != 0:
            message.visit = server.round + ROUNDS * visits[job.client]
            visits[job.client] += 1
        server.costs.bytes_down += message.num_bytes
        yield message
