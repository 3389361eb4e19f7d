"""The one list of what leaves clients in a run, and how the callbacks that protect clients cover each item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info

from fedlightning.contract import CallbackList, Change, Kind, Outgoing, Protection, SumCodec, UpdateCodec
from fedlightning.contract.messages import Extra, Spec
from fedlightning.errors import listed
from fedlightning.privacy.leaving import leaving_of
from fedlightning.server.parts import Part

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation
    from fedlightning.server.server import Server


class OutgoingReport(Part):
    """Says what leaves clients and how it is covered, where a callback protects them."""

    def on_begin(self, federation: Federation) -> None:
        if told := in_words(federation.server.callbacks, federation.server.outgoing):
            rank_zero_info(told)

    def on_restored(self, federation: Federation) -> None:
        federation.server.outgoing = outgoing_of(federation)

    def summary(self, federation: Federation) -> dict[str, Any]:
        items = covered(federation.server.callbacks, federation.server.outgoing)
        rows = [{"what": item.what, "when": item.when, "cover": cover} for item, cover in items]
        promising = (one for one in federation.server.callbacks if isinstance(one, Protection | SumCodec))
        promises = [{"callback": one.key, **asdict(promise)} for one in promising for promise in one.promises]
        return ({"leaves": rows} if rows else {}) | ({"promises": promises} if promises else {})


def outgoing_of(federation: Federation) -> list[Outgoing]:
    """Return all that leaves clients: what callbacks declare, and what the core sends. Known before round 1."""
    server, runner = federation.server, federation.engine.runner
    ones = {runner.blueprint.architecture_of(client): client for client in server.clients}
    found = {name: leaving_of(runner.blueprint, client) for name, client in ones.items()}
    entries = [
        f"{len(one.entries)} of {len(one.entries) + len(one.private)} entries of {f'model {name}' if name else 'the model'}"
        for name, one in found.items()
    ]
    extras = {
        (key, name): spec for one in found.values() for key, up in one.extras.items() for name, spec in up.items()
    }
    visit, every = "in each visit", federation.asked_evaluate_every
    items = [
        Outgoing("sizes", "numbers of samples, classes and batches, hashes of who tests on which", "before round 1"),
        Outgoing("classes", "numbers of training samples by class, hashes of who trains on which", "before round 1"),
        Outgoing("entries", ", ".join(entries), visit),
        *(Outgoing(_kind(server, key, spec), f"'{name}' of {key}", visit, key) for (key, name), spec in extras.items()),
        Outgoing("counts", "numbers of samples and steps, and learning rates", visit),
        Outgoing("logged", "values that the module logs in training", visit),
    ]
    if server.callbacks.covers_training:
        items.append(Outgoing("undeclared", "what callbacks make of an update without declaring it", visit))
    if federation.stages and every > 0:
        when = "in every round" if every == 1 else f"every {every} rounds"
        items.append(Outgoing("scores", f"validation scores of stages {', '.join(federation.stages)}", when))
    if federation.test_data:
        items.append(Outgoing("tests", f"test scores on {' and '.join(federation.test_data)} data", "after training"))
    items.append(Outgoing("texts", "why a client failed", "where one does"))
    if server.run_dir is not None:
        kind: Kind = "own models" if server.callbacks.making(Change.BESIDE) else "models"
        items.append(Outgoing(kind, "models of clients in the run's folder, where clients have some", "after training"))
    return items


def _kind(server: Server, key: str, spec: Spec) -> Kind:
    """Return what an extra is: a code of entries is as they are."""
    codec = next((one for one in server.callbacks if one.key == key and isinstance(one, UpdateCodec)), None)
    if codec is not None:
        return "entries"
    return "means" if Extra.of(spec).by_class else "extra"


def covered(callbacks: CallbackList, items: Sequence[Outgoing]) -> list[tuple[Outgoing, str]]:
    """Return how each item is covered; empty where no callback protects clients."""
    protecting = [callback for callback in callbacks if isinstance(callback, Protection)]
    if not protecting:
        return []
    names = len(protecting) > 1
    return [
        (item, ", ".join(f"{one.covers(item)}{f' ({one.key})' if names else ''}" for one in protecting))
        for item in items
    ]


def in_words(callbacks: CallbackList, items: Sequence[Outgoing]) -> str:
    """Return the list in a sentence, for the log; empty where no callback protects clients."""
    by_cover: dict[str, list[str]] = {}
    for item, cover in covered(callbacks, items):
        by_cover.setdefault(cover, []).append(str(item))
    told = "; ".join(f"{cover}: {listed(found, len(found))}" for cover, found in by_cover.items())
    return f"What leaves clients. {told}." if told else ""
