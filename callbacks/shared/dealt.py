"""Values that are dealt to the clients in turn, by their places in the order of all."""

from __future__ import annotations

from collections.abc import Sequence

from fedlightning.algorithm import FederatedCallback, Server


def refuse_new_deal(
    callback: FederatedCallback, server: Server, joined: Sequence[str], option: str, values: Sequence[float]
) -> None:
    """Refuse clients that join where the clients that are there would be dealt other values by that.

    Args:
        callback: The callback that deals.
        server: The server, which knows the new clients already.
        joined: The new clients.
        option: Name of the callback's argument.
        values: What is dealt in turn.

    Raises:
        ValueError: Naming the first client whose value would change.
    """
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
