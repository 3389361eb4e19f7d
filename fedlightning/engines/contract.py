"""The contract of engines: an engine carries out tasks, somewhere, and returns their answers in the order of the tasks.

A task and the client's record go in; an answer and, where it changed, a new record come out. Nothing else is shared, so
an engine on another machine is one more file. One whose clients are in this process, or in processes that are sent this one's
data, has one method of its own, :meth:`Engine.map`. One whose clients' data are elsewhere (`data_here` is False) also says
how these are set up, described and asked: :meth:`~Engine.set_up`, :meth:`~Engine.leave_out`, :meth:`~Engine.describe`,
:meth:`~Engine.ask`, :meth:`~Engine.beside`. The server knows of data what `describe` tells, and nothing else.

The clients' records between visits: in memory, and on disk beyond a limit.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

from torch import Tensor

from fedlightning.client.data_summary import DataSummary, Detail
from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Evaluate
from fedlightning.client.runtime import ClientRuntime
from fedlightning.client.visit import carry_out
from fedlightning.codec.tree import file_of, load
from fedlightning.contract import POOLED
from fedlightning.contract.messages import Message, Update
from fedlightning.engines.attempts import Retries
from fedlightning.scores.rows import not_scored
from fedlightning.storage.files import writing


@dataclass(frozen=True)
class RecordNote:
    """What the server knows of a client's record without having it.

    Attributes:
        is_personal: Whether the client keeps entries of its own model.
        checkpoints: By callback, the models that it has selected: `name`, `stage` and `round`.
    """

    is_personal: bool = False
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, record: ClientRecord) -> RecordNote:
        """Return the note of a record."""
        kept = record.checkpoints.items()
        return cls(bool(record.personal), {key: {n: entry[n] for n in NOTED} for key, entry in kept})


NOTED = ("name", "stage", "round")


class ClientRecords:
    """The records of all clients, or what is known of them where they stay with the clients.

    Args:
        limit: Bytes of tensors to keep in memory. The least recently used records lie on disk, in a temporary folder
            that is removed with the process. `None`: a quarter of the machine's memory.

    Attributes:
        is_here: Whether the records are here. Else there are notes only (:meth:`tell`), and :meth:`get` knows no record.
        changed: Clients whose records have changed since they were last saved.
    """

    is_here = True

    def __init__(self, limit: int | None = None) -> None:
        self._notes: dict[str, RecordNote] = {}
        self.limit = limit if limit is not None else default_limit()
        self.changed: set[str] = set()
        self._clients: dict[str, None] = {}  # in the order of their first visits
        self._records: OrderedDict[str, ClientRecord] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._bytes_in_memory = 0
        self._files: dict[str, Path] = {}  # what lies on disk is the record as it is now
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors in memory."""
        return self._bytes_in_memory

    def get(self, client: str) -> ClientRecord:
        """Return the client's record, an empty one if it has never been visited. Do not change it: put a new one."""
        if client in self._records:
            self._records.move_to_end(client)
        elif client in self._files:
            self._hold(client, ClientRecord(**load(self._files[client])))
        record = self._records.get(client)
        return ClientRecord() if record is None else record

    def note(self, client: str) -> RecordNote:
        """Return what is known of the client's record."""
        return RecordNote.of(self.get(client)) if self.is_here else self._notes.get(client, RecordNote())

    def tell(self, client: str, note: RecordNote) -> None:
        """Take what the client's machine says of a record that stays there."""
        self._clients[client] = None
        self._notes[client] = note

    def put(self, client: str, record: ClientRecord, changed: bool = True) -> None:
        """Replace the client's record."""
        self._clients[client] = None
        if client in self._files:
            self._files.pop(client).unlink()
        self._hold(client, record)
        if changed:
            self.changed.add(client)

    def forget(self, clients: Iterable[str], key: str) -> None:
        """Delete what a callback keeps at clients; who has nothing of it keeps its record as it is."""
        for client in (client_id for client_id in clients if key in self.get(client_id).state):
            record = self.get(client)
            self.put(client, replace(record, state={name: kept for name, kept in record.state.items() if name != key}))

    def saved(self) -> None:
        """Take note that everything has been saved."""
        self.changed.clear()

    def __contains__(self, client: str) -> bool:
        return client in self._clients

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def _hold(self, client: str, record: ClientRecord) -> None:
        """Keep `record` in memory, and move others to disk where there is no room."""
        size = tensor_bytes(vars(record))
        self._bytes_in_memory += size - self._sizes.get(client, 0)
        self._records[client], self._sizes[client] = record, size
        self._records.move_to_end(client)
        while self._bytes_in_memory > self.limit and len(self._records) > 1:
            oldest, old = self._records.popitem(last=False)
            self._bytes_in_memory -= self._sizes.pop(oldest)
            if oldest not in self._files:
                self._files[oldest] = self._write(oldest, old)

    def _write(self, client: str, record: ClientRecord) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fedlightning-clients-")
        path = Path(self._folder.name) / f"{list(self._clients).index(client)}.safetensors"
        with writing(path):
            file_of(vars(record), f"client '{client}'").write(path)
        return path


def tensor_bytes(tree: Any) -> int:
    """Count the bytes of the tensors in a tree of dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, dict):
        return sum(tensor_bytes(value) for value in tree.values())
    return sum(tensor_bytes(value) for value in tree) if isinstance(tree, list | tuple) else 0


def default_limit() -> int:
    """Return a quarter of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


class AcceptsUpdates(Protocol):
    """Decodes and checks updates as they arrive: the server."""

    def accept(self, message: Message, update: Update) -> Update:
        """Return an update as it may be folded in, or one that says by its `error` why it was refused."""


class Task(Protocol[Answer_co]):
    """A piece of work that a process with a :class:`~fedlightning.client.runtime.ClientRuntime` can do. It can be pickled.

    One with a method ``accept(server, answer)`` has its answers accepted by the server on arrival, or refused.
    """

    @property
    def client(self) -> str | None:
        """The client whose record goes in; `None`: no record. Tasks of one client are carried out one after another."""

    @property
    def address(self) -> tuple[int, str, str]:
        """The round from 1, what is done (`"training"`, a stage ...), and for whom."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors it carries; the answer is taken to be as large."""

    def cost(self, runner: ClientRuntime) -> float:
        """Return how long it takes, in any unit that tasks of one kind share."""

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[Answer_co, ClientRecord | None]:
        """Return the answer and the client's new record (`None`: unchanged)."""

    def lost(self, reason: str) -> Answer_co:
        """Return the answer of a task that was given up: its workers have died again and again, or took too long."""

    def failure(self, answer: Any) -> tuple[str, str] | None:
        """Return the client that failed and the reason, or `None` if the answer is a good one."""


class PlainTask:
    """A task that carries no tensors, costs the same for every client, and has no bad answer: base of such tasks."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that it carries."""
        return 0

    def cost(self, runner: ClientRuntime) -> float:
        """Return the same for every client."""
        return 1.0

    def failure(self, answer: Any) -> tuple[str, str] | None:
        """Return nothing: a refusal is an answer."""
        return None


@dataclass(frozen=True)
class Visit:
    """The task of a round: one client's visit (:meth:`fedlightning.client.visit.carry_out`)."""

    message: Message
    evaluate: Evaluate
    round: int | None = None
    """The round in which it is carried out, if that is not the message's."""

    @property
    def client(self) -> str:
        return self.message.client

    @property
    def address(self) -> tuple[int, str, str]:
        return (self.message.round if self.round is None else self.round) + 1, "training", self.client

    @property
    def num_bytes(self) -> int:
        return self.message.size

    def cost(self, runner: ClientRuntime) -> float:
        """Return the training samples seen; a visit counted in steps costs the same for every client."""
        work = runner.settings.work if self.message.work is None else self.message.work
        if runner.settings.local_steps is not None and work:
            return work
        samples = [runner.described.num_samples(client) for client in self._sources(runner)]
        return sum(samples) * max(work, 1)

    def _sources(self, runner: ClientRuntime) -> Iterable[str]:
        only_client = self.client != POOLED and self.message.data == "train"
        return [self.client] if only_client else runner.described.client_ids

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[Update, ClientRecord | None]:
        update, after = carry_out(runner, self.message, record, self.evaluate)
        return update, None if after is record else after

    def lost(self, reason: str) -> Update:
        """An update that says why this client contributes nothing."""
        message = self.message
        update = Update(message.round, message.client, model=message.model, tag=message.tag)
        update.error = f"client '{message.client}' failed: {reason}"
        return update

    def accept(self, server: AcceptsUpdates, answer: Update) -> Update:
        """Return the update decoded and checked."""
        return server.accept(self.message, answer)

    def failure(self, answer: Update) -> tuple[str, str] | None:
        """Return why the client contributes nothing, or where the model that it trained could not be scored."""
        if answer.error is not None:
            return self.client, answer.error
        for stage, data, split, reason in answer.gaps:
            return self.client, not_scored(self.client, stage, data, split, reason)
        return None


class Engine(ABC):
    """Carries out tasks on the clients of one federation.

    Args:
        runner: The client side: opens, fits and scores clients.
        store: The clients' records, read and replaced by the engine.

    Attributes:
        data_here: Whether the clients' data are in this process. Else nothing here may ask the data module for a client.
        shares_disk: Whether tasks can write into the run's folder.
        brings_models: Whether clients' models are sent here when a run ends, where tasks cannot write into its folder.
        no_public: What is said, after its name, of a method that needs public data and has none; empty: it says so itself.
        statistics: What clients agreed on before round 1, as it is kept in the run's folder; `None`: nothing.
        attempts: What becomes of tasks that fail. An engine carries out each task by way of them: it leaves out what
            they say is left out, and settles every answer with them before it keeps the record.
    """

    data_here: ClassVar[bool] = True
    shares_disk: ClassVar[bool] = True
    no_public: ClassVar[str] = ""
    brings_models: bool = False

    def __init__(self, runner: ClientRuntime, store: ClientRecords) -> None:
        self.runner = runner
        self.store = store
        self.attempts = Retries()
        self.statistics: dict[str, Any] | None = None

    @property
    def sites(self) -> dict[str, str]:
        """Name of each client's site, where clients are at sites."""
        return {}

    @property
    def width(self) -> int:
        """How many tasks it carries out at a time."""
        return 1

    # -- the data ----------------------------------------------------------------------------------------------------
    def set_up(self, stage: str) -> None:
        """Prepare the clients' data and set them up, where they are."""
        self.runner.set_up(stage)

    def leave_out(self, clients: Collection[str]) -> None:
        """Keep clients out of training: they are in no union of the data, and asked for by name they are still there."""
        self.runner.leave_out(clients)

    def measure(self) -> dict[str, dict[str, Any]]:
        """Return what each client gives for the statistics before round 1."""
        return self.runner.measure()

    def agree(self, totals: Mapping[str, Any]) -> None:
        """Let all data be prepared with the totals, where they are."""
        self.runner.agree(totals)

    def describe(self, leave_out: Collection[str] = (), details: Collection[Detail] = ()) -> DataSummary:
        """Describe the clients' data."""
        return self.runner.describe(leave_out, details)

    def public(self) -> tuple[Any, str]:
        """Return the server's loader of public data, or `None`, and the name of the data module."""
        return self.runner.data.public_dataloader(), type(self.runner.data).__name__

    # -- work --------------------------------------------------------------------------------------------------------
    def check(self) -> None:  # noqa: B027 - most engines take everything
        """Before round 1: refuse, with ``ValueError`` and a sentence, what this engine cannot carry out."""

    @abstractmethod
    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        """Carry out tasks and yield their answers in the order of the tasks.

        Results are the same in every engine: bit for bit, unless its documentation says what it rounds otherwise. Tasks
        may be drawn ahead of the answers. What a task raises is raised here.
        """

    def beside(self, runner: ClientRuntime) -> Engine:
        """Return another engine of this kind, with an empty store."""
        return type(self)(runner, ClientRecords())

    def ask(self, task: Task[Answer]) -> Answer:
        """Carry out one task at once, where it costs least; it is not tried again, and what it raises is raised here.

        For what a user asks between rounds: here if the data are here, so that no process is started for it.
        """
        answer, after = task.run(self.runner, ClientRecord() if task.client is None else self.store.get(task.client))
        if after is not None and task.client is not None:
            self.store.put(task.client, after)
        return answer

    def run(self, messages: Iterable[Message], evaluate: Evaluate, round: int | None = None) -> Iterator[Update]:
        """Visit clients and yield their updates in the order of the messages, so sums over them have one order."""
        yield from self.map(Visit(message, evaluate.of(message.client), round) for message in messages)

    def rest(self) -> None:
        """After `fit` or `test`: release what the next of them can do without. Default: everything."""
        self.close()

    @contextmanager
    def at_work(self) -> Iterator[Self]:
        """Within the block the engine is used, and afterwards it rests."""
        try:
            yield self
        finally:
            self.rest()

    def close(self) -> None:  # noqa: B027 - one without processes has nothing to close
        """Release processes and memory. An engine can be used again afterwards."""
