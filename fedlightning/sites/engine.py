"""The engine of sites: tasks go as bytes to where the clients are, and answers come back as bytes.

Nothing is pickled on the way. A client's record stays at its site; the server knows the version that is in force
(:class:`~fedlightning.sites.site_log.SiteStore`) and names it with each task, so that it can go back to an earlier one.

A site that did not answer in time is waited for once, and the run goes on without it until it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from lightning.pytorch.utilities import rank_zero_info

from fedlightning.client.data_summary import DataSummary, Detail
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract.messages import Update
from fedlightning.datamodules.federated_data import sort_clients
from fedlightning.datamodules.held_out import WithoutClients
from fedlightning.datamodules.public_only import public_facts
from fedlightning.engines.attempts import WITHOUT, add_site_name
from fedlightning.engines.contract import Engine, RecordNote, Task
from fedlightning.errors import ConfigurationError
from fedlightning.sites import code_hashes
from fedlightning.sites.agreement import agreement, digest
from fedlightning.sites.connections import PING, Connections, Reply
from fedlightning.sites.link import Link
from fedlightning.sites.message_checks import check_shares, fault, in_lines, is_note, is_version
from fedlightning.sites.server_log import Doing, log_of_server
from fedlightning.sites.site_log import SiteStore
from fedlightning.sites.status import printable, stamped
from fedlightning.sites.task_bounds import describe_task
from fedlightning.sites.task_window import BUDGET, Entry, Window
from fedlightning.tensors import module_state, state_digest


class DataElsewhere(WithoutClients):
    """Stands where a data module stands, in a process that has no data. Whoever asks it for some is told so."""

    def __repr__(self) -> str:
        """Return the class."""
        return f"<{type(self).__name__}>"

    def _refuse(self) -> NoReturn:
        raise ValueError("the clients' data are asked for in the server's process, and they are at their sites")


class UnreachableSites:
    """Knows which sites are not to be waited for.

    A site that was too slow once is asked whether it is there. If it says so, nothing has happened; one that is not
    connected, was refused, or is silent for `PING` seconds more is absent until it answers
    anything, or is greeted again.

    Args:
        connections: The sites.
    """

    def __init__(self, connections: Connections) -> None:
        self._meeting = connections
        self._since: dict[str, tuple[float, int]] = {}  # by site: when it was too slow, and its answers until then

    def mark(self, site: str, now: float) -> None:
        """Note that a site has not answered in time."""
        self._since[site] = now, self._meeting.answers[site]

    def since(self, site: str, now: float) -> float | None:
        """Return since when a site is absent; `None` if it is to be waited for."""
        if site not in self._since:
            return None
        marked, answers = self._since[site]
        if self._meeting.answers[site] != answers:
            del self._since[site]
            return None
        here = site in self._meeting.names.values()
        return None if here and now <= marked + PING else marked

    def to_give_up(self, window: Window, sites: Mapping[str, str], now: float) -> list[Entry]:
        """Return tasks that came when their sites were absent already; none while there is another one to wait for."""
        waiting = [entry for entry in window if not entry.done] if self.marked else []
        absent_entries = []
        for entry in waiting:
            since = self.since(sites.get(entry.client, ""), now)
            if since is None or entry.since is None or entry.since < since:
                return []
            absent_entries.append(entry)
        return absent_entries

    @property
    def marked(self) -> bool:
        """Whether any site has been too slow and has not answered since."""
        return bool(self._since)

    @property
    def nodes(self) -> list[str]:
        """Nodes of marked sites that are connected: they are to be asked."""
        return [node for node, site in self._meeting.names.items() if site in self._since]


POLL = 1.0
"""Seconds between looks at who is connected and who takes too long."""
NOTICE = 15.0
"""Seconds that a site has to take note of why it is refused, before the server ends."""
MENDING = 3600.0
"""Seconds that a site which is refused has to come back mended, while the run waits for it."""
PATIENCE = 600.0
"""Seconds that all sites have to answer before round 1."""

Answer = TypeVar("Answer")


class SitesEngine(Engine):
    """Carries out tasks at sites: a site works on one after another, different sites at the same time.

    Args:
        runner: The server's half of the federation: it builds the server's modules. Its data are not looked at.
        store: The versions of the clients' records.
        link: The connection.
        export: Whether the clients' models are sent to the server when the run ends.
        allow_other_code: Whether a site may have other code under the same names, if it allows that too.
        max_share: The largest share of all training samples that a site may say it has.
    """

    data_here = False
    shares_disk = False
    no_public = (
        "trains on public data, and the server has none. Give `fedlightning serve` a data section with them (class_path: "
        "PublicDataModule, init_args: public: a data set), and each site the same as public: of its own data module; a "
        "share of the clients' samples (public=0.1) cannot be everybody's where data do not leave their sites."
    )

    def __init__(
        self,
        runner: ClientRuntime,
        store: SiteStore,
        link: Link,
        export: bool = False,
        allow_other_code: bool = False,
        max_share: float = 1.0,
    ) -> None:
        super().__init__(runner, store)
        self.brings_models = export
        self.versions = store
        self.connections = Connections(link, self._hello, self._session, lambda: self.attempts.clock())
        self.connections.allow_other_code = allow_other_code
        self._code = code_hashes.of_blueprint(runner.blueprint)
        self.absent, self._max_share = UnreachableSites(self.connections), max_share
        self.log = log_of_server(link.expected)
        self._sites_expected = link.expected
        self._waits_for = ""  # what keeps the run from its beginning, for the log
        self._stage = "fit"
        self._public: dict[str, Any] | None = None
        self._left_out: list[str] = []
        self._totals: dict[str, Any] | None = None
        self._fixed: tuple[Any, dict[str, Any], str] | None = None  # a template, its agreement, a hash of its weights
        self._window = Window()
        self._members: list[str] = []
        self._refused: dict[str, float] = {}  # by node: since when
        self._merged: tuple[str, DataSummary] | None = None

    @property
    def sites(self) -> dict[str, str]:
        return {client: name for name, clients in self.connections.clients.items() for client in clients}

    @property
    def width(self) -> int:
        return max(len(self.connections.names), 1)

    # -- the run, as sites must know it --------------------------------------------------------------------------------
    def _about(self) -> dict[str, Any]:
        blueprint = self.runner.blueprint
        return {
            "run": self.versions.run,
            "agreement": self._of_template()[0],
            "assigned": dict(blueprint.assigned),
            "stage": self._stage,
            "left_out": list(self._left_out),
            "public": self._public,
            "statistics": self._totals,
            "code": self._code,
            "export": self.brings_models,
        }

    def _of_template(self) -> tuple[dict[str, Any], str]:
        blueprint = self.runner.blueprint
        if self._fixed is None or self._fixed[0] is not blueprint.template:  # it is replaced, never trained
            weights = state_digest(module_state(blueprint.template))
            self._fixed = blueprint.template, agreement(blueprint), weights
        return self._fixed[1:]

    def _session(self) -> str:
        return digest(self._about(), self._of_template()[1])

    def _hello(self) -> dict[str, Any]:
        session, weights = self._session(), module_state(self.runner.blueprint.template)
        return {"do": "hello", "session": session, "template": weights, **self._about()}

    def _find_summary(self, session: str) -> DataSummary | None:
        return self._merged[1] if self._merged is not None and self._merged[0] == session else None

    # -- the data ----------------------------------------------------------------------------------------------------
    def set_up(self, stage: str) -> None:
        self._stage, self._fixed = stage, None
        self.runner.set_up(stage)  # public data, if there are any
        self._public = public_facts(self.runner.data)
        last_sentence = ""
        while len(self.connections.names) < self._sites_expected:
            if (waits := self.connections.waits(self._sites_expected)) != last_sentence:
                rank_zero_info(stamped(last_sentence := waits))
            self._waits_for = f"waits for sites: {len(self.connections.names)} of {self._sites_expected} are here"
            self._listen()
        self._waits_for = ""

    def leave_out(self, clients: Collection[str]) -> None:
        if clients:
            self.runner.know(self.runner.described.exclude(clients))
            self._left_out += clients

    def measure(self) -> dict[str, dict[str, Any]]:
        """Ask every site for what its clients that train give for the statistics before round 1."""
        sums_by_client: dict[str, dict[str, Any]] = {}
        for name, answer in self._ask_all({"do": "measure"}).items():
            if not isinstance(answer, dict) or set(answer) - set(self.connections.clients[name]):
                raise ConfigurationError(f"Site '{name}' does not give the statistics of its clients.")
            sums_by_client |= answer
        return sums_by_client

    def agree(self, totals: Mapping[str, Any]) -> None:
        """Tell every site the totals, now and whenever it is greeted again."""
        self._totals = dict(totals)

    def describe(self, leave_out: Collection[str] = (), details: Collection[Detail] = ()) -> DataSummary:
        """Describe the clients' data; they stay the same in a session, in whose greeting every site has told of its own."""
        if leave_out:
            return self._merge(self._ask_all({"do": "describe", "leave_out": list(leave_out)}))
        session = self._session()
        summary = self._find_summary(session)
        if summary is None:
            summary_by_site = self._ask_all(
                {"do": "describe", "leave_out": []},
                lambda: {
                    name: summary for name, (when, summary) in self.connections.summaries.items() if when == session
                },
            )
            summary = self._merge(summary_by_site)
            self._merged, self.connections.relied = (session, summary), (session, summary_by_site)
        self.runner.know(summary)
        return summary

    def _merge(self, summary_by_site: Mapping[str, Any]) -> DataSummary:
        summaries: list[DataSummary] = []
        for name, answer in summary_by_site.items():
            if not isinstance(answer, DataSummary) or set(answer.sizes) - {
                *self.connections.clients[name],
                *self._left_out,
            }:
                raise ConfigurationError(f"Site '{name}' does not describe its data as a site does.")
            summaries.append(answer)
        check_shares(summary_by_site, self._max_share)
        everybody = sort_clients([client for summary in summaries for client in summary.client_ids])
        place = {client: number for number, client in enumerate(everybody)}
        summaries.sort(key=lambda summary: min((place[client] for client in summary.client_ids), default=len(place)))
        return DataSummary.merged(summaries)

    def _listen(self) -> list[Reply]:
        """Greet who has come, and return replies."""
        self.connections.greet()
        replies = self.connections.receive(POLL)
        self.log.look(self.connections, self._doing, self._waits_for)
        for node in self.connections.refused:
            self.connections.names.pop(node, None)
        now, waits = self.attempts.clock(), len(self.connections.names) < max(self._sites_expected, len(self._members))
        self._refused = {node: self._refused.get(node, now) for node in self.connections.refused}
        for node, since in self._refused.items():  # others begin without it, where they are enough
            if waits and now > since + MENDING:
                why = self.connections.why(node)
                self.connections.tell(NOTICE)
                raise ConfigurationError(f"The run does not begin: {why}")
        return replies

    def _ask_all(self, asked: dict[str, Any], read_answers: Callable[[], Mapping[str, Any]] = dict) -> dict[str, Any]:
        """Ask all sites, and return their answers by name."""
        ended = self.attempts.clock() + PATIENCE
        self._members = names = self._members or list(self.connections.names.values())
        answers = {name: answer for name, answer in read_answers().items() if name in names}
        waits: dict[str, str] = {}  # name of the site by that of its reply
        since: dict[str, float] = {}  # by name: when it first refused
        while silent := [name for name in names if name not in answers]:
            for node, name in self.connections.names.items():
                if name in silent and name not in waits.values() and self.connections.is_ready(node):
                    waits[self.connections.send(node, asked)] = name
            for reply in self._listen():
                name = waits.pop(reply.number, "")
                if "refused" in reply.content:
                    why, now = f"site '{name}': {reply.content['refused']}", self.attempts.clock()
                    if now > since.setdefault(name, now) + MENDING:
                        raise ConfigurationError(f"The run does not begin: {why}")
                    self.connections.turn_away(reply.node, why)
                if "answer" in reply.content:  # else it has started anew, and is asked again
                    answers[name] = reply.content["answer"]
            answers |= {name: answer for name, answer in read_answers().items() if name in silent}
            if self._refused and len(self.connections.names) < len(names):  # it is waited for longer
                ended = self.attempts.clock() + PATIENCE
            if self.attempts.clock() > ended:
                raise ConfigurationError(f"Site '{silent[0]}' has not answered within {PATIENCE:g} seconds.")
        return {name: answers[name] for name in names}

    # -- work --------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Refuse what cannot be carried out at sites."""
        if self.attempts.policy.timeout is None:
            raise ConfigurationError(
                "failures.timeout=None, but a site that is gone would be waited for for ever. Set failures.timeout to the "
                "seconds that a visit may take at most, with the way there and back."
            )

    def beside(self, runner: ClientRuntime) -> Engine:
        raise ConfigurationError(
            "engine='flower' does not onboard new clients. Start a site that has them, and resume the run with "
            "`fedlightning serve --resume auto --allow_new_clients true`: they join it."
        )

    def ask(self, task: Task[Answer]) -> Answer:
        answers = list(self.map([task]))
        return answers[0]

    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        """Yield the answers of tasks in their order; see :meth:`fedlightning.engines.contract.Engine.map`."""
        source, window, is_over = iter(tasks), self._window, False
        self.close()
        if self.absent.marked:  # they may have answered since, or are here again
            self.connections.greet()
            self._receive(0.0)
        while True:
            while not is_over and window.has_room(self.width):
                task = next(source, None)
                if task is None:
                    is_over = True
                else:
                    window.add(self._entry(task))
            if not window:
                return
            self._hand_out()
            self._go_on_without()
            yield from window.take()
            if window:
                self._collect()

    def _entry(self, task: Task[Any]) -> Entry:
        client = task.client if task.client is not None else getattr(task, "clients", ("",))[0]
        entry = Entry(task, client, self.attempts.of(task))
        left_out = entry.attempt.left_out_answer()
        if left_out is not None:
            entry.answer, entry.done = left_out[0], True
        return entry

    def _hand_out(self) -> None:
        connections = self.connections
        ready = {node for node in connections.names if connections.is_ready(node)}
        for batch in self._window.due(connections.where, ready, self.attempts.clock()):
            tasks = [self._request(entry) for entry in batch.entries]
            self._window.sent(connections.send(batch.node, {"do": "tasks", "tasks": tasks, "budget": BUDGET}), batch)

    def _request(self, entry: Entry) -> dict[str, Any]:
        versions = self.versions
        client = entry.task.client
        return {
            "task": entry.task,
            "number": entry.number,
            "version": "" if client is None else versions.version(client),
            "keep": None if client is None else versions.needed(client),
        }

    def _collect(self) -> None:
        connections, window = self.connections, self._window
        connections.greet()
        self._receive(POLL)
        connections.ping(self.absent.nodes)
        self.log.look(connections, self._doing)
        for entry in window.astray(connections.names):  # the connection is gone: wait for another
            self._unsend(entry)
        timeout, now = self.attempts.policy.timeout, self.attempts.clock()
        for entry in [] if timeout is None else window.late(connections.where, now, timeout):
            self._unsend(entry)
            self.absent.mark(self.sites.get(entry.client, ""), now)
            self._give_up(entry, self.attempts.too_slow, lasts=True)
        connections.ping(self.absent.nodes)

    def _receive(self, seconds: float) -> None:
        for reply in self.connections.receive(seconds):
            entries = self._window.came(reply.number)
            # else it has started anew, and is sent them again
            if entries is not None and "unknown" not in reply.content:
                self._take(reply, entries)

    def _go_on_without(self) -> None:
        """Give up what absent sites are to do, when nothing else is left to wait for: for them it was waited once."""
        if not self.absent.to_give_up(self._window, self.sites, self.attempts.clock()):
            return
        if self.connections.greet():  # somebody has just come
            self._receive(POLL)
        for entry in self.absent.to_give_up(self._window, self.sites, self.attempts.clock()):
            self._unsend(entry)
            self._give_up(entry, f"{self.attempts.too_slow} before; {WITHOUT}", lasts=True)

    def _doing(self) -> Doing:
        """Return what each site is at, for people: the first of what it was sent."""
        work_by_site: dict[str, tuple[str, int | None]] = {}
        for entry in self._window:
            name = self.connections.names.get(self.connections.where.get(entry.client, ""))
            if entry.sent is not None and name is not None and name not in work_by_site:
                work_by_site[name] = describe_task(entry.task), entry.task.address[0]
        return work_by_site

    def _unsend(self, entry: Entry) -> None:
        for name in self._window.unsend(entry):
            self.connections.forget(name)

    def _take(self, reply: Reply, entries: Sequence[Entry | None]) -> None:
        """Take the answers of a reply, each by itself: one that is refused or nonsense does not spoil the others."""
        parts, refused = reply.content.get("answer"), reply.content.get("refused", "its reply says nothing")
        if not isinstance(parts, list) or len(parts) != len(entries) or not all(type(part) is bytes for part in parts):
            for entry in entries:
                if entry is not None and len(entries) > 1:  # perhaps because of one of them only
                    entry.alone = True
                elif entry is not None:
                    self._give_up(entry, f"its site refuses: {refused}", lasts=False)
            return
        contents = [(entry, self.connections.read(part)) for entry, part in zip(entries, parts, strict=True)]
        done = [(entry, content) for entry, content in contents if not {"unknown", "lost"} & set(content)]
        self._window.answered(reply.node, self.connections.where, self.attempts.clock())
        for entry, content in done or [(entry, {"refused": "it carries out none"}) for entry in entries]:
            if entry is None:
                continue
            self._window.took(reply.node, entry, content.get("seconds"))
            if "refused" in content:
                self._give_up(entry, f"its site refuses: {content['refused']}", lasts=False)
            else:
                self._finish(entry, content)

    def _finish(self, entry: Entry, content: dict[str, Any]) -> None:
        answer, version, note = content["answer"], content.get("version"), content.get("note")
        reason = fault(entry.task, answer)
        if reason is None and version is not None and not (is_version(version) and is_note(note)):
            reason = "its site names no version of its record"
        if reason is not None:
            self._give_up(entry, reason, lasts=False)
            return
        if isinstance(content.get("loop"), str):
            self.runner.loop.adopt(printable(content["loop"]))
        settled = self._settle(entry, answer, None if version is None else (version, note))
        if settled is None:
            entry.since = None
            return
        entry.answer, entry.done = settled[0], True
        if settled[1] is not None and entry.task.client is not None:
            kept, about = settled[1]
            self.versions.keep(entry.task.client, kept, RecordNote(**(about or {})))

    def _settle(self, entry: Entry, answer: Any, record: Any) -> tuple[Any, Any] | None:
        """Settle an answer; where its client has failed, the reason names the site."""
        answer = in_lines(answer)
        settled = entry.attempt.settle(answer, record)
        if settled is not None and isinstance(settled[0], Update) and settled[0].error is not None:
            settled[0].error = add_site_name(settled[0].error, entry.client, self.sites.get(entry.client))
        return settled

    def _give_up(self, entry: Entry, reason: str, lasts: bool) -> None:
        """Answer in place of a site; `lasts`: another run would not meet the reason, so it is noted on disk."""
        settled = self._settle(entry, entry.task.lost(reason), None)
        entry.since = None
        if settled is not None:
            entry.answer, entry.done = settled[0], True
            if lasts:
                entry.attempt.decide(reason)

    def close(self) -> None:
        for name in self._window.clear():
            self.connections.forget(name)
