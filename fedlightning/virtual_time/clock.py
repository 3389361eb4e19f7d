"""The virtual clock of a federation.

Synchronous rounds on a virtual clock: how long they last, who is late, who can be reached.

What happened when: `timeline.csv`, written a row for each job that has come back, and drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedlightning.client.record import ClientRecord
from fedlightning.contract import POOLED, Change, Job, UpdateCodec
from fedlightning.contract.messages import JobTrace, Message, Update, tree_bytes
from fedlightning.engines.attempts import FederationError
from fedlightning.engines.contract import Engine
from fedlightning.errors import ConfigurationError, warn
from fedlightning.ranges import checked
from fedlightning.run.job_timeline import TIMELINE_FILE, read_trips, timeline_figure
from fedlightning.scores.rows import Row
from fedlightning.server.loop import keep_local_record
from fedlightning.server.parts import Part
from fedlightning.server.round_clock import Clock, RoundClock
from fedlightning.server.server import Server
from fedlightning.storage.files import add_round, writing
from fedlightning.virtual_time.availability import AlwaysAvailable, Availability
from fedlightning.virtual_time.in_flight import SampleForecast
from fedlightning.virtual_time.settings import Described
from fedlightning.virtual_time.speed import SampleSpeed, Speed
from fedlightning.virtual_time.transfer_times import FixedLink, Link

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation


def unreachable(server: Server, progress: str = "") -> FederationError:
    """Return the end of a run in which nobody can be reached any more."""
    return FederationError(
        f"Round {server.round + 1}: no client can be reached any more after {server.costs.virtual_time:g} virtual "
        f"seconds{progress}. Let the availability begin anew (period), or train for fewer rounds."
    )


@dataclass
class RoundTimes(RoundClock):
    """The clock of one round: its lists of jobs follow one another, the jobs of a list run side by side.

    Attributes:
        clock: Speeds, links and availability.
        server: Keeps the time.
        planned: Gives the training samples of a visit.
        deadline: Seconds after which a list of jobs is over; infinity: never.
        late: What a client does that would not be in time.
        first: Number of updates that are waited for in a list of training jobs; `None`: all.
        trips: What has happened, for the timeline.
    """

    takes_time = True

    clock: VirtualClock
    server: Server
    planned: SampleForecast
    deadline: float
    late: Literal["drop", "partial"]
    first: int | None
    trips: list[JobTrace] = field(default_factory=list)
    _round_began: float = 0.0
    _began: float = 0.0
    _sent: list[tuple[Message, float]] = field(default_factory=list)  # with the seconds until it has computed
    _seconds: list[float] = field(default_factory=list)
    _reasons: list[str | None] = field(default_factory=list)  # why updates of the list are too late
    _is_unknown_told: bool = False  # that the bytes of a code are not known before
    _before: dict[str, ClientRecord] = field(default_factory=dict)  # of callbacks whose state moves with the server's

    @classmethod
    def of(
        cls,
        clock: VirtualClock,
        server: Server,
        engine: Engine,
        deadline: float | None,
        late: Literal["drop", "partial"],
        first: int | None,
    ) -> RoundTimes:
        """Return the clock of a round that is about to begin, when somebody can be reached."""
        waking = server.costs.virtual_time
        if not any(clock.available(client, waking) for client in server.clients):
            waking = min(clock.next_available(client, waking) for client in server.clients)
        if math.isinf(waking):
            raise unreachable(server)
        server.costs.virtual_time = waking
        limit = math.inf if deadline is None else deadline
        return cls(clock, server, SampleForecast(engine), limit, late, first, _round_began=waking)

    def is_reachable(self, client: str) -> bool:
        return self.clock.available(client, self._round_began)

    def begin(self, jobs: Iterable[Job | None]) -> list[Job | None]:
        self._began, self._sent, self._seconds, self._reasons = self.server.costs.virtual_time, [], [], []
        asked = [
            job if job is None or job.client == POOLED or self.clock.available(job.client, self._began) else None
            for job in jobs
        ]
        names = [callback.key for callback in self.server.callbacks.making(Change.IN_STEP)]
        if names and (self.first is not None or not math.isinf(self.deadline)):
            store = self.planned.engine.store
            if not store.is_here:
                raise ConfigurationError(
                    f"{names[0]} keeps at a client what has to agree with the server's, so a late client keeps what it "
                    "had; but here its records stay where it is. Leave out deadline and first (trainer.loop)."
                )
            here = [job.client for job in asked if job is not None and job.client != POOLED]
            self._before = {client: ClientRecord(state=dict(store.get(client).state)) for client in here}
        return asked

    def leave_behind(self, client: str) -> None:
        """Give a client whose update is too late the state back that has to agree with the server's."""
        store, before = self.planned.engine.store, self._before.get(client)
        if before is not None:
            store.put(client, keep_local_record(self.server, before, store.get(client)))

    def sent(self, messages: Iterable[Message]) -> Iterator[Message]:
        for message in messages:
            if self.late == "partial" and message.work != 0 and message.client != POOLED:
                message.work = self._in_time(message)
            self._sent.append((message, self._until_computed(message, message.work)))
            yield message

    def _until_computed(self, message: Message, work: int | None) -> float:
        client, visit = message.client, message.visit
        download_time = self.clock.download(client, visit, message.num_bytes)
        clients = self.server.clients if client == POOLED else [client]
        samples = 0.0 if work == 0 else sum(self.planned(name, work, message.round) for name in clients)
        return download_time + self.clock.compute(client, visit, samples)

    def _in_time(self, message: Message) -> int | None:
        """Return the most work of a client that is in time, at least 1 (`None`: all of it)."""
        work, up = message.work or self.planned.engine.runner.settings.work, self._planned_upload(message)
        for less in range(work, 1, -1):
            if self._until_computed(message, less) + up <= self.deadline:
                return message.work if less == work else less
        return message.work if work == 1 else 1

    def _planned_upload(self, message: Message) -> float:
        """Return the seconds for the entries that are asked for, or their code; what comes beside them is not known."""
        model, codec = self.server.models[message.model], self.server.callbacks.answering(UpdateCodec, "encode")
        size = None if codec is None else codec.planned_bytes(self.server, message)
        if size is None:
            size = tree_bytes([model[name] for name in message.returns])
            if codec is not None and self.server.round == 0 and not self._is_unknown_told:
                self._is_unknown_told = True
                warn(
                    f"How many bytes {codec.key} sends is not known before, so late='partial' plans by those of the model's "
                    "entries: a client may do less work than would be in time, or come too late."
                )
        return self.clock.upload(message.client, message.visit, size * (1 if message.links is None else message.links))

    def arrivals(self, updates: Iterator[Update]) -> Iterator[tuple[Update, str | None]]:
        judged: Iterable[tuple[Update, str | None]]
        if self.first is None:
            judged = ((update, self.came(number, update)) for number, update in enumerate(updates))
        else:
            all_updates = list(updates)
            judged = zip(all_updates, self.all_came(all_updates), strict=True)
        for update, reason in judged:
            self._reasons.append(reason)
            if update.error is None and reason is not None:
                self.leave_behind(update.client)
            yield update, reason

    def came(self, number: int, update: Update) -> str | None:
        """Note an update of the list, and say why it is too late, if it is by the deadline."""
        message, computed = self._sent[number]
        up = 0.0 if update.error is not None else self.clock.upload(message.client, message.visit, update.num_bytes)
        self._seconds.append(computed + up)
        began, number = self._began, self.server.round
        trip = JobTrace(number + 1, message.client, began, began + computed, began + computed + up, number)
        if computed + up > self.deadline:
            self.trips.append(trip.ended("late"))
            plans = self.late == "partial" and message.work != 0 and update.error is None
            if plans and computed + self._planned_upload(message) <= self.deadline:
                warn(
                    f"Client '{message.client}' did as much as was in time by the bytes of the model's entries, or "
                    "of their code (late='partial'), but its updates have more bytes than these, and come too late: it has "
                    "no part in such rounds. Set a longer deadline, or leave out what travels beside the model."
                )
            return f"it took {computed + up:g} virtual seconds, and the deadline is {self.deadline:g}"
        self.trips.append(trip.ended("failed" if update.error is not None else "taken"))
        return None

    def all_came(self, updates: Sequence[Update]) -> list[str | None]:
        """Note all updates of a list at once, where the first ones suffice. Return why each is too late, or `None`."""
        place, reasons = len(self.trips), [self.came(number, update) for number, update in enumerate(updates)]
        trains = [message.work != 0 for message, _ in self._sent]
        good = [n for n, update in enumerate(updates) if trains[n] and update.error is None and reasons[n] is None]
        assert self.first is not None
        ranked = sorted(good, key=lambda n: (self._seconds[n], n))
        for n in ranked[self.first :]:
            reasons[n] = f"the first {self.first} updates suffice, and it came after them"
            self.trips[place + n] = self.trips[place + n].ended("late")
        if len(ranked) >= self.first:  # nobody else is waited for
            last = self._seconds[ranked[self.first - 1]]
            self._seconds = [min(s, last) if trains[n] else s for n, s in enumerate(self._seconds)]
        return reasons

    def end(self) -> None:
        """End a list of jobs: the clock goes on to the last update that is waited for, at most to the deadline."""
        self.server.costs.virtual_time = self._began + min(max(self._seconds, default=0.0), self.deadline)
        if self._reasons and all(reason is not None for reason in self._reasons):
            warn(
                f"Round {self.server.round + 1}: none of {len(self._reasons)} updates came before the deadline of "
                f"{self.deadline:g} virtual seconds; the model stays as it is."
            )


class VirtualClock(Described, Clock):
    """How long visits take in virtual seconds, and when clients can be reached.

    All answers depend on the arguments here and those of the question alone: a run is replayed to the bit, and two
    methods are compared on the same devices. The time that this machine takes has no part in it.

    Args:
        speed: Seconds of computing. Default: 0.01 for each sample and epoch.
        link: Seconds of sending. Default: bytes take no time.
        availability: When clients can be reached. Default: always.
        seed: Address of all draws. It belongs to the devices, not to the run: runs of several seeds see the same ones.

    Example:
        >>> clock = VirtualClock(SampleSpeed(0.5), FixedLink(down=100, up=10))
        >>> clock.duration("a", visit=0, samples=4, bytes_down=50, bytes_up=50)
        7.5
        >>> clock.available("a", time=3.0), clock.next_available("a", time=3.0)
        (True, 3.0)
    """

    @checked
    def __init__(
        self,
        speed: Speed | None = None,
        link: Link | None = None,
        availability: Availability | None = None,
        seed: int = 0,
    ) -> None:
        self.speed = SampleSpeed() if speed is None else speed
        self.link = FixedLink() if link is None else link
        self.availability = AlwaysAvailable() if availability is None else availability
        self.seed = seed
        for name, value, kind in (
            ("speed", self.speed, Speed),
            ("link", self.link, Link),
            ("availability", self.availability, Availability),
        ):
            if not isinstance(value, kind):
                raise ConfigurationError(
                    f"VirtualClock got {name}={value!r}. Give an object of fedlightning.virtual_time, a {kind.__name__}."
                )

    def download(self, client: str, visit: int, num_bytes: int) -> float:
        """Return the seconds until a message has arrived at a client."""
        return self.link.seconds(self.seed, client, visit, num_bytes, "down")

    def compute(self, client: str, visit: int, samples: float) -> float:
        """Return the seconds that a client computes."""
        return self.speed.seconds(self.seed, client, visit, samples)

    def upload(self, client: str, visit: int, num_bytes: int) -> float:
        """Return the seconds until an update has arrived at the server."""
        return self.link.seconds(self.seed, client, visit, num_bytes, "up")

    def duration(self, client: str, visit: int, samples: float, bytes_down: int, bytes_up: int) -> float:
        """Return the seconds from the start of a message to the arrival of its update.

        Args:
            client: The client's id.
            visit: Number of the visit among those of the client.
            samples: Training samples that it goes through, each as often as it is seen.
            bytes_down: Bytes of the message.
            bytes_up: Bytes of the update.
        """
        seconds = self.download(client, visit, bytes_down) + self.compute(client, visit, samples)
        return seconds + self.upload(client, visit, bytes_up)

    def available(self, client: str, time: float) -> bool:
        """Return whether a client can start a visit at a time."""
        return self.availability.available(self.seed, client, time)

    def next_available(self, client: str, time: float) -> float:
        """Return the first time from `time` on at which a client can start a visit; infinity: never again."""
        return self.availability.next_available(self.seed, client, time)

    @property
    def is_always_available(self) -> bool:
        """Whether every client can be reached at any time."""
        return isinstance(self.availability, AlwaysAvailable)

    def for_round(self, server: Server, engine: Engine, **limits: Any) -> RoundTimes:
        """Return the clock of a round that is about to begin, when somebody can be reached."""
        return RoundTimes.of(self, server, engine, **limits)

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a clock that does not fit the clients of a federation; warn of clients that never come.

        Args:
            clients: The clients' ids.

        Raises:
            ConfigurationError: If a table names a client that there is not, or no client is ever available.
        """
        for model in (self.speed, self.link, self.availability):
            unknown = sorted(model.clients() - set(clients))
            if unknown:
                some = ", ".join(clients[:5]) + (", ..." if len(clients) > 5 else "")
                raise ConfigurationError(
                    f"{type(model).__name__} names client '{unknown[0]}', which the federation does not have ({some})."
                )
        never = [client for client in clients if math.isinf(self.next_available(client, 0.0))]
        if len(never) == len(clients):
            raise ConfigurationError(
                f"{type(self.availability).__name__} never lets in any of the {len(clients)} clients ({clients[0]}, ...): no "
                "round could be done. Give it intervals of these clients."
            )
        if never:
            warn(
                f"{type(self.availability).__name__} never lets in {len(never)} of the {len(clients)} clients ('{never[0]}', "
                "...): they take no part in training."
            )


COLUMNS = tuple(entry.name for entry in fields(JobTrace))


class Timeline(Part):
    """Writes and draws what happened when, where the loop has a clock."""

    def on_round_scored(self, federation: Federation, rows: Sequence[Row], updates: Sequence[Update]) -> None:
        folder, trips = federation.server.run_dir, federation.loop.trips
        if folder is not None and federation.recorder.writes and trips:
            append_job_traces(folder, trips)

    def on_end(self, federation: Federation) -> None:
        folder, loop = federation.server.run_dir, federation.loop
        if folder is not None and federation.recorder.writes and loop.clock is not None:
            draw_timeline(folder, {int(entry["round"]): entry["time"] for entry in federation.history})


def append_job_traces(folder: Path, trips: Sequence[JobTrace]) -> None:
    """Add a round to the timeline. Rows of this round and later ones, left by a run that was resumed, go."""
    if not trips:
        return
    add_round(folder / TIMELINE_FILE, COLUMNS, trips[0].round, [astuple(trip) for trip in trips])


def draw_timeline(folder: Path, rounds: Mapping[int, float]) -> None:
    """Draw a run's timeline to `figures/timeline.png`, if it has one."""
    rows, path = read_trips(folder), folder / "figures" / "timeline.png"
    if rows:
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            timeline_figure(rows, rounds).savefig(path, dpi=150)
