"""Tasks on their way: which are drawn ahead of the answers, and which travel in one message.

To exchange a message with a site takes seconds, whatever is in it. So all that a site is to do travels together, as far as
it is small and soon done; a site that has worked for :data:`BUDGET` seconds answers with what is done, and is sent the rest
again.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlightning.engines.attempts import TaskTries
from fedlightning.engines.contract import Task
from fedlightning.guards.preflight_task import PreflightTask
from fedlightning.guards.step_trials import StepTrial

AHEAD = 4
"""Tasks for each site that are drawn ahead of the answers, however large they are."""
MAX_TASKS_AHEAD = 64
"""Tasks for each site that are drawn ahead of the answers, if they are small; and tasks in one message."""
DRAWN_BYTES = 2**28
"""Bytes of the tasks that are drawn ahead of the answers, beyond :data:`AHEAD` tasks for each site."""
BATCH_BYTES = 2**23
"""Bytes of the tasks that travel in one message. A larger one travels alone."""
A_YEAR = 3e7
"""Seconds that no task takes."""
BUDGET = 5.0
"""Seconds after which a site begins with no further task of a message, but answers."""


@dataclass(eq=False)
class Entry:
    """A task and its progress.

    Attributes:
        task: The task.
        client: Whose site carries it out.
        attempt: Its tries.
        number: Names it to the site, which knows a task that comes again.
        since: When it was first to be sent, or its site last answered, on the clock of `attempts`.
        sent: Name of the reply that is waited for.
        alone: Whether it is to have a message of its own: the one that it was part of was refused.
        done: Whether its answer is there.
        answer: The answer.
    """

    task: Task[Any]
    client: str
    attempt: TaskTries
    number: str = ""
    since: float | None = None
    sent: str | None = None
    alone: bool = False
    done: bool = False
    answer: Any = None

    @property
    def is_alone(self) -> bool:
        """Whether it needs no record of its client and leaves none, so that it need not wait for the client's other tasks."""
        return isinstance(self.task, StepTrial | PreflightTask)


@dataclass(eq=False)
class Batch:
    """Tasks in one message.

    Attributes:
        node: Where it was sent.
        entries: The tasks, in the order in which they are carried out.
    """

    node: str
    entries: list[Entry]


class Window:
    """The tasks that are drawn and whose answers are not yet taken, in their order."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._batches: dict[str, Batch] = {}  # by the name of the reply
        self._seconds: dict[tuple[str, type], float] = {}  # that a kind of task has last taken at a node

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    # -- drawing -----------------------------------------------------------------------------------------------------
    def has_room(self, sites: int) -> bool:
        """Return whether one more task may be drawn."""
        count = len(self._entries)
        return count < AHEAD * sites or (count < MAX_TASKS_AHEAD * sites and self._bytes < DRAWN_BYTES)

    def add(self, entry: Entry) -> None:
        """Add a task that has been drawn."""
        self._entries.append(entry)
        self._bytes += entry.task.num_bytes

    def take(self) -> Iterator[Any]:
        """Yield the answers that are there, up to the first that is not."""
        while self._entries and self._entries[0].done:
            entry = self._entries.popleft()
            self._bytes -= entry.task.num_bytes
            yield entry.answer

    def clear(self) -> list[str]:
        """Forget all tasks; return the names of the replies that were waited for."""
        names = list(self._batches)
        self._entries.clear()
        self._batches.clear()
        self._bytes = 0
        return names

    # -- sending -----------------------------------------------------------------------------------------------------
    def due(self, where: Mapping[str, str], ready: Collection[str], now: float) -> list[Batch]:
        """Return the messages that can be sent now. A client's tasks follow one another: one needs the record of another."""
        before: set[str] = set()
        entries_by_node: dict[str, list[Entry]] = {}
        for entry in self._entries:
            if entry.done:
                continue
            if entry.since is None:
                entry.since, entry.number = now, uuid.uuid4().hex
            node = where.get(entry.client, "")
            if entry.sent is None and node in ready and entry.client not in before:
                entries_by_node.setdefault(node, []).append(entry)
            if not entry.is_alone:
                before.add(entry.client)
        return [Batch(node, part) for node, entries in entries_by_node.items() for part in self._parts(node, entries)]

    def _parts(self, node: str, entries: Sequence[Entry]) -> Iterator[list[Entry]]:
        part: list[Entry] = []
        size, seconds = 0, 0.0
        for entry in entries:
            takes = self._seconds.get((node, type(entry.task)), 0.0)
            full = len(part) == MAX_TASKS_AHEAD or size + entry.task.num_bytes > BATCH_BYTES or seconds + takes > BUDGET
            if part and (full or entry.alone or part[-1].alone):
                yield part
                part, size, seconds = [], 0, 0.0
            part.append(entry)
            size, seconds = size + entry.task.num_bytes, seconds + takes
        if part:
            yield part

    def sent(self, name: str, batch: Batch) -> None:
        """Note that a message was sent, and the name of its reply."""
        self._batches[name] = batch
        for entry in batch.entries:
            entry.sent = name

    # -- replies -----------------------------------------------------------------------------------------------------
    def came(self, name: str) -> list[Entry | None] | None:
        """Return the tasks of the message that a reply answers, `None` instead of one that is waited for no more."""
        batch = self._batches.pop(name, None)
        if batch is None:
            return None
        waiting = [entry if entry.sent == name else None for entry in batch.entries]
        for entry in waiting:
            if entry is not None:
                entry.sent = None
        return waiting

    def answered(self, node: str, where: Mapping[str, str], now: float) -> None:
        """Wait for the tasks of a site from now on: the time of each begins when those before it are done."""
        for entry in self._entries:
            if not entry.done and entry.since is not None and where.get(entry.client) == node:
                entry.since = now

    def took(self, node: str, entry: Entry, seconds: Any) -> None:
        """Note how long a task has taken at a site."""
        if type(seconds) in (int, float) and 0 <= seconds < A_YEAR:
            self._seconds[node, type(entry.task)] = float(seconds)

    def unsend(self, entry: Entry) -> list[str]:
        """Let a task be sent again; return the name of its reply if nobody waits for that any more."""
        name, entry.sent = entry.sent, None
        if name is None or any(other.sent == name for other in self._batches[name].entries):
            return []
        del self._batches[name]
        return [name]

    def astray(self, nodes: Collection[str]) -> list[Entry]:
        """Return the tasks that were sent to a node that is not there any more."""
        return [
            entry for entry in self._entries if entry.sent is not None and self._batches[entry.sent].node not in nodes
        ]

    def late(self, where: Mapping[str, str], now: float, timeout: float) -> list[Entry]:
        """Return the tasks that have had their time. Those that share a message wait for each other, up to the budget."""
        shared = {batch.node for batch in self._batches.values() if len(batch.entries) > 1}
        late_entries = []
        for entry in self._entries:
            node = where.get(entry.client, "")
            has = timeout + (BUDGET if node in shared else 0.0)
            if not entry.done and entry.since is not None and now > entry.since + has:
                # from now on alone: one that hangs takes no other with it
                self._seconds[node, type(entry.task)] = math.inf
                late_entries.append(entry)
        return late_entries
