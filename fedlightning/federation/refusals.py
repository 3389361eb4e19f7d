"""What a federation refuses before round 1, whatever its callbacks check themselves: arguments that contradict each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedlightning.errors import ConfigurationError, listed, warn
from fedlightning.federation.engine import Engine
from fedlightning.federation.failures import at_site
from fedlightning.federation.loops import Loop
from fedlightning.federation.server import Server
from fedlightning.federation.store import ClientStore
from fedlightning.hooks import POOLED
from fedlightning.hooks.facts import EVERY_SCORE

WORDS = {POOLED: "pooled data", "clients": "other clients' data"}
FAR = 100
"""Times the median of the others' samples from which a claim is told of."""


def refuse_participation(server: Server, needed: int | float) -> None:
    """Refuse rounds that nobody, or two, could plan or finish."""
    visited = len(server.participants())
    chooser = server.callbacks.role("participants")
    if chooser is not None and server.participation != 1.0:
        raise ConfigurationError(
            f"participation={server.participation} and {chooser.key} both say who takes part in a round. Remove one of "
            "them."
        )
    reducer, divisor = server.callbacks.role("reduce"), server.callbacks.role("denominator")
    if reducer is not None and divisor is not None:
        raise ConfigurationError(
            f"{divisor.key} names the number that a sum of updates is divided by, and {reducer.key} combines updates in "
            "a way of its own. Remove one of them."
        )
    if chooser is None and isinstance(needed, int) and needed > visited:
        raise ConfigurationError(
            f"min_clients={needed}, but a round visits {visited} of the {len(server.clients)} clients: no round could "
            "be finished. Lower it, or raise participation."
        )
    if sum(server.num_samples.values()) == 0:
        raise ValueError(f"None of the {len(server.clients)} clients has a training sample. Check the partition.")


def refuse_scores_of_some(server: Server, engine: Engine, splits: Iterable[str]) -> None:
    """Refuse `evaluate_clients` where every client's scores are needed, or where those that it drew have none."""
    if server.evaluated is server.clients:
        return
    for callback in server.callbacks:
        if EVERY_SCORE in callback.facts.needs:
            raise ConfigurationError(
                f"{callback.key} goes by the scores of every client, and evaluate_clients scores "
                f"{len(server.evaluated)} of {len(server.clients)}. Leave evaluate_clients out, or {callback.key}."
            )
    known = engine.runner.described
    for split in splits:
        drawn, having = (
            [client for client in clients if known.num_samples(client, split)]
            for clients in (server.evaluated, server.clients)
        )
        if having and not drawn:
            raise ConfigurationError(
                f"evaluate_clients drew {listed(server.evaluated)}, and "
                f"none of them has {split} samples, so that nobody would be scored on them; {len(having)} of the "
                f"{len(server.clients)} clients have some. Raise evaluate_clients, or give every client a {split} split."
            )


def refuse_data_elsewhere(left_out: Sequence[str], kept: Sequence[str]) -> None:
    """Warn of scores on data that are not in one place; refuse a run that would have no others."""
    if not left_out:
        return
    words = " and ".join(WORDS[data] for data in left_out)
    if not kept:
        raise ConfigurationError(
            f"Models are to be scored on {words} only, and the clients' data are not in one place. Add 'local' to "
            "evaluate_data."
        )
    warn(f"Scores on {words} are left out: the clients' data are not in one place.")


def refuse_loop(loop: Loop, server: Server, store: ClientStore, evaluate_seconds: float | None) -> None:
    """Refuse a loop that cannot run these callbacks, or not here."""
    if evaluate_seconds is not None and loop.clock is None:
        raise ConfigurationError(
            f"evaluate_seconds={evaluate_seconds} counts virtual seconds, and the loop {loop!r} has no clock. "
            "Give it one (docs/explanation/time.md), or use evaluate_every, which counts rounds."
        )
    loop.check(server)
    if loop.holds_records and not store.is_here:
        raise ConfigurationError(
            f"The loop {type(loop).__name__} carries out visits before they count, and holds back what clients "
            "keep until then; here their records are at their sites. Leave out trainer.loop (with a method that runs in "
            "rounds), or use an engine that has the clients here (engine='sequential')."
        )


def tell_of_sizes(sizes: Mapping[str, int], sites: Mapping[str, str]) -> None:
    """Say where a client that is elsewhere claims many more samples than all others: nobody here can check that."""
    client = max(sizes, key=lambda name: sizes[name], default="")
    others = sorted(size for name, size in sizes.items() if name != client and size)
    if len(others) > 1 and sizes[client] > FAR * (usual := others[len(others) // 2]):
        share = sizes[client] / sum(sizes.values())
        said = f"client '{client}' says that it has {sizes[client]} training samples, {share:.1%} of all"
        warn(
            f"{at_site(said, client, sites.get(client))}; the median of the others is {usual}. It is weighted by them in a "
            "mean, and nobody here can check it: if you do not believe it, leave it out, or weight uniformly."
        )
