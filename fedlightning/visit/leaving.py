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

import torch
from torch import nn

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.errors import ConfigurationError, listed
from fedlightning.hooks import POOLED, FederatedCallback
from fedlightning.layers import expand
from fedlightning.messages import Extra, Spec, Wire, check_extras
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

    def refuse_extras(
        self, extras: Mapping[str, Any], wires: Mapping[str, Wire], shapes: Mapping[str, torch.Size]
    ) -> None:
        """Refuse extras that were not declared, and private entries in them."""
        for key, found in extras.items():
            if key not in wires:
                raise ValueError(f"extras of '{key:.80}' are in the update, and no callback has that key: they stay")
            check_extras(key, found, wires[key].up, shapes)
            for name, value in found.items():
                states = value.values() if Extra.of(wires[key].up[name]).form == "states" else [value]
                held = [
                    entry for state in states if isinstance(state, Mapping) for entry in state if entry in self.private
                ]
                if held:
                    raise ValueError(f"{key} puts private entries into its '{name}': {self.fault(held)}")


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
