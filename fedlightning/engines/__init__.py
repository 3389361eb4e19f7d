"""Where clients work: one file for each engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedlightning.federation.engine import Engine
    from fedlightning.federation.store import ClientStore
    from fedlightning.visit.runner import LocalRunner


def make_engine(
    name: str,
    runner: LocalRunner,
    store: ClientStore,
    workers: int | None = None,
    clients_per_stack: int | None = None,
) -> Engine:
    """The engine of that name (`"sequential"`, `"processes"`, `"vectorized"`); only what it needs is imported."""
    if name == "processes":
        from fedlightning.engines.processes import ProcessesEngine

        return ProcessesEngine(runner, store, workers)
    if name == "vectorized":
        from fedlightning.engines.vectorized import VectorizedEngine

        return VectorizedEngine(runner, store, clients_per_stack)
    from fedlightning.engines.sequential import SequentialEngine

    return SequentialEngine(runner, store)
