"""The engine of sites: tasks go as bytes to where the clients are, and answers come back as bytes.

Nothing is pickled on the way. A client's record stays at its site; the server knows the version that is in force
(:class:`~fedlightning.engines.sites.store.SiteStore`) and names it with each task, so that it can go back to an earlier one.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_info

from fedlightning.datamodules.base import in_order
from fedlightning.engines.sites.agreement import agreement, digest, state_digest
from fedlightning.engines.sites.link import Link
from fedlightning.engines.sites.meeting import Meeting, Reply
from fedlightning.engines.sites.store import SiteStore
from fedlightning.errors import ConfigurationError
from fedlightning.federation.checks import CheckThere
from fedlightning.federation.deploy import Deployed
from fedlightning.federation.engine import Engine, Task, Visit
from fedlightning.federation.failures import Attempt
from fedlightning.federation.sanity import Tried, TryStep
from fedlightning.federation.store import Note
from fedlightning.messages import Update
from fedlightning.scoring.rows import Row
from fedlightning.scoring.tasks import ScoreClient, ScoreModel
from fedlightning.tensors import module_state
from fedlightning.visit.description import Description, Part
from fedlightning.visit.runner import LocalRunner

POLL = 1.0
"""Seconds between looks at who is connected and who takes too long."""
AHEAD = 4
"""Tasks for each site that are drawn ahead of the answers: a site with several clients finds the next task waiting."""
PATIENCE = 600.0
"""Seconds that all sites have to answer before round 1."""

Answer = TypeVar("Answer")


@dataclass(eq=False)
class Entry:
    """A task and its progress.

    Attributes:
        task: The task.
        client: Whose site carries it out.
        attempt: Its tries.
        number: Names it to the site, which knows a task that comes again.
        since: When it was first to be sent, on the clock of `attempts`.
        sent: Name of the reply that is waited for.
        done: Whether its answer is there.
        answer: The answer.
    """

    task: Task[Any]
    client: str
    attempt: Attempt
    number: str = ""
    since: float | None = None
    sent: str | None = None
    done: bool = False
    answer: Any = None


class SitesEngine(Engine):
    """Carries out tasks at sites: a site works on one after another, different sites at the same time.

    Args:
        runner: The server's half of the federation: it builds the server's modules. Its data are not looked at.
        store: The versions of the clients' records.
        link: The connection.
    """

    data_here = False
    shares_disk = False

    def __init__(self, runner: LocalRunner, store: SiteStore, link: Link) -> None:
        super().__init__(runner, store)
        self.versions = store
        self.meeting = Meeting(link, self._hello, self._session, lambda: self.attempts.clock())
        self._wanted = link.expected
        self._stage = "fit"
        self._left_out: list[str] = []
        self._weights: tuple[Any, str] | None = None
        self._window: deque[Entry] = deque()

    @property
    def width(self) -> int:
        return max(len(self.meeting.names), 1)

    # -- the run, as sites must know it --------------------------------------------------------------------------------
    def _about(self) -> dict[str, Any]:
        blueprint = self.runner.blueprint
        return {
            "run": self.versions.run,
            "agreement": agreement(blueprint),
            "assigned": dict(blueprint.assigned),
            "stage": self._stage,
            "left_out": list(self._left_out),
        }

    def _session(self) -> str:
        template = self.runner.blueprint.template
        if self._weights is None or self._weights[0] is not template:  # it is replaced, never trained
            self._weights = template, state_digest(module_state(template))
        return digest(self._about(), self._weights[1])

    def _hello(self) -> dict[str, Any]:
        weights = module_state(self.runner.blueprint.template)
        return {"do": "hello", "session": self._session(), "template": weights, **self._about()}

    # -- the data ----------------------------------------------------------------------------------------------------
    def set_up(self, stage: str) -> None:
        self._stage = stage
        said = ""
        while len(self.meeting.names) < self._wanted:
            if (waits := self.meeting.waits(self._wanted)) != said:
                rank_zero_info(said := waits)
            self._listen()

    def leave_out(self, clients: Collection[str]) -> None:
        if clients:
            self.runner.know(self.runner.described.without(clients))
            self._left_out += clients

    def describe(self, leave_out: Collection[str] = (), parts: Collection[Part] = ()) -> Description:
        found = self._ask_all({"do": "describe", "leave_out": list(leave_out), "parts": list(parts)})
        own: list[Description] = []
        for name, answer in found.items():
            if not isinstance(answer, Description) or set(answer.sizes) - {
                *self.meeting.clients[name],
                *self._left_out,
            }:
                raise ConfigurationError(f"Site '{name}' does not describe its data as a site does.")
            own.append(answer)
        everybody = in_order([client for one in own for client in one.client_ids])
        place = {client: number for number, client in enumerate(everybody)}
        own.sort(key=lambda one: min((place[client] for client in one.client_ids), default=len(place)))
        merged = Description.merged(own)
        if not leave_out:
            self.runner.know(merged)
        return merged

    def public(self) -> tuple[Any, str]:
        return None, type(self.runner.data).__name__

    def _listen(self) -> list[Reply]:
        """Greet who has come, and return replies.

        Raises:
            ConfigurationError: If a site refuses the run before it begins.
        """
        self.meeting.greet()
        found = self.meeting.receive(POLL)
        for node in self.meeting.refused:
            raise ConfigurationError(f"A site refuses the run: {self.meeting.why(node)}")
        return found

    def _ask_all(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Ask all sites, and return their answers by name.

        Raises:
            ConfigurationError: If a site refuses, or does not answer.
        """
        ended = self.attempts.clock() + PATIENCE
        names = list(self.meeting.names.values())
        answers: dict[str, Any] = {}
        waits: dict[str, str] = {}  # name of the site by that of its reply
        while silent := [name for name in names if name not in answers]:
            for node, name in self.meeting.names.items():
                if name in silent and name not in waits.values() and self.meeting.is_ready(node):
                    waits[self.meeting.send(node, asked)] = name
            for reply in self._listen():
                name = waits.pop(reply.number, "")
                if "refused" in reply.content:
                    raise ConfigurationError(f"Site '{name}': {reply.content['refused']}")
                if "answer" in reply.content:  # else it has started anew, and is asked again
                    answers[name] = reply.content["answer"]
            if self.attempts.clock() > ended:
                raise ConfigurationError(f"Site '{silent[0]}' has not answered within {PATIENCE:g} seconds.")
        return {name: answers[name] for name in names}

    # -- work --------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Refuse what cannot be carried out at sites.

        Raises:
            ConfigurationError: With a sentence.
        """
        if self.attempts.policy.timeout is None:
            raise ConfigurationError(
                "client_timeout=None, but a site that is gone would be waited for for ever. Set client_timeout to the "
                "seconds that a visit may take at most, with the way there and back."
            )

    def beside(self, runner: LocalRunner) -> Engine:
        raise ConfigurationError("engine='flower' does not onboard new clients: let them join the run as sites.")

    def ask(self, task: Task[Answer]) -> Answer:
        found = list(self.map([task]))
        return found[0]

    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        """Yield the answers of tasks in their order; see :meth:`fedlightning.federation.engine.Engine.map`."""
        source, window, is_over = iter(tasks), self._window, False
        for entry in window:
            self._unsend(entry)
        window.clear()
        while window or not is_over:
            while not is_over and len(window) < AHEAD * self.width:
                task = next(source, None)
                if task is None:
                    is_over = True
                else:
                    window.append(self._entry(task))
            if not window:
                return
            self._hand_out()
            if window[0].done:
                yield window.popleft().answer
            else:
                self._collect()

    def _entry(self, task: Task[Any]) -> Entry:
        client = task.client if task.client is not None else getattr(task, "clients", ("",))[0]
        entry = Entry(task, client, self.attempts.of(task))
        left_out = entry.attempt.left_out_answer()
        if left_out is not None:
            entry.answer, entry.done = left_out[0], True
        return entry

    def _hand_out(self) -> None:
        """Send tasks to their sites; those of one client follow one another: the second needs the record of the first."""
        before: set[str] = set()
        for entry in self._window:
            if entry.done:
                continue
            if entry.since is None:
                entry.since, entry.number = self.attempts.clock(), uuid.uuid4().hex
            node = self.meeting.where.get(entry.client)
            if entry.sent is None and entry.client not in before and node is not None and self.meeting.is_ready(node):
                entry.sent = self.meeting.send(node, self._request(entry))
            before.add(entry.client)

    def _request(self, entry: Entry) -> dict[str, Any]:
        versions = self.versions
        of = entry.task.client
        return {
            "do": "task",
            "task": entry.task,
            "number": entry.number,
            "version": "" if of is None else versions.version(of),
            "keep": None if of is None else versions.needed(of),
        }

    def _collect(self) -> None:
        self.meeting.greet()
        by_number = {entry.sent: entry for entry in self._window if entry.sent is not None}
        for reply in self.meeting.receive(POLL):
            entry = by_number.get(reply.number)
            if entry is None:
                continue
            entry.sent = None
            if "unknown" in reply.content:  # it has started anew, and is sent the task again
                continue
            if "refused" in reply.content:
                self._give_up(entry, f"its site refuses: {reply.content['refused']}", lasts=False)
            else:
                self._finish(entry, reply.content)
        self.meeting.ping()
        for entry in self._window:
            node = self.meeting.where.get(entry.client)
            if entry.sent is not None and node not in self.meeting.names:  # the connection is gone: wait for another
                self._unsend(entry)
        timeout = self.attempts.policy.timeout
        for entry in list(self._window):
            late = timeout is not None and entry.since is not None and self.attempts.clock() > entry.since + timeout
            if late and not entry.done:
                self._unsend(entry)
                self._give_up(entry, self.attempts.too_slow, lasts=True)

    def _unsend(self, entry: Entry) -> None:
        if entry.sent is not None:
            self.meeting.forget(entry.sent)
            entry.sent = None

    def _finish(self, entry: Entry, content: dict[str, Any]) -> None:
        answer, version, note = content["answer"], content.get("version"), content.get("note")
        reason = _fault(entry.task, answer)
        if reason is None and version is not None and not (_is_version(version) and _is_note(note)):
            reason = "its site names no version of its record"
        if reason is not None:
            self._give_up(entry, reason, lasts=False)
            return
        loop = self.runner.loop
        if loop.reason is None and isinstance(content.get("loop"), str):
            loop.reason = content["loop"]
        for other in self._window:  # the time of a task begins when those before it at its site are done
            if not other.done and self.meeting.where.get(other.client) == self.meeting.where.get(entry.client):
                other.since = self.attempts.clock()
        settled = entry.attempt.settle(answer, None if version is None else (version, note))
        if settled is None:
            entry.since = None
            return
        entry.answer, entry.done = settled[0], True
        if settled[1] is not None and entry.task.client is not None:
            kept, about = settled[1]
            self.versions.keep(entry.task.client, kept, Note(**(about or {})))

    def _give_up(self, entry: Entry, reason: str, lasts: bool) -> None:
        """Answer in the place of a site; `lasts`: another run would not meet the reason, so it is noted on disk."""
        settled = entry.attempt.settle(entry.task.lost(reason), None)
        entry.since = None
        if settled is not None:
            entry.answer, entry.done = settled[0], True
            if lasts:
                entry.attempt.decide(reason)

    def close(self) -> None:
        for entry in self._window:
            self._unsend(entry)
        self._window.clear()


def _fault(task: Task[Any], answer: Any) -> str | None:
    """Return what is wrong with an answer before the server's door looks at it; `None` if nothing is."""
    if isinstance(task, Visit):
        return None if isinstance(answer, Update) else f"its site answers with a {type(answer).__name__}"
    if isinstance(task, ScoreModel | ScoreClient):
        if not isinstance(answer, list) or not all(isinstance(row, Row) for row in answer):
            return f"its site answers with a {type(answer).__name__}, not with scores"
        of = {task.client} if isinstance(task, ScoreClient) else set(task.clients)
        asked = (task.scored.round, task.scored.stage, task.scored.model, task.scored.checkpoint)
        if any(row.client not in of or (row.round, row.stage, row.model, row.checkpoint) != asked for row in answer):
            return "its site answers with scores that were not asked for"
        return None
    if isinstance(task, TryStep):
        return None if isinstance(answer, Tried) else f"its site answers with a {type(answer).__name__}"
    if isinstance(task, CheckThere):
        fits = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str | None)
        texts = fits and isinstance(answer[1], list) and all(isinstance(text, str) for text in answer[1])
        return None if texts else f"its site answers with a {type(answer).__name__}"
    if not isinstance(answer, Deployed) or answer.client != task.client or answer.module is not None:
        return "its site does not say what became of its model"
    return None


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isalnum() and len(value) <= 64


def _is_note(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"is_personal", "checkpoints"}:
        return False
    kept = value["checkpoints"]
    return (
        isinstance(value["is_personal"], bool)
        and isinstance(kept, dict)
        and all(
            isinstance(key, str)
            and isinstance(entry, dict)
            and {name: type(part) for name, part in entry.items()} == {"name": str, "stage": str, "round": int}
            for key, entry in kept.items()
        )
    )
