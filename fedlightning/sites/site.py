"""A site's half of the work: requests from the server go in as bytes, replies come out as bytes.

The records of a site's clients on its disk: every version that the server may come back to.
"""

from __future__ import annotations

import copy
import hashlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client_errors import client_failure, noting
from fedlightning.client.data_summary import DataSummary
from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import ClientRuntime
from fedlightning.codec.tree import file_of, load
from fedlightning.compat.system import file_name_of
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.public_only import public_facts
from fedlightning.deployment.export import Deploy
from fedlightning.engines.contract import RecordNote, Visit
from fedlightning.engines.score_tasks import ScoreClient, ScoreModel
from fedlightning.errors import ConfigurationError
from fedlightning.guards.preflight_task import PreflightTask
from fedlightning.guards.step_trials import StepTrial
from fedlightning.privacy.outgoing import make_outgoing_filter
from fedlightning.resume.config_changes import differences
from fedlightning.server.population import refuse_statistics
from fedlightning.sites import code_hashes
from fedlightning.sites.agreement import DETAILS, agreement, leaving, own_key, refusal_of_changes, versions
from fedlightning.sites.message_checks import ENVELOPES, FILE, Texts, fault_of_request
from fedlightning.sites.run_quotas import MAX_RUNS, RequestCounts, make_room
from fedlightning.sites.site_log import SiteLog
from fedlightning.sites.task_bounds import GREETED, Here, fault, kind_of, out_of_turn
from fedlightning.storage.files import (
    UnreadableError,
    read_json,
    readable_json,
    sync_folder,
    write_text_atomically,
    writing,
)
from fedlightning.tensors import load_state, module_state
from fedlightning.wire import read, write

TERMS = "leaves"
"""Beside the fields of a record in its file: a hash of what could leave the client when it was kept."""
VERSIONS = 1000
"""Versions of a client's record in a run. A server that was resumed lets none go until it has saved its state twice."""


class UnknownVersionError(ConfigurationError):
    """A version of a record that is not on this site's disk."""


class Records:
    """The records of a site's clients in one folder, by run, client and version. A version is never changed.

    Args:
        folder: The folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = Records(Path(folder))
        ...     first = records.put("run", "a", ClientRecord(steps=1))
        ...     second = records.put("run", "a", ClientRecord(steps=2))
        ...     records.forget("run", "a", keep=[first])
        ...     records.get("run", "a", first).steps, records.versions("run", "a") == [first]
        (1, True)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: dict[
            tuple[str, str, str | None], tuple[str, ClientRecord]
        ] = {}  # the newest of each client is read no more

    def get(self, run: str, client: str, version: str, outgoing_terms: str | None = None) -> ClientRecord:
        """Return a version of a client's record; the empty one is that of a client that was never visited."""
        if not version:
            return ClientRecord()
        last_version, record = self._last.get((run, client, outgoing_terms), ("", ClientRecord()))
        if last_version == version:
            return record
        path = self._path(run, client, version)
        try:
            content = load(path)
            kept_under = content.pop(TERMS, "")
            stored = ClientRecord(**content)
        except FileNotFoundError:
            raise UnknownVersionError(
                f"the record of client '{client}' that the server goes on from ({version}) is not in the site's folder. "
                "Start the site with the folder that it had, or begin a new run"
            ) from None
        except (UnreadableError, TypeError, ValueError) as error:
            name = f"{path.parent.name}/{path.name}"
            raise UnknownVersionError(f"{name} is damaged ({type(error).__name__}). Put it back from a copy") from None
        if outgoing_terms is not None and kept_under != outgoing_terms:
            raise UnknownVersionError(
                f"the record of client '{client}' ({version}) was kept by a configuration of this site under which other "
                "parts of the model leave. Begin a new run"
            )
        self._last[run, client, outgoing_terms] = version, stored
        return stored

    def put(self, run: str, client: str, record: ClientRecord, outgoing_terms: str = "") -> str:
        """Write a record. It is on the disk when this returns its version."""
        version = uuid.uuid4().hex
        path = self._path(run, client, version)
        if len(self.versions(run, client)) >= VERSIONS:
            raise ConfigurationError(
                f"{VERSIONS} versions of the record of client '{client}' are here, and the server says of none that it needs "
                "it no more. Let it save its state more often (save_state)"
            )
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        file_of({**vars(record), TERMS: outgoing_terms}, f"client '{client}'").save(path)
        sync_folder(path.parent)
        self._last[run, client, outgoing_terms] = version, record
        return version

    def versions(self, run: str, client: str) -> list[str]:
        """Return the versions of a client's record that are here."""
        return sorted(path.stem for path in self._path(run, client, "x").parent.glob("*.safetensors"))

    def forget(self, run: str, client: str, keep: Collection[str]) -> None:
        """Remove all versions of a client's record but some."""
        for version in self.versions(run, client):
            if version not in keep:
                self._path(run, client, version).unlink(missing_ok=True)

    def _path(self, run: str, client: str, version: str) -> Path:
        if not all(part.isascii() and part.isalnum() for part in (run, version)):
            raise UnknownVersionError(
                f"{run!r:.60} and {version!r:.60} are not names of a run and a version of a record"
            )
        return self.folder / run / f"client-{file_name_of(client)}" / f"{version}.safetensors"


TASKS = (Visit, ScoreClient, ScoreModel, Deploy, PreflightTask, StepTrial)
"""What a site carries out for the server."""
REPLY_BYTES = 2**25
"""Bytes of answers after which a reply is full: tasks that are left wait for the next message."""


class RefusedError(ConfigurationError):
    """A request that this site does not carry out."""


@dataclass
class Session:
    """What a server has told this site of its run.

    Attributes:
        key: A hash of all of it; every request names it.
        run: Name of the run, under which records are kept.
        runner: Opens, fits and scores the site's clients.
        asked: Counts what the run asks for.
        public: Whether the server has public data.
        other_code: Where its code is another than the server's, if that is allowed.
        summary: What it has told of its data when it was greeted.
    """

    key: str
    run: str
    runner: ClientRuntime
    request_counts: RequestCounts
    public: bool = False
    other_code: Collection[str] = ()
    summary: DataSummary | None = None


class Site:
    """A site: its clients' data, its own configuration, and its records.

    Args:
        name: The site's name, for people.
        blueprint: What its clients are built from: the site's own module, callbacks and settings.
        data: Its clients' data.
        folder: Where records and exported models are kept.
        export: Whether clients' models may be sent to the server when a run ends.
        send_texts: Whether the texts of errors leave, and what modules log besides numbers; else the kind and a reference.
        allow_other_code: Take part although the server has other code under the same names, if it allows that too.
        most_runs: Runs whose files are kept.

    Attributes:
        log: Is told what happens here, for people; at first it says nothing.
    """

    def __init__(
        self,
        name: str,
        blueprint: Blueprint,
        data: FederatedDataModule,
        folder: Path,
        export: bool = False,
        send_texts: bool = False,
        allow_other_code: bool = False,
        most_runs: int = MAX_RUNS,
    ) -> None:
        self.name = name
        self.log = SiteLog(None, name, say=lambda line: None)
        self._code = code_hashes.of_blueprint(blueprint)  # now: what was imported
        self._data_code = code_hashes.digest(code_hashes.of_objects([data, *_within(data)]))
        self._allow_other_code, self._key = allow_other_code, own_key(folder / "key")
        self.records = Records(folder / "records")
        self.texts = Texts(folder, send_texts)
        self._folder = folder
        self._blueprint = blueprint
        self._data = data
        self._export = export
        self._most_runs = most_runs
        self._clock = time.monotonic  # a test brings its own
        self._session: Session | None = None
        self._stages: set[str] = set()
        self._public: dict[str, Any] | None = None
        # the last reply to each client: a task that comes again is known
        self._answers: dict[tuple[str, str], bytes] = {}

    def answer(self, request: bytes) -> bytes:
        """Carry out a request and return the reply. Whatever goes wrong is a reply too, in a sentence."""
        return self._reply_or_refuse(lambda: self._reply(request))

    def _reply_or_refuse(self, work: Callable[[], bytes]) -> bytes:
        try:
            return work()
        except BaseException as error:  # sys.exit in the user's code, too, ends no site
            reason = self.texts.of_error(client_failure(error))
            self.log.refused(reason.replace(f"{FILE} there", str(self.texts.file)))
            return write({"refused": reason})

    def _reply(self, request: bytes) -> bytes:
        asked = read(request)
        if not isinstance(asked, dict) or not all(isinstance(asked.get(name), str) for name in ("do", "session")):
            raise RefusedError("it is not a request of a server.")
        if asked["do"] not in ENVELOPES:
            raise RefusedError(f"it asks to {asked['do']!r:.40}, which no site does.")
        if asked["do"] == "hello":
            return write(self._hello(asked))
        if asked["do"] == "turned away":
            _refuse(fault_of_request("turned away", asked))
            self.log.turned_away(asked["why"])
            return write({"answer": None})
        session = self._session
        if session is None or session.key != asked["session"]:
            return write({"unknown": asked["session"]})
        if asked["do"] == "tasks":
            return self._tasks(session, asked)
        if asked["do"] in ("measure", "describe"):
            _refuse(fault_of_request(asked["do"], asked))
            session.request_counts.count(asked["do"], -1, [""], GREETED)
        if asked["do"] == "measure":
            return write({"answer": self._measured(session)})
        if asked["do"] == "describe":
            here = {*session.runner.data.client_ids}  # others are left out where they are
            leave_out = [client for client in asked["leave_out"] if client in here]
            return write({"answer": self._leave_out_private(session.runner.describe(leave_out, DETAILS), session)})
        return write({"answer": None})

    # -- a run -------------------------------------------------------------------------------------------------------
    def _hello(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Make what is needed for a run, or refuse it."""
        if self._session is None or self._session.key != asked["session"]:
            self._session = self._open(asked)
            self.log.joined(self._session.run, self._leaves(self._session.runner))
        session = self._session
        if session.summary is None:
            session.summary = self._leave_out_private(session.runner.describe(details=DETAILS), session)
        return {
            "answer": {
                "name": self.name,
                "clients": list(session.runner.data.client_ids),
                "data": session.summary,
                "versions": versions(),
                "time": time.time(),
                "other_code": list(session.other_code),
            }
        }

    def _measured(self, session: Session) -> dict[str, dict[str, Any]]:
        """Return the sums of the clients that train here, once: those of a changed cohort would tell who is new."""
        refuse_statistics(session.runner.callbacks)
        if session.runner.data.wanted_statistics is None:
            raise RefusedError(f"the data of site '{self.name}' want no statistics.")
        sums_by_client = session.runner.measure()
        path = self._folder / "statistics.json"
        hashes_by_client = read_json(path) if path.exists() else {}
        for client, sums in sums_by_client.items():
            prints = {name: hashlib.sha256(write(value)).hexdigest() for name, value in sums.items()}
            before = hashes_by_client.setdefault(client, {})
            other = next((name for name, printed in prints.items() if before.get(name, printed) != printed), None)
            if other is not None:
                raise RefusedError(
                    f"client '{client}' of site '{self.name}' has given other sums of '{other.partition(' ')[2]}': both "
                    "would tell whose records are new. Start the site with the data and ranges of then; who answers for "
                    f"the data may remove {path.name} from the site's folder."
                )
            before |= prints
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, readable_json(hashes_by_client))
        return sums_by_client

    def _leaves(self, runner: ClientRuntime) -> str:
        """Return what can leave this site's clients, in words."""
        sums = runner.data.wanted_statistics is not None
        outgoing = sorted({str(make_outgoing_filter(runner.blueprint, client)) for client in runner.data.client_ids})
        allowed = {
            "sums of training rows, once before round 1": sums,
            "the models": self._export,
            "the texts of errors": self.texts.allowed,
        }
        return ", or ".join(outgoing) + "".join(f"; {what}" for what, yes in allowed.items() if yes)

    def _leave_out_private(self, summary: DataSummary, session: Session) -> DataSummary:
        return leaving(summary, self._key, self._data_code, session.public, session.runner.callbacks.withheld_splits)

    def _open(self, asked: Mapping[str, Any]) -> Session:
        theirs, ours = asked.get("agreement"), agreement(self._blueprint)
        if isinstance(theirs, dict) and differences(theirs, ours):  # of another version, which may ask otherwise
            changes = differences(theirs, _without_paths(ours, theirs))
            raise RefusedError(
                f"the server's configuration is not that of site '{self.name}' (the server's first): "
                f"{'; '.join(changes[:5])}{f' and {len(changes) - 5} more' if len(changes) > 5 else ''}. Give both the same, "
                "but for the data."
            )
        _refuse(fault_of_request("hello", asked))
        if asked["export"] and not self._export:
            raise RefusedError(
                f"the server asks for the models of the clients (export='server'), and site '{self.name}' does not give "
                "them away. Start the site with --export server to allow it, or the server without."
            )
        other = code_hashes.differences(asked["code"], self._code)
        if other and not self._allow_other_code:
            raise RefusedError(
                f"the server's code is not that of site '{self.name}': {'; '.join(other[:5])}"
                f"{f' and {len(other) - 5} more' if len(other) > 5 else ''}. Install the same on both, or start both with "
                "--allow_other_code true."
            )
        stage = asked["stage"]
        template, assigned = copy.deepcopy(self._blueprint.template), _assigned(asked["assigned"], self._blueprint)
        blueprint = replace(self._blueprint, template=template, assigned=assigned)
        _load(blueprint, asked["template"])
        runner = ClientRuntime(blueprint, self._data, together=False, folder=self._folder / "models" / asked["run"])
        if stage not in self._stages:
            runner.set_up(stage)
            self._stages.add(stage)
        self._compare_public(asked.get("public"))
        if asked["statistics"] is not None:
            if runner.data.wanted_statistics is None:
                raise RefusedError(
                    "it says what data have agreed on, by their statistics, and those here want to agree on nothing."
                )
            runner.agree(asked["statistics"])
        make_room(self._folder, asked["run"], self._most_runs)
        codes = {"hashes of the code": [code_hashes.digest(self._code), self._data_code]}
        changed = refusal_of_changes(
            runner, ours | codes, self._key, self._folder / "configurations" / f"{asked['run']}.json"
        )
        if changed is not None:
            raise RefusedError(changed)
        here = set(runner.data.client_ids)
        runner.leave_out([client for client in asked["left_out"] if client in here])
        self._answers.clear()
        counted = RequestCounts(self._folder, asked["run"])
        counted.count("hello", -1, [""], GREETED)
        return Session(asked["session"], asked["run"], runner, counted, asked.get("public") is not None, other)

    def _compare_public(self, theirs: Any) -> None:
        """Refuse public data that are not those of the server."""
        if theirs is None:  # then nobody reads them
            return
        if self._public is None:
            self._public = public_facts(self._data)
        own_public = self._public
        if own_public == theirs:
            return
        has = "has none" if own_public is None else f"has {_samples(own_public)}"
        raise RefusedError(
            f"the server's public data are {_samples(theirs)}, and site '{self.name}' {has}. Give the server "
            "(PublicDataModule) and every site (public: in its own data module) the same data set with the same batch size, "
            "seed and public_labels, and none of a client's samples: a site leaves those out."
        )

    # -- tasks -------------------------------------------------------------------------------------------------------
    def _tasks(self, session: Session, asked: Mapping[str, Any]) -> bytes:
        """Carry out tasks one after another, each with a reply of its own: `unknown` if there is no time for it."""
        _refuse(fault_of_request("tasks", asked))
        tasks, budget = asked["tasks"], asked["budget"]
        begun, replies = self._clock(), list[bytes]()
        for task in tasks:
            late = self._clock() - begun > budget or sum(map(len, replies)) > REPLY_BYTES
            done = (
                self._reply_or_refuse(partial(self._task, session, task))
                if not (replies and late)
                else write({"unknown": ""})
            )
            replies.append(done)
        return write({"answer": replies})

    def _task(self, session: Session, asked: Mapping[str, Any]) -> bytes:
        if not isinstance(asked, dict):
            raise RefusedError("it does not say what to do.")
        _refuse(fault_of_request("task", asked))
        begun = self._clock()
        task, run = asked.get("task"), session.run
        if not isinstance(task, TASKS):
            raise RefusedError(f"a {type(task).__name__} is not a task for a site.")
        self._check(session, task)
        client = task.client or ""
        number, version = asked["number"], asked["version"]
        if client and (client, number) in self._answers:
            return self._answers[client, number]
        outgoing_terms = make_outgoing_filter(session.runner.blueprint, client).terms if client else ""
        record = self.records.get(run, client, version, outgoing_terms)
        here = Here(session.runner, self._export, client)
        _refuse(fault(here, task) or out_of_turn(here, task, record))
        what, most = kind_of(here, task)
        session.request_counts.count(what, task.address[0] - 1, task.clients if task.client is None else [client], most)
        self.log.began(task)
        with noting() as errors:
            answer, after = task.run(session.runner, record)
        self.log.ended(task, answer)
        callbacks = [callback for callback in session.runner.callbacks if callback.key == getattr(task, "callback", "")]
        ours = all(type(callback).__module__.startswith("fedlightning.") for callback in callbacks)
        answer = self.texts.of_answer(task, answer, errors, ours)
        seconds = self._clock() - begun
        reply: dict[str, Any] = {
            "answer": answer,
            "version": None,
            "loop": session.runner.loop.reason,
            "seconds": seconds,
        }
        if after is not None:
            keep = asked.get("keep")
            reply["version"] = self.records.put(run, client, after, outgoing_terms)
            reply["note"] = vars(RecordNote.of(after))
            if isinstance(keep, list):
                self.records.forget(run, client, keep=[*keep, version, reply["version"]])
        written = write(reply)
        if client:
            self._answers = {place: value for place, value in self._answers.items() if place[0] != client}
            self._answers[client, number] = written
        return written

    def _check(self, session: Session, task: Any) -> None:
        """Refuse a task about a client that is not here."""
        clients = {*session.runner.data.client_ids, *session.runner.left_out}
        for client in [task.client] if task.client is not None else task.clients:
            if client not in clients:
                raise RefusedError(f"site '{self.name}' has no client '{client}'.")


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise RefusedError(f"{reason}.")


def _within(data: Any) -> Iterator[Any]:
    """Yield the data modules and data sets that a data module holds."""
    for value in list(getattr(data, "__dict__", {}).values()):
        if isinstance(value, LightningDataModule):
            yield value
            yield from _within(value)


def _without_paths(own_values: Any, theirs: Any) -> Any:
    """Return a configuration without the paths in it that are this site's alone."""
    if own_values == theirs:
        return own_values
    if isinstance(own_values, dict):
        their_values = theirs if isinstance(theirs, dict) else {}
        return {name: _without_paths(value, their_values.get(name)) for name, value in own_values.items()}
    if isinstance(own_values, list):
        return [_without_paths(value, None) for value in own_values]
    return "(a path there)" if isinstance(own_values, str) and ("/" in own_values or "\\" in own_values) else own_values


def _samples(facts: Mapping[str, Any]) -> str:
    return f"{facts['samples']} samples in batches of {facts['batch_size']} (hash {facts['content']})"


def _assigned(assigned: dict[str, str], blueprint: Blueprint) -> dict[str, str]:
    unknown = next((name for name in assigned.values() if name not in blueprint.architectures), None)
    if unknown is not None:
        raise RefusedError(f"it gives clients the model '{unknown:.80}', which is not here.")
    return assigned


def _load(blueprint: Blueprint, template: dict[str, Any]) -> None:
    """Begin with the weights that the server begins with."""
    own_entries = {name: (value.shape, value.dtype) for name, value in module_state(blueprint.template).items()}
    theirs = {name: (getattr(value, "shape", None), getattr(value, "dtype", None)) for name, value in template.items()}
    if own_entries != theirs:
        differing = sorted(str(pair[0]) for pair in set(own_entries.items()) ^ set(theirs.items()))[0]
        raise RefusedError(f"the server's model is another than the site's: they differ at '{differing}'.")
    load_state(blueprint.template, template)
