"""Engines decide where clients work. One file each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedlightning.engines.sequential import SequentialEngine
from fedlightning.errors import refuse_without_posix

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
    ray: Any = None,
) -> Engine:
    """Make the engine of a name. What another one than the default needs is imported here.

    Args:
        name: `"sequential"`, `"processes"`, `"vectorized"`, `"ray"` or `"flower"`.
        runner: The client side of the federation.
        store: The clients' records; `"flower"` has one of its own, of what is known of records elsewhere.
        workers: Number of worker processes, for `"processes"` and `"ray"`.
        clients_per_stack: Number of clients that train together, for `"vectorized"`.
        ray: Options for `"ray"`, as the trainer takes them.
    """
    if name in ("processes", "ray"):
        refuse_without_posix(f"engine='{name}'", "Use engine='sequential' or 'vectorized'.")
    if name == "processes":
        from fedlightning.engines.processes import ProcessesEngine

        return ProcessesEngine(runner, store, workers)
    if name == "ray":
        from fedlightning.blueprint.ray_options import RayOptions
        from fedlightning.engines.ray import RayEngine

        return RayEngine(runner, store, workers, RayOptions.of(ray))
    if name == "vectorized":
        from fedlightning.engines.vectorized import VectorizedEngine

        return VectorizedEngine(runner, store, clients_per_stack)
    if name == "flower":
        from fedlightning.engines.sites.engine import SitesEngine
        from fedlightning.engines.sites.link import current
        from fedlightning.engines.sites.store import SiteStore

        return SitesEngine(runner, SiteStore(), *current())
    return SequentialEngine(runner, store)
