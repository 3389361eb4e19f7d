"""`engine="auto"`: stacks where they are faster, else one client after another. It goes by what the configuration says, never
by measured time, so that a run chooses the same engine on every machine, and again when it is resumed.
"""

from __future__ import annotations

from fedlightning.seeding import preserved
from fedlightning.tensors import module_state
from fedlightning.visit.runner import LocalRunner

PARAMETERS = 100_000
"""Entries of a model above which a stack is not chosen: its weights then leave the cache, and one client alone is as fast."""
CLIENTS = 4
"""Clients of a round below which there is little to stack."""


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
