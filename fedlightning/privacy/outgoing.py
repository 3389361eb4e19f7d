"""The one list of what leaves clients in a run, and how the callbacks that protect clients cover each item.

What can leave a client: :class:`OutgoingFilter`, the one list that every update is held to before it is sent.

The side that sends computes it, from its own module, callbacks and settings; no message widens it. Rounds choose subsets. A
site, a privacy budget or a person that wants to know what may ever leave reads this list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client import Client
from fedlightning.contract import (
    POOLED,
    CallbackList,
    Change,
    FederatedCallback,
    Kind,
    OutgoingItem,
    Protection,
    SumCodec,
    UpdateCodec,
)
from fedlightning.contract.messages import Extra, Spec, Update
from fedlightning.errors import ConfigurationError, listed
from fedlightning.layers import expand
from fedlightning.server.parts import Part
from fedlightning.tensors import entry_kinds, tied_names

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation
    from fedlightning.server.server import Server


@dataclass(frozen=True)
class OutgoingFilter:
    """The largest set of what can leave a client of one architecture, in whatever round and whoever asks.

    Beside it there are, always: counts of samples and steps, the values that the module logs, and scores; and texts and
    models where a site allows them (`--send_texts true`, `--export server`).

    Attributes:
        entries: Entries of the model.
        private: Entries that never leave.
        extras: By callback, the extras that it declares in `wire().up`.

    Example:
        >>> leaving = OutgoingFilter(frozenset({"body.weight"}), frozenset({"head.weight"}), {})
        >>> leaving.fault(["body.weight"]), str(leaving)
        (None, "1 of 2 entries of the model, never 'head.weight'; counts, logged numbers and scores")
        >>> leaving.fault(["head.weight"])
        "'head.weight' stays with the client: its own configuration lets 'body.weight' leave, and nothing else of the model"
    """

    entries: frozenset[str]
    private: frozenset[str]
    extras: Mapping[str, Mapping[str, Spec]]

    def __str__(self) -> str:
        """Return it in words, for people."""
        count = f"{len(self.entries)} of {len(self.entries) + len(self.private)} entries of the model"
        part = f"{count}, never {_quoted(self.private)}" if self.entries else "no entry of the model"
        extras = [f"{name} of {key}" for key, up in self.extras.items() for name in up]
        words = "; ".join([part if self.private else "the whole model", *([", ".join(extras)] if extras else [])])
        return f"{words}; counts, logged numbers and scores"

    @property
    def terms(self) -> str:
        """A hash of it: what a client keeps stays under the terms under which it was kept."""
        extras = sorted((key, sorted(up)) for key, up in self.extras.items())
        return hashlib.sha256(repr((sorted(self.entries), sorted(self.private), extras)).encode()).hexdigest()

    def fault(self, names: Collection[str]) -> str | None:
        """Return why some entries do not leave, by name; `None` if all of them may."""
        private = next((name for name in names if name not in self.entries), None)
        if private is None:
            return None
        if private not in self.private:
            return f"the model has no '{private:.80}'"
        return (
            f"'{private}' stays with the client: its own configuration lets {_quoted(self.entries)} leave, "
            "and nothing else of the model"
        )


def refuse_private(blueprint: Blueprint, client: Client, update: Update) -> None:
    """Refuse an update with what does not leave its client, or a message that asks for it: a check of `leave`.

    Raises:
        ValueError: With the entry.
    """
    leaving = make_outgoing_filter(blueprint, client.id)
    reason = leaving.fault(client.message.returns)
    if reason is not None:
        raise ValueError(f"the server asks for what does not leave: {reason}")
    for callback in blueprint.callbacks:
        for name, value in update.extras.get(callback.key, {}).items():
            form = Extra.of(callback.wire(client.module).up[name]).form
            states = value.values() if form == "states" else [value]
            entries = [entry for state in states if isinstance(state, Mapping) for entry in state]
            private = [entry for entry in entries if entry in leaving.private]
            if private:
                raise ValueError(f"{callback.key} puts private entries into its '{name}': {leaving.fault(private)}")


def make_outgoing_filter(blueprint: Blueprint, client: str) -> OutgoingFilter:
    """Return what can leave a client, found out once for each architecture."""
    name = blueprint.architecture_of(client)
    filters: dict[tuple[str, bool], OutgoingFilter] = blueprint.tools.setdefault("leaving", {})
    at = name, client == POOLED
    if at not in filters:
        filters[at] = _find_outgoing(blueprint, name, everything=client == POOLED)
    return filters[at]


def _find_outgoing(blueprint: Blueprint, architecture: str, everything: bool) -> OutgoingFilter:
    module = blueprint.reference(architecture)
    kinds, tied = entry_kinds(module), tied_names(module)
    names = set(kinds)
    for callback in () if everything else blueprint.callbacks:
        try:
            answer = _of(callback, module)
        except (AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"{callback.key} cannot say without a server which entries can leave a client ({type(error).__name__}: "
                f"{error}). Declare in its wire() what no round exceeds: Wire(entries=[...]), or entries='all'."
            ) from error
        if answer is not None:
            names &= set(expand(answer, kinds))
    if blueprint.settings.float_buffers != "average" and not everything:
        names = {name for name in names if kinds[name] in ("trainable", "frozen")}
    entries = frozenset(name for name in names if tied.get(name, frozenset()) <= names)
    extras = {callback.key: up for callback in blueprint.callbacks if (up := callback.wire(module).up)}
    return OutgoingFilter(entries, frozenset(kinds) - entries, extras)


def _of(callback: FederatedCallback, module: nn.Module) -> Iterable[str] | None:
    """Return what a callback lets leave, as it declares; `None`: everything."""
    entries = callback.wire(module).entries
    if entries == "shared":
        nobody: Any = SimpleNamespace(module=module, kinds=entry_kinds(module), is_mixed=False)
        return callback.shared_names(nobody, module)
    return None if entries == "all" else entries


def _quoted(names: Collection[str]) -> str:
    return listed(f"'{name}'" for name in sorted(names)) if names else "nothing"


class OutgoingReport(Part):
    """Says what leaves clients and how it is covered, where a callback protects them."""

    def on_begin(self, federation: Federation) -> None:
        if sentence := describe_coverage(federation.server.callbacks, federation.server.outgoing):
            rank_zero_info(sentence)

    def on_restored(self, federation: Federation) -> None:
        federation.server.outgoing = list_outgoing(federation)

    def summary(self, federation: Federation) -> dict[str, Any]:
        callbacks = federation.server.callbacks
        items = list_coverage(callbacks, federation.server.outgoing)
        rows = [{"what": item.what, "when": item.when, "cover": cover} for item, cover in items]
        promising = (part for part in callbacks if isinstance(part, Protection | SumCodec))
        promises = [{"callback": part.key, **asdict(promise)} for part in promising for promise in part.promises]
        return ({"leaves": rows} if rows else {}) | ({"promises": promises} if promises else {})


def list_outgoing(federation: Federation) -> list[OutgoingItem]:
    """Return all that leaves clients: what callbacks declare, and what the core sends. Known before round 1."""
    server, runner = federation.server, federation.engine.runner
    ones = {runner.blueprint.architecture_of(client): client for client in server.clients}
    filters = {name: make_outgoing_filter(runner.blueprint, client) for name, client in ones.items()}
    entries = [
        f"{len(sent.entries)} of {len(sent.entries) + len(sent.private)} entries of "
        f"{f'model {name}' if name else 'the model'}"
        for name, sent in filters.items()
    ]
    extras = {
        (key, name): spec for sent in filters.values() for key, up in sent.extras.items() for name, spec in up.items()
    }
    before, visit, after, every = "before round 1", "in each visit", "after training", federation.asked_evaluate_every
    hashes = "hashes of who tests on which, of names of inputs and classes, and of options of the data"
    sizes = f"numbers of samples, classes and batches, {hashes}"
    items = [
        OutgoingItem("sizes", sizes, before),
        OutgoingItem("classes", "numbers of training samples by class, hashes of who trains on which", before),
        OutgoingItem("entries", ", ".join(entries), visit),
        *(
            OutgoingItem(_kind(server, key, spec), f"'{name}' of {key}", visit, key)
            for (key, name), spec in extras.items()
        ),
        OutgoingItem("counts", "numbers of samples and steps, and learning rates", visit),
        OutgoingItem("logged", "values that the module logs in training", visit),
    ]
    if server.callbacks.covers_training:
        items.append(OutgoingItem("undeclared", "what callbacks make of an update without declaring it", visit))
    if federation.stages and every > 0:
        when = "in every round" if every == 1 else f"every {every} rounds"
        items.append(OutgoingItem("scores", f"validation scores of stages {', '.join(federation.stages)}", when))
    if federation.test_data:
        items.append(OutgoingItem("tests", f"test scores on {' and '.join(federation.test_data)} data", after))
    items.append(OutgoingItem("texts", "why a client failed", "where one does"))
    if server.run_dir is not None:
        kind: Kind = "own models" if server.callbacks.making(Change.BESIDE) else "models"
        items.append(OutgoingItem(kind, "models of clients in the run's folder, where clients have some", after))
    return items


def _kind(server: Server, key: str, spec: Spec) -> Kind:
    """Return what an extra is: a code of entries is as they are."""
    if any(part.key == key and isinstance(part, UpdateCodec) for part in server.callbacks):
        return "entries"
    return "means" if Extra.of(spec).by_class else "extra"


def list_coverage(callbacks: CallbackList, items: Sequence[OutgoingItem]) -> list[tuple[OutgoingItem, str]]:
    """Return how each item is covered; empty where no callback protects clients."""
    protecting = [callback for callback in callbacks if isinstance(callback, Protection)]
    if not protecting:
        return []
    names = len(protecting) > 1
    return [
        (item, ", ".join(f"{callback.covers(item)}{f' ({callback.key})' if names else ''}" for callback in protecting))
        for item in items
    ]


def describe_coverage(callbacks: CallbackList, items: Sequence[OutgoingItem]) -> str:
    """Return the list in a sentence, for the log; empty where no callback protects clients."""
    by_cover: dict[str, list[str]] = {}
    for item, cover in list_coverage(callbacks, items):
        by_cover.setdefault(cover, []).append(str(item))
    words = "; ".join(f"{cover}: {listed(texts, len(texts))}" for cover, texts in by_cover.items())
    return f"What leaves clients. {words}." if words else ""
