"""The clients of a federation, and those that take part in a round.

Statistics of the data that clients agree on before round 1: asked once, added up, kept in the run's folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlightning.client.runtime import refuse_uncounted
from fedlightning.contract import FederatedCallback
from fedlightning.datamodules.agreed_statistics import chosen_words
from fedlightning.datamodules.federated_data import sort_clients
from fedlightning.engines.contract import Engine
from fedlightning.errors import ConfigurationError
from fedlightning.storage.files import read_json, readable_json, write_text_atomically, writing

FILE = "statistics.json"
MIN_SITES = 3
"""Fewest sites behind a sum: of two, each subtracts its own and has the other's."""
MOST_WORDS = 100_000


def aggregate_data_statistics(
    engine: Engine, wanted: Mapping[str, Any], callbacks: Iterable[FederatedCallback], folder: Path | None
) -> None:
    """Ask the clients that train for what their data modules want to agree on, and let all data be prepared with the totals.

    Held-out clients give nothing, and their data are prepared with the totals of the others. A run that goes on has the
    totals of its beginning.

    Args:
        engine: Has the clients.
        wanted: What their data modules want to agree on.
        callbacks: Of the federation; some refuse that statistics leave.
        folder: Folder of the run, where the totals of a run that goes on are; `None`: there is none.

    Raises:
        ConfigurationError: If a callback refuses, too few sites are behind a sum, a site answers nonsense, or the run began
            with other clients.
    """
    data = engine.runner.described
    refuse_statistics(callbacks)
    clients = {client: data.num_samples(client) for client in sort_clients(data.client_ids)}
    path = None if folder is None else folder / FILE
    if path is not None and path.exists():
        kept = read_json(path)
        _refuse_others(path, kept, wanted, clients)
    else:
        statistics = engine.measure()
        sites = engine.sites
        totals = total({client: statistics.get(client) for client in clients}, lambda client: sites.get(client, client))
        # A word's count may be one site's, so that clients are told which words have a place, and no counts.
        for name, most in wanted.get("words", {}).items():
            totals[f"words {name}"] = dict.fromkeys(chosen_words(totals[f"words {name}"], most), 0.0)
        kept = {"wanted": wanted, "clients": clients, "totals": totals}
    engine.statistics = kept
    engine.agree(kept["totals"])


def keep(engine: Engine, folder: Path) -> None:
    """Write the totals into the folder of a run that begins."""
    with writing(folder / FILE):
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / FILE, readable_json(engine.statistics))


def refuse_statistics(callbacks: Iterable[FederatedCallback]) -> None:
    """Refuse statistics where a callback promises that nothing leaves uncovered."""
    what = "The data are to agree on statistics before round 1 (scale: federated, or words of categories)"
    refuse_uncounted(callbacks, what, "Use scale: local or none, and lists of categories.")


def total(statistics: Mapping[str, Any], site_of: Any = lambda client: client) -> dict[str, Any]:
    """Return the sums over clients, in the order given.

    Args:
        statistics: Client -> what it gives.
        site_of: Gives a client's site.

    Raises:
        ConfigurationError: If clients do not give the same numbers, or fewer than three sites are behind one.

    Example:
        >>> total({name: {"moments age": [5.0, 10.0, 30.0]} for name in "abc"})
        {'moments age': [15.0, 30.0, 90.0]}
    """
    sums: dict[str, Any] = {}
    givers: dict[str, set[str]] = {}
    form = {name: _form(value) for name, value in (next(iter(statistics.values()), None) or {}).items()}
    for client, statistics_of_client in statistics.items():
        if (
            not isinstance(statistics_of_client, Mapping)
            or {name: _form(value) for name, value in statistics_of_client.items()} != form
        ):
            raise ConfigurationError(f"Client '{client}' does not give the statistics that all agree on.")
        for name, value in statistics_of_client.items():
            if isinstance(value, list):
                before = sums.get(name, [0.0] * len(value))
                sums[name] = [first + other for first, other in zip(before, value, strict=True)]
                gives = any(value)
            else:
                before, gives = sums.get(name, {}), bool(value)
                sums[name] = {word: before.get(word, 0.0) + value.get(word, 0.0) for word in sorted({*before, *value})}
            if gives:
                givers.setdefault(name, set()).add(site_of(client))
    for name in form:
        count = len(givers.get(name, ()))
        if count < MIN_SITES:
            raise ConfigurationError(
                f"'{name.partition(' ')[2]}' has enough values to give at {count} sites; sums take {MIN_SITES} or more, "
                "since of two each could subtract its own. Use scale: local, give statistics for the column, or drop it."
            )
    return sums


def _form(value: Any) -> Any:
    """Return what values of clients have in common; raise nothing for nonsense, which no other client has."""
    if isinstance(value, list) and all(type(number) is float and math.isfinite(number) for number in value):
        return len(value)
    if isinstance(value, dict) and len(value) <= MOST_WORDS:
        words = all(isinstance(word, str) for word in value)
        if words and all(type(number) is float and math.isfinite(number) and number >= 0 for number in value.values()):
            return "words"
    return object()


def _refuse_others(path: Path, kept: Any, wanted: Mapping[str, Any], clients: Mapping[str, int]) -> None:
    if not isinstance(kept, dict) or not {"wanted", "clients", "totals"} <= set(kept):
        raise ConfigurationError(f"{path} is not what a run writes. Start a new run.")
    if kept["wanted"] != wanted:
        raise ConfigurationError(
            f"The run agreed on the statistics {kept['wanted']} ({path}), and the data want {wanted} now. Resume with the "
            "data section that the run was started with, or start a new run."
        )
    changed = [client for client, size in kept["clients"].items() if clients.get(client) != size]
    if changed:
        now = clients.get(changed[0])
        raise ConfigurationError(
            f"The statistics in {path} are of {kept['clients'][changed[0]]} training samples of client '{changed[0]}', which "
            f"has {'none' if now is None else now} now. Sums of both would tell the difference, so they are not asked for "
            "again: resume with the data of the beginning, or start a new run."
        )


@dataclass
class Population:
    """The clients of a federation and what is known of their data.

    Attributes:
        num_samples: Training samples of every client that takes part in training, as of the round asked for last.
        held_out: Ids of the clients that are kept out of training, in order. Algorithms do not see them.
        scored: Ids of the clients that are scored, in order: `clients`, or those that `evaluation.clients` drew.
        sizes: Samples of each client in training, validation and test, as they were told before round 1.
        over_rounds: Training samples of a client in rounds 0, 1, ..., the last number from then on, where they change.
        together: Whether all clients' data are in one place.
        sites: Name of each client's site, where clients are at sites.
        public_source: Gives the data module's loader of public data, or `None`, and the name of the data module.
        clients: Ids of the clients that take part in training, in order.
    """

    num_samples: dict[str, int]
    held_out: list[str] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    sizes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    over_rounds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    together: bool = True
    sites: Mapping[str, str] = field(default_factory=dict)
    public_source: Callable[[], tuple[Any, str]] = lambda: (None, "The data module")
    clients: list[str] = field(init=False)
    _round: int = field(default=-1, init=False)  # the round that `num_samples` are of, where they change

    def __post_init__(self) -> None:
        self.clients = sort_clients(self.num_samples)
        self.held_out = sort_clients(self.held_out)
        self.num_samples = {client: self.num_samples[client] for client in self.clients}
        self.scored = self.scored or self.clients

    @property
    def all_are_scored(self) -> bool:
        """Whether every client is scored."""
        return self.scored is self.clients

    def samples_in(self, round: int) -> dict[str, int]:
        """Return the training samples of each client in a round, from 0."""
        if self.over_rounds and self._round != round:
            now = {client: counts[min(round, len(counts) - 1)] for client, counts in self.over_rounds.items()}
            self.num_samples = {client: now.get(client, count) for client, count in self.num_samples.items()}
            self._round = round
        return self.num_samples


@dataclass
class Participation:
    """How many clients take part in a round, where no callback says who.

    Attributes:
        share: A share (float in (0, 1]) or a number (int) of clients.
        is_requested: Whether the clients of a round were asked for since it was planned.
    """

    share: int | float = 1.0
    is_requested: bool = False

    @property
    def is_everybody(self) -> bool:
        """Whether all clients take part, however many they are."""
        return self.share == 1.0 and not isinstance(self.share, int)

    def count(self, clients: int) -> int:
        """Return how many of so many clients take part.

        Example:
            >>> Participation(0.5).count(5), Participation(3).count(2), Participation(0.01).count(5)
            (2, 2, 1)
        """
        count = self.share if isinstance(self.share, int) else round(self.share * clients)
        return min(max(count, 1), clients)
