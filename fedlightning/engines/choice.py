"""The engine of a name, and which one `engine="auto"` takes: stacks where they are faster, else one client after another.

It goes by what the configuration says, never by measured time, so that a run chooses the same engine on every machine, and
again when it is resumed.
"""

from __future__ import annotations

from typing import Any

from fedlightning.engines.sequential import SequentialEngine
from fedlightning.errors import refuse_without_posix
from fedlightning.federation.engine import Engine
from fedlightning.federation.store import ClientStore
from fedlightning.seeding import preserved
from fedlightning.tensors import module_state
from fedlightning.visit.runner import LocalRunner

PARAMETERS = 100_000
"""Entries of a model above which a stack is not chosen: its weights then leave the cache, and one client alone is as fast."""
CLIENTS = 4
"""Clients of a round below which there is little to stack."""


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


def choose(runner: LocalRunner, participants: int, synchronous: bool = True) -> tuple[str, str]:
    """Return the name of an engine, and why in a line."""
    alone = "engine='auto' takes 'sequential': {}."
    if not synchronous:
        return "sequential", alone.format("the loop visits clients one by one")
    if runner.settings.log_clients:
        return "sequential", alone.format("log_clients needs each client's own fit")
    if runner.settings.local_loop == "trainer":
        return "sequential", alone.format("local_loop='trainer'")
    if participants < CLIENTS:
        return "sequential", alone.format(f"{participants} clients a round are too few to stack")
    blueprint = runner.blueprint
    entries = max(
        sum(value.numel() for value in module_state(blueprint.build("server", name)).values())
        for name in blueprint.architectures
    )
    if entries > PARAMETERS:
        return "sequential", alone.format(f"a model of {entries} entries gains nothing in a stack")
    from fedlightning.engines.stacked.vectorizable import analyse

    with preserved():
        reason = analyse(runner).reason
    if reason is not None:
        return "sequential", alone.format(f"no stack, since {reason}")
    return "vectorized", (
        f"engine='auto' takes 'vectorized': {participants} clients a round, models of {entries} entries (equal to "
        "'sequential' up to rounding)."
    )
