"""The default engine: one process, one client after another. Every other engine must equal it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import TypeVar

from fedlightning.engines.watchdog import Watchdog
from fedlightning.federation.engine import Engine, Task
from fedlightning.federation.store import ClientStore
from fedlightning.visit.record import ClientRecord

__all__ = ["ClientStore", "SequentialEngine"]

Answer = TypeVar("Answer")


class SequentialEngine(Engine):
    """Carries out tasks one after another.

    Each answer is handed over before the next task starts, so only one model is in memory.
    """

    @cached_property
    def watchdog(self) -> Watchdog:
        """Ends the run where a client takes too long."""
        return Watchdog(lambda: self.attempts)

    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        for task in tasks:
            attempt = self.attempts.of(task)
            settled: tuple[Answer, ClientRecord | None] | None = attempt.left_out_answer()
            before = ClientRecord() if task.client is None else self.store.get(task.client)
            while settled is None:
                with self.watchdog.watching([task.address[2]]) if self.attempts.policy.timeout else nullcontext():
                    answer, after = task.run(self.runner, before)
                settled = attempt.settle(answer, after)
            answer, after = settled
            if after is not None and task.client is not None:
                self.store.put(task.client, after)
            yield answer

    def close(self) -> None:
        """End the watchdog, if there is one."""
        if "watchdog" in vars(self):
            self.watchdog.close()
