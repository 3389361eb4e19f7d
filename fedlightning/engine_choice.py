"""Engines of options, and which one `engine="auto"` takes: stacks where they are faster, else one client after another.

It goes by what the configuration says, never by measured time, so that a run chooses the same engine on every machine, and
again when it is resumed.
"""

from __future__ import annotations

from fedlightning.client.runtime import LocalRunner
from fedlightning.engines.base import Engine
from fedlightning.engines.records import ClientStore
from fedlightning.engines.sequential import SequentialEngine
from fedlightning.errors import refuse_without_posix
from fedlightning.options import EngineOptions, Flower, Processes, Ray, Sequential, Vectorized
from fedlightning.seeding import preserved
from fedlightning.tensors import module_state

PARAMETERS = 100_000
"""Entries of a model above which a stack is not chosen: its weights then leave the cache, and one client alone is as fast."""
CLIENTS = 4
"""Clients of a round below which there is little to stack."""


def make_engine(options: EngineOptions, runner: LocalRunner, store: ClientStore) -> Engine:
    """Make the engine of some options. What another one than the default needs is imported here.

    Args:
        options: Which engine, and how.
        runner: The client side of the federation.
        store: The clients' records; `Flower` has one of its own, of what is known of records elsewhere.
    """
    if isinstance(options, Processes | Ray):
        refuse_without_posix(f"engine='{options.name}'", "Use engine='sequential' or 'vectorized'.")
    if isinstance(options, Processes):
        from fedlightning.parallel.processes import ProcessesEngine

        return ProcessesEngine(runner, store, options.workers)
    if isinstance(options, Ray):
        from fedlightning.parallel.ray import RayEngine

        return RayEngine(runner, store, options)
    if isinstance(options, Vectorized):
        from fedlightning.stacked.engine import VectorizedEngine

        return VectorizedEngine(runner, store, options.clients_per_stack)
    if isinstance(options, Flower):
        from fedlightning.sites.engine import SitesEngine
        from fedlightning.sites.link import current
        from fedlightning.sites.store import SiteStore

        return SitesEngine(runner, SiteStore(), *current())
    return SequentialEngine(runner, store)


def choose(runner: LocalRunner, participants: int, synchronous: bool = True) -> tuple[EngineOptions, str]:
    """Return the options of an engine, and why in a line."""
    alone = "engine='auto' takes 'sequential': {}."
    if not synchronous:
        return Sequential(), alone.format("the loop visits clients one by one")
    if runner.settings.log_clients:
        return Sequential(), alone.format("log_clients needs each client's own fit")
    if runner.settings.local_loop == "trainer":
        return Sequential(), alone.format("local_loop='trainer'")
    if participants < CLIENTS:
        return Sequential(), alone.format(f"{participants} clients a round are too few to stack")
    blueprint = runner.blueprint
    entries = max(
        sum(value.numel() for value in module_state(blueprint.build("server", name)).values())
        for name in blueprint.architectures
    )
    if entries > PARAMETERS:
        return Sequential(), alone.format(f"a model of {entries} entries gains nothing in a stack")
    from fedlightning.stacked.vectorizable import analyse

    with preserved():
        reason = analyse(runner).reason
    if reason is not None:
        return Sequential(), alone.format(f"no stack, since {reason}")
    return Vectorized(), (
        f"engine='auto' takes 'vectorized': {participants} clients a round, models of {entries} entries (equal to "
        "'sequential' up to rounding)."
    )
