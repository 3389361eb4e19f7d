"""Who is connected, and requests and replies: sites are greeted, and those again that have forgotten."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from fedlightning.client.data_summary import DataSummary
from fedlightning.errors import warn
from fedlightning.sites.agreement import CODE, versions
from fedlightning.sites.link import Link
from fedlightning.sites.status import NAME, printable
from fedlightning.wire import Limits, WireError, read, write

PING = 10.0
"""Seconds after which a site that is at work is asked whether it still knows the run."""
SKEW = 2.0
"""Seconds by which clocks may differ, as far as a greeting tells."""
ANEW = 30.0
"""Seconds after which a site that is refused is greeted again: it may have been mended under the same name."""
LOST = 600.0
"""Seconds after which such a question counts as lost, where nothing else is asked."""
SENTENCE = 2000
"""Characters of what a site says that are kept."""


@dataclass
class Reply:
    """What came back.

    Attributes:
        node: The site that it came from.
        number: Name of the reply, as :meth:`Connections.send` returned it.
        content: The reply; has `answer`, `refused` or `unknown`: the site does not know the run, or was not reached.
    """

    node: str
    number: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A request whose reply is waited for.

    Attributes:
        node: Where it was sent.
        what: A greeting, a question whether the node knows the run, what a node is told that is refused, or a task.
        session: The session that a greeting offers.
        sent: When; seconds since 1970.
    """

    node: str
    what: Literal["hello", "ping", "notice", "task"]
    session: str = ""
    sent: float = field(default_factory=time.time)


@dataclass
class Connections:
    """The sites of a run.

    Args:
        link: The connection.
        hello: Makes the first request of a run: all that a site must know. Its `session` names it.
        session: Returns the name of the session that holds now.
        clock: Seconds.
        limits: Largest replies that are accepted.

    Attributes:
        names: Name of each site that takes part, by the node that the connection knows it as.
        where: Node of each client.
        clients: Clients of each site, by its name.
        summaries: What each site has told of its data, by its name, and the session in which it did.
        relied: A session, and what the run relies on of that which sites told in it, by their names: one that comes back
            must tell the same.
        refused: Why a node does not take part.
        since: When each site that is here came, or came anew, by its name; seconds since 1970.
        last_answers: When each site last answered, by its name.
        allow_other_code: Whether a site may have other code under the same names.
        answers: How often each site has answered or was greeted, by its name.
    """

    link: Link
    hello: Callable[[], Mapping[str, Any]]
    session: Callable[[], str]
    clock: Callable[[], float]
    limits: Limits | None = None
    names: dict[str, str] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    clients: dict[str, list[str]] = field(default_factory=dict)
    summaries: dict[str, tuple[str, Any]] = field(default_factory=dict)
    relied: tuple[str, Mapping[str, Any]] = ("", MappingProxyType({}))
    refused: dict[str, str] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    last_answers: dict[str, float] = field(default_factory=dict)
    allow_other_code: bool = False
    answers: Counter[str] = field(default_factory=Counter)
    _replaced: dict[str, str] = field(default_factory=dict)  # by node: a site that is here by another node now
    _lost: list[Reply] = field(default_factory=list)  # to return with the next ones
    _greeted: dict[str, str] = field(default_factory=dict)  # the session that a node knows
    _requests: dict[str, Request] = field(default_factory=dict)  # by the name of the reply
    _heard: dict[str, float] = field(default_factory=dict)  # when something was last sent to or came from a node

    def is_ready(self, node: str | None) -> bool:
        """Whether a node knows the run as it is now."""
        return node is not None and self._greeted.get(node) == self.session()

    def waits(self, wanted: int) -> str:
        """Return a sentence on who is here and who is not."""
        here = ", ".join(sorted(self.names.values())) or "none"
        sentence = f"Waiting for {wanted} site{'s' if wanted > 1 else ''}. Here: {here}."
        silent = len(set(self.link.nodes()) - set(self.names))
        if silent:
            sentence += f" Connected, but without an answer yet: {silent}."
        missing = sorted(self.link.missing())
        return f"{sentence} Not connected: {', '.join(missing)}." if missing else sentence

    def greet(self) -> int:
        """Send a hello to every connected node that does not know the run as it is now; forget those that are gone."""
        session, nodes = self.session(), set(self.link.nodes())
        for node in [node for node in self.names if node not in nodes]:
            self._leave(self.names.pop(node))
            self._greeted.pop(node, None)
        self.refused = {node: why for node, why in self.refused.items() if node in nodes}  # it may come back mended
        here = set(self.names.values())
        self._replaced = {node: name for node, name in self._replaced.items() if name in here}
        self._requests = {
            number: request
            for number, request in self._requests.items()
            if request.node in nodes or request.what not in ("hello", "notice")
        }
        greeted = self._find_unanswered("hello")
        for node in sorted(nodes - set(self._replaced)):
            is_refused = self.refused.get(node, "").startswith(session)
            waits = node in greeted or (is_refused and self.clock() - self._heard.get(node, 0.0) < ANEW)
            if self._greeted.get(node) != session and not waits:
                self._greeted.pop(node, None)
                self._post(node, self.hello(), "hello", session)
        return len(self._find_unanswered("hello")) - len(greeted)

    def _find_unanswered(self, what: str) -> list[str]:
        """Return the nodes that have not replied to a kind of request yet."""
        return [request.node for request in self._requests.values() if request.what == what]

    def send(self, node: str, request: Mapping[str, Any]) -> str:
        """Send a request to a node that is ready, and return the name of its reply."""
        return self._post(node, {**request, "session": self.session()}, "task")

    def ping(self, absent: Iterable[str] = ()) -> None:
        """Ask nodes that are silent for a while whether they still know the run: one that has started anew does not."""
        now = self.clock()
        for node in absent:
            if now - self._heard.get(node, now) > LOST:
                self._drop(node, "ping")
            self._ask(node)
        for node in set(self._find_unanswered("task")):
            if now - self._heard.get(node, now) > PING:
                self._ask(node)

    def _ask(self, node: str) -> None:
        if node not in self._find_unanswered("ping") and self.is_ready(node):
            self._post(node, {"do": "ping", "session": self.session()}, "ping")

    def _drop(self, node: str, what: str) -> list[str]:
        """Wait no more for the replies of a node to a kind of request; return their names."""
        dropped = [number for number, request in self._requests.items() if (request.node, request.what) == (node, what)]
        for number in dropped:
            del self._requests[number]
        return dropped

    def receive(self, timeout: float) -> list[Reply]:
        """Return replies to :meth:`send`. A node that does not know the run answers all that it was sent with `unknown`."""
        replies: list[Reply] = []
        for number, data in self.link.receive(set(self._requests), timeout):
            request = self._requests.get(number)
            if request is None or request.what == "notice":
                self.forget(number)
                continue
            node, content = request.node, self.read(data)
            self._heard[node] = self.clock()
            is_lost = "lost" in content  # this one only, on the way
            if node in self.names and not is_lost:
                self.last_answers[self.names[node]] = time.time()
                self.answers[self.names[node]] += 1
            if request.what == "task" and "unknown" in content and not is_lost:
                replies += self._forgotten(node)
                continue
            self.forget(number)
            if request.what == "task":
                replies.append(Reply(node, number, {"unknown": ""} if is_lost else content))
            elif request.what == "hello" and not is_lost:
                self._welcome(node, request, content)
            elif "unknown" in content and not is_lost:
                replies += self._forgotten(node)
        replies, self._lost = [*replies, *self._lost], []
        return replies

    def _forgotten(self, node: str) -> list[Reply]:
        """Note that a node does not know the run: it is greeted again."""
        self._greeted.pop(node, None)
        self.since.pop(self.names.get(node, ""), None)
        return self._lose(node)

    def _lose(self, node: str) -> list[Reply]:
        """Answer all that a node was sent with `unknown`."""
        return [Reply(node, number, {"unknown": ""}) for number in self._drop(node, "task")]

    def tell(self, timeout: float) -> None:
        """Wait until sites that are refused have been told why."""
        ends = self.clock() + timeout
        while self._find_unanswered("notice") and self.clock() < ends:
            self.greet()
            self.receive(min(timeout, 1.0))

    def forget(self, number: str) -> None:
        """Wait for a reply no more."""
        self._requests.pop(number, None)

    def _post(
        self, node: str, request: Mapping[str, Any], what: Literal["hello", "ping", "notice", "task"], session: str = ""
    ) -> str:
        self._heard[node] = self.clock()
        number = self.link.send(node, write(dict(request)))
        self._requests[number] = Request(node, what, session)
        return number

    def read(self, data: bytes) -> dict[str, Any]:
        """Return what a reply, or the part of one that answers one task, says; of nonsense, a refusal."""
        try:
            content = read(data, self.limits)
        except WireError as error:
            return {"refused": f"{error}".rstrip(".")}
        if isinstance(content, dict) and isinstance(content.get("refused"), str):
            content["refused"] = printable(content["refused"], SENTENCE)
        is_valid = isinstance(content, dict) and any(
            name in content for name in ("answer", "refused", "unknown", "lost")
        )
        if not is_valid or not isinstance(content.get("refused", ""), str):
            return {"refused": "its reply says nothing"}
        return {**content, "refused": content["refused"].rstrip(".")} if "refused" in content else content

    def _welcome(self, node: str, request: Request, content: dict[str, Any]) -> None:
        answer, session = content.get("answer"), request.session
        reason = content.get("refused")
        if isinstance(answer, dict) and isinstance(answer.get("name"), str) and _is_names(answer.get("clients")):
            reason = self._objection(node, answer["name"], answer["clients"]) or self._others(session, answer)
            reason = reason or self._other_code(answer["name"], answer.get("other_code"))
            if reason is None:
                if answer["name"] not in self.clients:
                    self._compare_versions(answer["name"], answer.get("versions"))
                    _compare_clocks(answer["name"], answer.get("time"), request.sent)
                self._enter(node, answer["name"])
                self.clients[answer["name"]] = answer["clients"]
                self.where |= dict.fromkeys(answer["clients"], node)
                self._greeted[node] = session
                if answer.get("data") is not None:
                    self.summaries[answer["name"]] = session, answer["data"]
                self.refused.pop(node, None)
                return
        self.turn_away(node, reason or "it does not say who it is")
        if "refused" not in content:  # else it knows
            self._post(node, {"do": "turned away", "session": session, "why": self.why(node)}, "notice")

    def turn_away(self, node: str, why: str) -> None:
        """Let a site take no part, also one that did, until it is greeted again and mended."""
        before, self.refused[node] = self.refused.get(node), f"{self.session()} {why}"
        self._greeted.pop(node, None)
        if self.refused[node] != before:
            warn(f"A site does not take part: {why}")

    def _compare_versions(self, name: str, theirs: Any) -> None:
        """Say where a site computes with another torch: that is not a reason to refuse it, but its bits may be others."""
        own_versions = versions()
        if not isinstance(theirs, dict) or theirs == own_versions:
            return
        other_versions = "; ".join(
            f"{package} {printable(str(theirs.get(package)), NAME)}, the server {version}"
            for package, version in own_versions.items()
            if theirs.get(package) != version
        )
        warn(f"Site '{name}' has {other_versions}: its numbers may differ in the last bits from those of one process.")

    def _objection(self, node: str, name: str, clients: list[str]) -> str | None:
        """Return why a site cannot take part under this name with these clients."""
        if not name.strip() or name != printable(name, NAME):
            return (
                f"'{printable(name, NAME)}' is not a name of a site: it is a printable text of 1 to {NAME} characters"
            )
        owner = self.link.owner(node)
        if owner not in (None, name):
            return (
                f"site '{owner}', by its key, says that it is '{name}': start it with --name {owner}, or with the key of "
                f"'{name}'"
            )
        others = {self.names[peer] for client, peer in self.where.items() if client in clients and peer in self.names}
        if others - {name}:
            return f"site '{name}' has a client that site '{min(others - {name})}' has already"
        same = any(peer != node and other_name == name for peer, other_name in self.names.items())
        if same and set(clients) != set(self.clients[name]):
            return f"another site is here under the name '{name}', with other clients: give each site a name of its own"
        return None

    def _others(self, session: str, answer: Mapping[str, Any]) -> str | None:
        """Return why a site cannot come back with these data: the run has begun with others."""
        since, summaries = self.relied
        before = summaries.get(answer["name"]) if since == session else None
        if before is None or answer.get("data") is None or self._compared(answer["data"]) == self._compared(before):
            return None
        return (
            f"site '{answer['name']}' comes back with other clients or data than those with which it began this run, or with "
            "other code of its data module: start it with the same data section and the same files as before"
        )

    def _compared(self, summary: Any) -> Any:
        if not self.allow_other_code or not isinstance(summary, DataSummary):
            return summary
        return replace(summary, splits={part: hashed for part, hashed in summary.splits.items() if part != CODE})

    def _other_code(self, name: str, differing: Any) -> str | None:
        """Return why a site cannot take part that has other code than this server, by its own account."""
        if not differing:
            return None
        some = printable("; ".join(map(str, differing[:5])) if isinstance(differing, list) else differing, SENTENCE)
        if not self.allow_other_code:
            return (
                f"site '{name}' has other code than the server ({some}): start the server with --allow_other_code true"
            )
        warn(f"Site '{name}' has other code than the server ({some}), which is allowed here and there.")
        return None

    def _enter(self, node: str, name: str) -> None:
        """Let a site in. One that has started anew may be connected by its old node for a while: that one is let go."""
        for old in [peer for peer, other_name in self.names.items() if other_name == name and peer != node]:
            del self.names[old]
            self._greeted.pop(old, None)
            self._replaced[old] = name
            self._lost += self._lose(old)
            self.since.pop(name, None)
        self._replaced.pop(node, None)
        self.names[node] = name
        self.last_answers[name] = time.time()
        self.answers[name] += 1
        self.since.setdefault(name, self.last_answers[name])

    def _leave(self, name: str) -> None:
        if name not in self.names.values():
            self.since.pop(name, None)

    def why(self, node: str) -> str:
        """Return why a node does not take part."""
        return self.refused[node].partition(" ")[2]


def _compare_clocks(name: str, there: Any, sent: float) -> None:
    """Say where a site's clock is wrong, or this one: Flower refuses requests by their times, and lines have other times.

    Args:
        name: The site.
        there: What its clock said as it answered.
        sent: What this one said before.
    """
    if type(there) is not float or not math.isfinite(there):
        return
    ahead, behind = there - time.time(), sent - there
    if max(ahead, behind) > SKEW:
        way = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{behind:.0f} s behind"
        warn(
            f"The clock of site '{name}' is at least {way} this machine's. Flower refuses a site that is more than 5 s ahead "
            "or 300 s behind: set both by NTP."
        )


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
