"""The default engine: one process, one client after another. Every other engine must equal it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from fedlightning.client.record import ClientRecord
from fedlightning.engines.contract import ClientRecords, Engine, Task

__all__ = ["ClientRecords", "SequentialEngine"]

Answer = TypeVar("Answer")


class SequentialEngine(Engine):
    """Carries out tasks one after another.

    Each answer is handed over before the next task starts, so only one model is in memory.
    """

    def watching(self, clients: Sequence[str], allowance: int = 1) -> AbstractContextManager[None]:
        """Return a context in which this thread is at work on clients."""
        return self.attempts.watch.watching(clients, allowance)

    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        for task in tasks:
            attempt = self.attempts.of(task)
            settled: tuple[Answer, ClientRecord | None] | None = attempt.left_out_answer()
            before = ClientRecord() if task.client is None else self.store.get(task.client)
            while settled is None:
                with self.watching([task.address[2]]):
                    answer, after = task.run(self.runner, before)
                settled = attempt.settle(answer, after)  # the server accepts or refuses it; None: once more
            answer, after = settled
            if after is not None and task.client is not None:
                self.store.put(task.client, after)
            yield answer
            del answer, settled  # not kept while the next client trains

    def close(self) -> None:
        """End the watch."""
        self.attempts.watch.close()
