"""Values that are dealt to the clients in turn, by their places in the order of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from fedlightning.algorithm import FederatedCallback, Server

T = TypeVar("T")


def dealt_to(values: Sequence[T] | Mapping[str, T], clients: Sequence[str], client: str) -> T:
    """Return a client's value: from a table by client, or from a list that is dealt in turn.

    Example:
        >>> from fedlightning.callbacks.shared.values_by_turn import dealt_to
        >>> [dealt_to([8, 4], ["a", "b", "c"], client) for client in "abc"], dealt_to({"a": 2}, [], "a")
        ([8, 4, 8], 2)
    """
    return values[client] if isinstance(values, Mapping) else values[clients.index(client) % len(values)]


def refuse_new_deal(
    callback: FederatedCallback, server: Server, joined: Sequence[str], option: str, values: Sequence[float]
) -> None:
    """Refuse clients that join where the clients that are there would be dealt other values by that."""
    before = [client for client in server.clients if client not in set(joined)]
    for place, client in enumerate(before):
        now = server.clients.index(client)
        old, new = values[place % len(values)], values[now % len(values)]
        if old != new:
            raise ValueError(
                f"{callback.key} deals {option}={list(values)} to the clients in the order of their names: with client "
                f"'{next(c for c in server.clients if c in set(joined))}' between them, client '{client}' would change from "
                f"{old} to {new}. Give new clients names that come after all others, or start a new run."
            )
