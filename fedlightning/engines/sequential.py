"""The default engine: one process, one client after another. Every other engine must equal it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from fedlightning.federation.engine import Engine, Task
from fedlightning.federation.store import ClientStore
from fedlightning.visit.record import ClientRecord

__all__ = ["ClientStore", "SequentialEngine"]

Answer = TypeVar("Answer")


class SequentialEngine(Engine):
    """Carries out tasks one after another.

    Each answer is handed over before the next task starts, so only one model is in memory.
    """

    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        for task in tasks:
            before = ClientRecord() if task.client is None else self.store.get(task.client)
            answer, after = task.run(self.runner, before)
            if after is not None and task.client is not None:
                self.store.put(task.client, after)
            yield answer
