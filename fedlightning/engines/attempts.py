"""What becomes of a client that fails: tried again, left out, or the end of the run.

Engines ask :class:`Retries` before and after each try of a task. A try that failed has changed nothing (neither the
client's record nor a random generator that anybody else draws from), so a second try that succeeds has the result of a
run without the failure.

Two failures are decided by the machine and not by the client's code: an answer that did not come in time, and a worker
process that was killed. A run that goes on from an earlier state would not meet them again, so they are noted at once
(:class:`LeftOut`), and rounds that are done again leave the same clients out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fedlightning.options import FailurePolicy

if TYPE_CHECKING:
    from fedlightning.engines.contract import AcceptsUpdates, Task

Answer = TypeVar("Answer")
Record = TypeVar("Record")
WITHOUT = "the run goes on without its site until that is back"
"""What is said of a task that is given up at once, since its site did not answer before."""


class FederationError(RuntimeError):
    """A round that cannot be finished, because of clients that failed. The state of the rounds before is intact."""


class ClientFailedError(FederationError):
    """A client failed, and `failures.on_error="stop"`."""


class TooFewClientsError(FederationError):
    """Fewer clients than `failures.min_clients` contributed to a round."""


class ClientTimeoutError(FederationError):
    """A client took longer than `failures.timeout`, in a process that cannot end it without ending the run."""


def stop_at(policy: FailurePolicy, reason: str, when: str) -> None:
    """End the run where one failure is to end it."""
    if policy.on_error == "stop":
        raise ClientFailedError(
            f"{when}: {reason.rstrip('.')}. failures.on_error='stop' ends the run at the first client that fails; the "
            "state of the rounds before is intact, and resume goes on from there."
        )


def add_site_name(reason: str, client: str, site: str | None) -> str:
    """Return a reason that names the client's site too, where that is called otherwise than the client.

    Example:
        >>> add_site_name("client 'a' failed: KeyError: 'x'", "a", "cleveland")
        "client 'a' at site 'cleveland' failed: KeyError: 'x'"
    """
    if site in (None, client) or f"at site '{site}'" in reason:
        return reason
    return reason.replace(f"client '{client}'", f"client '{client}' at site '{site}'", 1)


def sort_failures(failures: Iterable[Mapping[str, Any]], clients: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return failures by round and client, so that the order does not tell how fast which worker was."""
    place = {client: number for number, client in enumerate(clients)}
    return sorted(failures, key=lambda failure: (failure["round"], place.get(failure["client"], len(place))))


Address = tuple[int, str, str, int]
"""Of a task: the round from 1, what is done, the client, and how often the round has done that before."""


class LeftOut:
    """Clients that were left out because of the machine, in memory.

    Attributes:
        reasons: Why, for every decision that holds for a round that is done again.
    """

    def __init__(self) -> None:
        self.reasons: dict[Address, str] = {}

    def load(self, rounds_done: int) -> None:
        """Read what was decided of the rounds after `rounds_done`."""

    def add(self, address: Address, reason: str) -> None:
        """Note a decision that holds if the round is done again."""

    def undo(self, round: int) -> None:
        """Forget what was decided in a round."""
        self.reasons = {address: reason for address, reason in self.reasons.items() if address[0] != round}


@dataclass
class TaskTries:
    """The tries of one task.

    Attributes:
        owner: Knows the policy.
        task: The task.
        address: Its address in the run.
        tries: Tries that failed.
    """

    owner: Retries
    task: Task[Any]
    address: Address
    tries: int = 0

    @property
    def left_out(self) -> str | None:
        """Reason why the task is not tried: it was left out when this round was done before the run was resumed."""
        return self.owner.left_out.reasons.get(self.address)

    def left_out_answer(self) -> tuple[Any, None] | None:
        """Return the answer of a task that is left out, in the form of :meth:`settle`; `None` if it is to be tried."""
        reason = self.left_out
        return None if reason is None else (self.task.lost(reason), None)

    def settle(self, answer: Answer, record: Record) -> tuple[Answer, Record | None] | None:
        """Check an answer that has arrived. Return it with the record to keep, or `None` if the task is to be tried again."""
        arrived = self.owner.accept(self.task, answer)
        failed = self.task.failure(arrived)
        if failed is not None:
            self.tries += 1
            policy = self.owner.policy
            if self.tries < policy.tries:
                client, reason = failed
                self.owner.note(client, reason, self.address[1], f"tried again ({self.tries + 1} of {policy.tries})")
                return None
        return arrived, record if arrived is answer else None  # a client whose update is refused stays as it was

    def decide(self, reason: str) -> None:
        """Note that the task was given up for a reason that another run would not meet."""
        if self.owner.policy.on_error != "stop":
            self.owner.left_out.add(self.address, reason)


class Watch(Protocol):
    """Watches how long an engine's own thread is at work on clients."""

    def watching(self, clients: Sequence[str], allowance: int = 1) -> AbstractContextManager[None]:
        """Return a context in which the thread is at work on clients, with the time of `allowance` of them."""

    def close(self) -> None:
        """End the watching."""


class Unwatched:
    """Lets clients take their time."""

    def watching(self, clients: Sequence[str], allowance: int = 1) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""


def _nobody(client: str, reason: str, where: str, decision: str) -> None:
    """Tell nobody of a failure."""


@dataclass
class Retries:
    """What an engine asks about tries.

    Attributes:
        policy: The trainer's argument `failures`.
        left_out: Tasks that are left out for reasons of the machine.
        note: Is told of a failure that is tried again: client, reason, where, decision.
        server: Accepts the answers to tasks on arrival, or says why it refuses them; `None`: they are taken as they come.
        clock: Seconds; a test brings its own.
        watch: Ends the run where a client in this process takes too long.
    """

    policy: FailurePolicy = field(default_factory=FailurePolicy)
    left_out: LeftOut = field(default_factory=LeftOut)
    note: Callable[[str, str, str, str], None] = _nobody
    server: AcceptsUpdates | None = None
    clock: Callable[[], float] = time.monotonic
    watch: Watch = field(default_factory=Unwatched)
    _counts: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    _round: int = -1

    def of(self, task: Task[Any]) -> TaskTries:
        """Return the tries of a task that has just been drawn. Tasks are drawn in the same order in every engine."""
        address = task.address
        if address[0] != self._round:
            self._counts.clear()
            self._round = address[0]
        self._counts[address] += 1
        return TaskTries(self, task, (*address, self._counts[address]))

    def accept(self, task: Task[Any], answer: Any) -> Any:
        """Return an answer that has arrived as the server takes it."""
        accept = getattr(task, "accept", None)  # only updates are refused
        return answer if accept is None or self.server is None else accept(self.server, answer)

    @property
    def too_slow(self) -> str:
        """Reason of a task that was ended because of its time."""
        return f"no answer within failures.timeout={self.policy.timeout:g} seconds"
