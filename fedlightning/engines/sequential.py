"""The default engine: one process, one client after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fedlightning.client import ClientRecord
from fedlightning.local import Evaluate, LocalRunner
from fedlightning.messages import Message, Update


class ClientStore:
    """The clients' records, and which of them have changed since they were last saved."""

    def __init__(self) -> None:
        self._records: dict[str, ClientRecord] = {}
        self.changed: set[str] = set()

    def get(self, client: str) -> ClientRecord:
        """The client's record; an empty one if it has never been visited. Not to be changed: put a new one."""
        return self._records.get(client, ClientRecord())

    def put(self, client: str, record: ClientRecord, changed: bool = True) -> None:
        """Replace the client's record."""
        self._records[client] = record
        if changed:
            self.changed.add(client)

    def __contains__(self, client: str) -> bool:
        return client in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)


class SequentialEngine:
    """Carries out visits one after another in the order of the messages. The baseline every engine must equal."""

    def __init__(self, runner: LocalRunner, store: ClientStore) -> None:
        self.runner = runner
        self.store = store

    def run(self, messages: Iterable[Message], evaluate: Evaluate) -> Iterator[Update]:
        """Visit the clients; each update is handed over before the next client starts, so one model is in memory."""
        for message in messages:
            before = self.store.get(message.client)
            update, record = self.runner.visit(message, before, evaluate)
            if record is not before:
                self.store.put(message.client, record)
            yield update
