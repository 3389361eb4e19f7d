"""Which worker gets which task when, and what becomes of a task whose worker is gone: for engines with workers.

Answers come in the order of the tasks and are held until it is their turn, at most as many as fit into
:data:`HELD_BYTES`. While more tasks are to come than may be held, they are given out in order. As soon as the end is in
sight, the longest start first, so that no worker starts a large client when the others are done.

The engine `processes`: the same tasks on persistent local workers, each with one torch thread.
"""

from __future__ import annotations

import atexit
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Protocol, TypeVar, cast

from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import ClientRuntime
from fedlightning.engines.attempts import Retries, TaskTries
from fedlightning.engines.contract import ClientRecords, Engine, Task
from fedlightning.errors import ConfigurationError
from fedlightning.parallel.arena import Arena, Broadcast
from fedlightning.parallel.pool import Setup, UnpicklableError, Worker, own_gpu, usable_cores
from fedlightning.parallel.worker import Reply

HELD_BYTES = 2**28
"""Limit of the answers that wait for their turn, in bytes; but at least two for every worker may wait."""
TRIES = 2
"""Number of workers that may die of a task before its client is given up."""
POLL = 1.0
"""Seconds between looks at the time that workers take, at most."""

Answer = TypeVar("Answer")


class Hand(Protocol):
    """A worker as the engine sees it.

    Attributes:
        ready: Whether it has taken over the federation's parts.
    """

    ready: bool

    def give(self, task: Task[Any], record: ClientRecord) -> None:
        """Send a task and the record of its client. The worker must be idle."""

    def take(self) -> Reply | None:
        """Return the worker's reply; `None` if it only reports that it is ready. Its warnings are issued again here."""

    def has_answered(self) -> bool:
        """Return whether :meth:`take` would not wait."""

    def end(self, grace: float) -> str:
        """End the worker, after `grace` seconds by force. Return how it ended, for a message."""


@dataclass(eq=False)
class Entry:
    """A task and its progress in the engine.

    Attributes:
        task: The task.
        cost: Its expected duration, in any unit.
        worker: Number of the worker that carries it out, if any.
        attempt: Tries of the task.
        tries: Number of workers that died of it in this try.
        since: When its worker began, on the clock of `attempts`; `None` while the worker starts.
        done: Whether its answer is there.
        answer: The answer.
    """

    task: Task[Any]
    cost: float
    attempt: TaskTries
    worker: int | None = None
    tries: int = 0
    since: float | None = None
    done: bool = False
    answer: Any = None


class WorkersEngine(Engine):
    """Carries out tasks on workers, each of which does one task at a time.

    The records live in the main process; a worker gets one with a task and sends the new one back. So a worker that is
    killed takes nothing with it: another one takes its place and does the task again, with the same result.

    Args:
        runner: The client side of the federation.
        store: The clients' records.
        most: Number of workers; not more than clients are used.

    Attributes:
        out_of_reach: What to say where a worker does not find a class or a function that the federation needs.
    """

    out_of_reach: str

    def __init__(self, runner: ClientRuntime, store: ClientRecords, most: int) -> None:
        super().__init__(runner, store)
        self._most = most
        self._workers: dict[int, Hand] = {}
        self._busy: dict[int, Entry] = {}
        self._turn = 0  # number of the last call of map, which ends those left unfinished

    @property
    def width(self) -> int:
        """Number of workers."""
        return min(self._most, max(len(self.runner.described.client_ids), 1))

    # -- what an engine of workers brings ------------------------------------------------------------------------------
    @abstractmethod
    def _start(self) -> None:
        """Prepare for work; called at the start of every :meth:`map`."""

    @abstractmethod
    def _idle(self, needed: int) -> list[int]:
        """Return numbers of workers that can be given a task, and start workers if more than there are are needed."""

    @abstractmethod
    def _wait(self, timeout: float | None) -> Sequence[int]:
        """Wait until workers have something to say, or are gone; return their numbers."""

    @abstractmethod
    def _lost_at_start(self, how: str) -> Exception | None:
        """Return what to raise because a worker ended while it started, or `None`: another one takes its place."""

    @abstractmethod
    def _lost_at_work(self, who: str, how: str) -> str:
        """Return the warning about a worker that ended at work on `who`."""

    @abstractmethod
    def _too_many(self, tries: int, how: str) -> str:
        """Return the reason of a client that is given up because so many workers ended at work on it."""

    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        """Yield the answers of tasks in their order; see :meth:`fedlightning.engines.contract.Engine.map`."""
        self._forget()
        self._start()
        self._turn += 1
        turn = self._turn
        window: deque[Entry] = deque()
        source = _Source(tasks, self.runner, self.attempts, at_least=2 * self.width)
        try:
            while source.fill(window):
                self._hand_out(window, longest_first=source.exhausted)
                if window[0].done:
                    yield window.popleft().answer
                    if turn != self._turn:
                        raise RuntimeError(
                            "The engine has been given other tasks, or was closed, since the last answer."
                        )
                else:
                    self._collect()
        finally:
            if turn == self._turn:
                self._forget()

    # -- one step of the work -------------------------------------------------------------------------------------
    def _hand_out(self, window: Iterable[Entry], longest_first: bool) -> None:
        """Give idle workers the tasks that may start. Tasks of one client follow one another."""
        waiting: list[Entry] = []
        clients: set[str] = set()
        for entry in window:
            if entry.done or entry.task.client in clients:
                continue
            if entry.task.client is not None:
                clients.add(entry.task.client)
            if entry.worker is None:
                waiting.append(entry)
        if longest_first:
            waiting.sort(key=lambda entry: -entry.cost)
        for index, entry in zip(self._idle(len(waiting)) if waiting else (), waiting, strict=False):
            self._give(index, entry)

    def _give(self, index: int, entry: Entry) -> None:
        client = entry.task.client
        record = ClientRecord() if client is None else self.store.get(client)
        entry.worker, self._busy[index] = index, entry
        entry.since = self.attempts.clock() if self._workers[index].ready else None
        try:
            self._workers[index].give(entry.task, record)
        except OSError:
            self._lose(index)
        except UnpicklableError as error:
            warnings.warn(
                f"A task is done in the main process, for it cannot be sent to a worker: {error}", stacklevel=2
            )
            self._finish(index, Reply(*entry.task.run(self.runner, record)))

    def _collect(self) -> None:
        """Wait until at least one worker has answered, is gone, or takes too long (which is looked after regularly)."""
        timeout = self.attempts.policy.timeout
        for index in self._wait(None if timeout is None else min(timeout / 4, POLL)):
            try:
                reply = self._workers[index].take()
            except (EOFError, OSError):
                self._lose(index)
                continue
            if reply is not None:
                self._finish(index, reply)
            elif index in self._busy:
                self._busy[index].since = self.attempts.clock()
        if timeout is not None:
            self._end_slow(timeout)

    def _end_slow(self, timeout: float) -> None:
        """End the workers of tasks that take longer than a client may."""
        now = self.attempts.clock()
        for index, entry in list(self._busy.items()):
            if entry.since is not None and now > entry.since + timeout and not self._workers[index].has_answered():
                self._end(index, grace=0.0)
                self._give_up(entry, self.attempts.too_slow)

    def _give_up(self, entry: Entry, reason: str) -> None:
        """Answer in place of a task that no worker has carried out, unless it is to be tried again."""
        entry.worker, entry.tries = None, 0
        settled = entry.attempt.settle(entry.task.lost(reason), None)
        if settled is not None:
            entry.answer, entry.done = settled[0], True
            entry.attempt.decide(reason)

    def _finish(self, index: int, reply: Reply) -> None:
        entry = self._busy.pop(index, None)
        if isinstance(reply.error, ConfigurationError):
            raise reply.error
        if reply.error is not None and not self._workers[index].ready:
            raise RuntimeError(
                f"A worker process could not take over the federation: {reply.error}. {self.out_of_reach}"
            ) from reply.error
        if reply.error is not None:
            raise reply.error
        assert entry is not None
        self.runner.loop.adopt(reply.loop)
        settled = entry.attempt.settle(reply.answer, reply.record)
        entry.worker = None
        if settled is None:
            return
        entry.answer, record = settled
        entry.done = True
        if record is not None and entry.task.client is not None:
            self.store.put(entry.task.client, record)

    def _lose(self, index: int) -> None:
        """Note that a worker is gone. Its task is done again or given up; the next task starts another worker."""
        entry, was_ready = self._busy.get(index), self._workers[index].ready
        how = self._end(index, grace=5.0)
        if not was_ready:
            error = self._lost_at_start(how)
            if error is not None:
                raise error from None
        if entry is None:
            return
        entry.worker, entry.tries = None, entry.tries + was_ready
        who = f"client '{entry.task.client}'" if entry.task.client is not None else "an evaluation"
        if entry.tries < TRIES:
            warnings.warn(self._lost_at_work(who, how), stacklevel=2)
        else:
            self._give_up(entry, self._too_many(entry.tries, how))

    # -- life -----------------------------------------------------------------------------------------------------
    def _end(self, index: int, grace: float) -> str:
        self._busy.pop(index, None)
        return self._workers.pop(index).end(grace)

    def _forget(self) -> None:
        """End the workers of unfinished tasks, since these may take long."""
        for index in list(self._busy):
            self._end(index, grace=0.0)

    def _end_all(self) -> None:
        """End the workers, and every call of :meth:`map` that is not at its end."""
        self._turn += 1
        for index in list(self._workers):
            self._end(index, grace=0.0 if index in self._busy else 5.0)


class _Source:
    """The tasks to come, drawn as far ahead as their answers may be held."""

    def __init__(self, tasks: Iterable[Task[Any]], runner: ClientRuntime, attempts: Retries, at_least: int) -> None:
        self._tasks = iter(tasks)
        self._runner = runner
        self._attempts = attempts
        self._at_least = at_least
        self._largest = 1
        self.exhausted = False

    def fill(self, window: deque[Entry]) -> bool:
        """Draw tasks into `window`; return True if there is any in it."""
        while not self.exhausted and len(window) < max(self._at_least, HELD_BYTES // self._largest):
            task = next(self._tasks, None)
            if task is None:
                self.exhausted = True
            else:
                self._largest = max(self._largest, task.num_bytes)
                entry = Entry(task, task.cost(self._runner), self._attempts.of(task))
                left_out = entry.attempt.left_out_answer()
                if left_out is not None:
                    entry.answer, entry.done = left_out[0], True
                window.append(entry)
        return bool(window)


class ProcessesEngine(WorkersEngine):
    """Carries out tasks on worker processes. They start at the first task and stay until :meth:`close`.

    Args:
        runner: The client side of the federation, sent to each worker once.
        store: The clients' records.
        workers: Number of processes. `None`: as many as there are cores, but not more than clients.

    """

    out_of_reach = (
        'What is defined in an interactive session, or under `if __name__ == "__main__":`, is not there for other '
        "processes: define it at the top of a file, or use engine='sequential'."
    )

    def __init__(self, runner: ClientRuntime, store: ClientRecords, workers: int | None = None) -> None:
        super().__init__(runner, store, workers or usable_cores())
        self._workers_requested = workers
        self._setup: Setup | None = None
        self._broadcast: Broadcast[Arena] | None = None

    def beside(self, runner: ClientRuntime) -> ProcessesEngine:
        return ProcessesEngine(runner, ClientRecords(), self._workers_requested)

    def _start(self) -> None:
        if self._setup is not None:
            return
        self._setup, self._broadcast = Setup(self.runner), Broadcast(Arena())
        atexit.register(self.close)  # runs before multiprocessing waits for its processes

    def _idle(self, needed: int) -> list[int]:
        indices = [index for index in range(self.width) if index not in self._busy][:needed]
        for index in indices:
            if index not in self._workers:
                assert self._setup is not None and self._broadcast is not None
                gpu = own_gpu(index, self.runner.settings.trainer_arguments.get("devices"))
                self._workers[index] = Worker(self._setup, self._broadcast, gpu)
        return indices

    def _wait(self, timeout: float | None) -> Sequence[int]:
        indices = {cast(Worker, self._workers[index]).connection: index for index in self._busy}
        ready_connections: list[Any] = connection.wait(list(indices), timeout)
        return [indices[ready] for ready in ready_connections]

    def _lost_at_start(self, how: str) -> Exception:
        return RuntimeError(
            f"A worker process ended while it started ({how}); what it said is above. If this is a script, put "
            'what starts the training under `if __name__ == "__main__":`, because every worker imports the script.'
        )

    def _lost_at_work(self, who: str, how: str) -> str:
        return f"A worker process ended ({how}) at work on {who}, which is done again."

    def _too_many(self, tries: int, how: str) -> str:
        return (
            f"{tries} worker processes ended while they worked on it, the last by {how} "
            "(the system kills a process by SIGKILL when memory runs out: try fewer workers)"
        )

    def _forget(self) -> None:
        super()._forget()
        if self._broadcast is not None:
            self._broadcast.clear()

    def close(self) -> None:
        """End the workers. The engine starts new ones if it is used again."""
        atexit.unregister(self.close)
        self._end_all()
        if self._setup is not None and self._broadcast is not None:
            self._setup.arena.close()
            self._broadcast.arena.close()
        self._setup = self._broadcast = None
