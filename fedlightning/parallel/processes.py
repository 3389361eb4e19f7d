"""The engine `processes`: the same tasks on persistent local workers, each with one torch thread."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any, cast

from fedlightning.client.runtime import LocalRunner
from fedlightning.engines.records import ClientStore
from fedlightning.parallel.arena import Arena, Broadcast
from fedlightning.parallel.pool import Setup, Worker, own_gpu, usable_cores
from fedlightning.parallel.scheduling import WorkersEngine


class ProcessesEngine(WorkersEngine):
    """Carries out tasks on worker processes. They start at the first task and stay until :meth:`close`.

    Args:
        runner: The client side of the federation, sent to each worker once.
        store: The clients' records.
        workers: Number of processes. `None`: as many as there are cores, but not more than clients.

    """

    out_of_reach = (
        'What is defined in an interactive session, or under `if __name__ == "__main__":`, is not there for other '
        "processes: define it at the top of a file, or use engine='sequential'."
    )

    def __init__(self, runner: LocalRunner, store: ClientStore, workers: int | None = None) -> None:
        super().__init__(runner, store, workers or usable_cores())
        self._asked = workers
        self._setup: Setup | None = None
        self._broadcast: Broadcast[Arena] | None = None

    def beside(self, runner: LocalRunner) -> ProcessesEngine:
        return ProcessesEngine(runner, ClientStore(), self._asked)

    def _start(self) -> None:
        if self._setup is not None:
            return
        self._setup, self._broadcast = Setup(self.runner), Broadcast(Arena())
        atexit.register(self.close)  # runs before multiprocessing waits for its processes

    def _idle(self, needed: int) -> list[int]:
        found = [index for index in range(self.width) if index not in self._busy][:needed]
        for index in found:
            if index not in self._workers:
                assert self._setup is not None and self._broadcast is not None
                gpu = own_gpu(index, self.runner.settings.trainer_arguments.get("devices"))
                self._workers[index] = Worker(self._setup, self._broadcast, gpu)
        return found

    def _wait(self, timeout: float | None) -> Sequence[int]:
        indices = {cast(Worker, self._workers[index]).connection: index for index in self._busy}
        found: list[Any] = connection.wait(list(indices), timeout)
        return [indices[ready] for ready in found]

    def _lost_at_start(self, how: str) -> Exception:
        return RuntimeError(
            f"A worker process ended while it started ({how}); what it said is above. If this is a script, put "
            'what starts the training under `if __name__ == "__main__":`, because every worker imports the script.'
        )

    def _lost_at_work(self, who: str, how: str) -> str:
        return f"A worker process ended ({how}) at work on {who}, which is done again."

    def _too_many(self, tries: int, how: str) -> str:
        return (
            f"{tries} worker processes ended while they worked on it, the last by {how} "
            "(the system kills a process by SIGKILL when memory runs out: try fewer workers)"
        )

    def _forget(self) -> None:
        super()._forget()
        if self._broadcast is not None:
            self._broadcast.clear()

    def close(self) -> None:
        """End the workers. The engine starts new ones if it is used again."""
        atexit.unregister(self.close)
        self._end_all()
        if self._setup is not None and self._broadcast is not None:
            self._setup.arena.close()
            self._broadcast.arena.close()
        self._setup = self._broadcast = None
