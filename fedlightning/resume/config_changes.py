"""What may have changed when a run is resumed: its configuration, if that is allowed, and clients that join."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlightning.client.blueprint import Blueprint
from fedlightning.datamodules.held_out import draw_clients
from fedlightning.errors import ConfigurationError, listed, warn
from fedlightning.models.client_models import ClientModels
from fedlightning.resume.fingerprint import CONTENT, differences
from fedlightning.server.server import Server

Fingerprint = Callable[[Sequence[str], Sequence[str]], dict[str, Any]]
"""Returns a run's fingerprint as it would be without the clients that joined, from their ids and the held-out ones'."""
MOST = 5
"""Changes and clients that a sentence names."""


@dataclass(frozen=True)
class Changes:
    """What a resumed run has that it was not started with.

    Attributes:
        configuration: Changes of the configuration, a sentence each.
        joined: Clients that it did not train before.
    """

    configuration: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)

    def told(self, next_round: int) -> list[str]:
        """Return the lines for the summary, and warn of each kind."""
        lines = [f"from round {next_round}: {text}" for text in self.configuration]
        if self.configuration:
            warn(f"The run goes on with another configuration: {_some(self.configuration)}.")
        if self.joined:
            lines.append(f"from round {next_round}: {_named(self.joined, len(self.joined))} take part")
            warn(f"From round {next_round} on {_named(self.joined)} take part, which the run did not train before.")
        return lines


def changes_since(
    saved: Mapping[str, Any],
    server: Server,
    fingerprint: Fingerprint,
    place: object,
    *,
    rounds_done: int = 0,
    allow_changes: bool = False,
    allow_new_clients: bool = False,
) -> Changes:
    """Compare a run with its saved state."""
    joined = joined_since(saved, server)
    if joined and not allow_new_clients:
        raise ValueError(
            f"The data have {_named(joined)}, which the run in {place} did not train. Resume with the run's own data and "
            "held_out, or let new clients take part from the next round on with allow_new_clients (then summary.json lists "
            "them)."
        )
    if joined and rounds_done >= server.rounds:  # else they would be among the scores of those that have trained
        raise ValueError(
            f"All {rounds_done} rounds of the run in {place} are done, so {_named(joined)} cannot train with the others. "
            f"Raise max_rounds above {rounds_done}, or serve new clients by trainer.onboard or `fedlightning onboard`."
        )
    now = fingerprint(joined, saved["held_out"] if joined else server.held_out)
    before = dict(saved["lasting"])
    if not (CONTENT in before and CONTENT in now):  # compared where the data are in memory both times
        before.pop(CONTENT, None)
        now.pop(CONTENT, None)
    changed = differences(before, now)
    others = [text for text in changed if text.startswith("held_out ")]
    if others:
        raise ValueError(
            f"The run in {place} cannot go on with other held-out clients: {others[0]}. Resume with the held_out of its "
            "config.yaml, let held-out clients take part with allow_new_clients, serve new clients by trainer.onboard or "
            "`fedlightning onboard`, or start a new run."
        )
    if changed and not allow_changes:
        raise ValueError(
            f"The run in {place} cannot go on with another configuration: {_some(changed)}. Resume it as it was "
            "started (its config.yaml says how), start a new run without resume, or allow the change with "
            "allow_config_change (then summary.json lists it)."
        )
    return Changes(changed, joined)


def keep_assigned(saved: Mapping[str, Any], blueprint: Blueprint, place: object) -> None:
    """Let clients that have trained keep the architecture that they had; a rule may give it to others now."""
    had, now = saved.get("assigned", {}), blueprint.assigned
    by_name = isinstance(blueprint.template, ClientModels) and not isinstance(blueprint.template.assign, str)
    for client in had if by_name else ():
        if client in now and now[client] != had[client]:
            raise ValueError(
                f"Client '{client}' of the run in {place} has a model '{had[client]}', and ClientModels assigns it "
                f"'{now[client]}' now. Assign it the model that it has trained."
            )
    blueprint.assigned = {client: had.get(client, name) for client, name in now.items()}


def check_scored(saved: Mapping[str, Any], server: Server, place: object) -> None:
    """Refuse to score a run with clients that never trained among those that did, or the other way round."""
    trained = set(saved["clients"])
    strangers = [client for client in server.clients if client not in trained]
    if strangers:
        raise ValueError(
            f"The run in {place} did not train {_named(strangers)}, whose scores would be among those of clients that did. "
            "Score it with its own data and held_out (its config.yaml says which), or name them in held_out."
        )
    outside = [client for client in server.held_out if client in trained]
    if outside:
        raise ValueError(
            f"The run in {place} trained {_named(outside)}, so held_out cannot have them scored as unseen clients. Score it "
            "with its own held_out (its config.yaml says which)."
        )


def scored_before(saved: Mapping[str, Any], server: Server, seed: int) -> list[str]:
    """Return the clients that a run has scored up to its saved state."""
    clients: list[str] = list(saved["clients"])
    given = saved["lasting"].get("evaluation.clients")
    return clients if given is None else draw_clients(clients, given, seed, "evaluated")


def check_rescored(before: Sequence[str], server: Server, place: object, go_on: bool) -> None:
    """Refuse to compare scores of different clients across rounds, and warn where a run gets scores of others."""
    if list(before) == server.population.scored:
        return
    counts = f"{len(before)} of {len(server.clients)} clients", f"{len(server.population.scored)}"
    for callback in server.callbacks if go_on else ():
        if callback.is_of("ModelSelection"):
            raise ConfigurationError(
                f"{callback.key} compares the scores of all rounds, and the run in {place} has scored {counts[0]} and would "
                f"score {counts[1]} now. Resume it with its own evaluation.clients (its config.yaml says which), or start a "
                "new run."
            )
    if not go_on:
        warn(
            f"The run in {place} scored {counts[0]} in training, and {counts[1]} are scored now (evaluation.clients): its "
            "results on validation data and at stage L2 are of the former. summary.json says so (evaluation, in_training)."
        )


def refuse_mixed_validation(before: Sequence[str], server: Server) -> None:
    """Refuse validation of a run at clients that it has not scored in training: its curve would mix two sets of clients."""
    if not set(server.population.scored) <= set(before):
        raise ConfigurationError(
            f"The run has validation scores of {len(before)} of {len(server.clients)} clients for every round, and validate "
            f"would add those of others to its last one: {len(server.population.scored)} are scored now. Validate it with "
            "its own evaluation.clients (its config.yaml says which), or score other clients by test."
        )


def join_clients(server: Server, clients: Sequence[str]) -> None:
    """Let every callback make room for clients that take part from now on."""
    for callback in server.callbacks:
        join = callback.facts.newcomers.join
        if callable(join):
            join(server, clients)
        elif not join and server.state.get(callback.key):
            raise ConfigurationError(
                f"{callback.key} keeps state at the server and does not say what becomes of it when clients join "
                f"({listed(clients)}): its facts have no Newcomers(join=...). Start a new run with them, or serve them by "
                "trainer.onboard or `fedlightning onboard`."
            )


def joined_since(saved: Mapping[str, Any], server: Server) -> list[str]:
    """Return the clients that take part now and did not when the state was saved."""
    clients: Sequence[str] = saved["clients"]
    had = set(clients)
    joined = [client for client in server.clients if client not in had]
    if joined:
        now = {*server.clients, *server.held_out}
        gone = [client for client in clients if client not in server.num_samples]
        lost = [client for client in {*clients, *saved["held_out"]} if client not in now]
        if gone or lost:
            raise ValueError(
                f"The data have clients that the run did not train, {_named(joined)}, but not {_named(gone or sorted(lost))} "
                "of its own. Clients may join a run; nobody may leave it. Start a new run."
            )
    return joined


def _named(clients: Sequence[str], most: int = MOST) -> str:
    one = "client" if len(clients) == 1 else "clients"
    return f"{one} {listed(map(repr, clients), most)}"


def _some(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - MOST} more" if len(texts) > MOST else ""
    return "; ".join(texts[:MOST]) + more
