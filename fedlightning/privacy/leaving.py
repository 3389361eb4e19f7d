"""What can leave a client: :class:`Leaving`, the one list that every update is held to before it is sent.

The side that sends computes it, from its own module, callbacks and settings; no message widens it. Rounds choose subsets. A
site, a privacy budget or a person that wants to know what may ever leave reads this list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client import Client
from fedlightning.contract import POOLED, FederatedCallback
from fedlightning.contract.messages import Extra, Spec, Update
from fedlightning.errors import ConfigurationError, listed
from fedlightning.layers import expand
from fedlightning.tensors import entry_kinds, tied_names

WHOLE = "the whole model"


@dataclass(frozen=True)
class Leaving:
    """The largest set of what can leave a client of one architecture, in whatever round and whoever asks.

    Beside it there are, always: counts of samples and steps, the values that the module logs, and scores; and texts and
    models where a site allows them (`--send_texts true`, `--export server`).

    Attributes:
        entries: Entries of the model.
        private: Entries that never leave.
        extras: By callback, the extras that it declares in `wire().up`.

    Example:
        >>> leaving = Leaving(frozenset({"body.weight"}), frozenset({"head.weight"}), {})
        >>> leaving.fault(["body.weight"]), str(leaving)
        (None, "1 of 2 entries of the model, never 'head.weight'; counts, logged numbers and scores")
        >>> leaving.fault(["head.weight"])
        "'head.weight' stays with the client: its own configuration lets 'body.weight' leave, and nothing else of the model"
    """

    entries: frozenset[str]
    private: frozenset[str]
    extras: Mapping[str, Mapping[str, Spec]]

    @property
    def is_whole(self) -> bool:
        """Whether that is every entry of the model."""
        return not self.private

    def __str__(self) -> str:
        """Return it in words, for people."""
        count = f"{len(self.entries)} of {len(self.entries) + len(self.private)} entries of the model"
        part = f"{count}, never {_quoted(self.private)}" if self.entries else "no entry of the model"
        extras = [f"{name} of {key}" for key, up in self.extras.items() for name in up]
        told = "; ".join([WHOLE if self.is_whole else part, *([", ".join(extras)] if extras else [])])
        return f"{told}; counts, logged numbers and scores"

    @property
    def terms(self) -> str:
        """A hash of it: what a client keeps stays under the terms under which it was kept."""
        listed = (
            sorted(self.entries),
            sorted(self.private),
            sorted((key, sorted(up)) for key, up in self.extras.items()),
        )
        return hashlib.sha256(repr(listed).encode()).hexdigest()

    def fault(self, names: Collection[str]) -> str | None:
        """Return why some entries do not leave, by name; `None` if all of them may."""
        held = next((name for name in names if name not in self.entries), None)
        if held is None:
            return None
        if held not in self.private:
            return f"the model has no '{held:.80}'"
        return (
            f"'{held}' stays with the client: its own configuration lets {_quoted(self.entries)} leave, and nothing else of "
            "the model"
        )


def refuse_private(blueprint: Blueprint, client: Client, update: Update) -> None:
    """Refuse an update with what does not leave its client, or a message that asks for it: a check of `leave`.

    Raises:
        ValueError: With the entry.
    """
    leaving = leaving_of(blueprint, client.id)
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


def leaving_of(blueprint: Blueprint, client: str) -> Leaving:
    """Return what can leave a client, found out once for each architecture."""
    name = blueprint.architecture_of(client)
    known: dict[tuple[str, bool], Leaving] = blueprint.tools.setdefault("leaving", {})
    at = name, client == POOLED
    if at not in known:
        known[at] = _found(blueprint, name, everything=client == POOLED)
    return known[at]


def _found(blueprint: Blueprint, architecture: str, everything: bool) -> Leaving:
    module = blueprint.reference(architecture)
    kinds, tied = entry_kinds(module), tied_names(module)
    names = set(kinds)
    for callback in () if everything else blueprint.callbacks:
        try:
            answer = _of(callback, module)
        except (AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"{callback.key} cannot say without a server which entries can leave a client ({type(error).__name__}: "
                f"{error}). Declare in its wire() what no round exceeds: Wire(entries=[...]), or entries='all' for "
                "the whole model."
            ) from error
        if answer is not None:
            names &= set(expand(answer, kinds))
    if blueprint.settings.float_buffers != "average" and not everything:
        names = {name for name in names if kinds[name] in ("trainable", "frozen")}
    entries = frozenset(name for name in names if tied.get(name, frozenset()) <= names)
    extras = {callback.key: up for callback in blueprint.callbacks if (up := callback.wire(module).up)}
    return Leaving(entries, frozenset(kinds) - entries, extras)


def _of(callback: FederatedCallback, module: nn.Module) -> Iterable[str] | None:
    """Return what a callback lets leave, as it declares; `None`: everything."""
    entries = callback.wire(module).entries
    if entries == "shared":
        nobody: Any = SimpleNamespace(module=module, kinds=entry_kinds(module), is_mixed=False)
        return callback.shared_names(nobody, module)
    return None if entries == "all" else entries


def _quoted(names: Collection[str]) -> str:
    return listed(f"'{name}'" for name in sorted(names)) if names else "nothing"
