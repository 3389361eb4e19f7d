"""Which engine `engine="auto"` takes: stacks where they are faster, else one client after another.

It goes by what the configuration says, never by measured time, so that a run chooses the same engine on every machine, and
again when it is resumed.
"""

from __future__ import annotations

from fedlightning.client.runtime import LocalRunner
from fedlightning.options import EngineOptions, Sequential, Vectorized
from fedlightning.seeding import preserved
from fedlightning.tensors import module_state

PARAMETERS = 100_000
"""Entries of a model above which a stack is not chosen: its weights then leave the cache, and one client alone is as fast."""
CLIENTS = 4
"""Clients of a round below which there is little to stack."""


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
