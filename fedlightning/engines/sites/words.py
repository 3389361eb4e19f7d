"""What a task is, in words for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlightning.engines.sites.status import NAME, printable
from fedlightning.federation.deploy import Deploy
from fedlightning.federation.engine import Visit
from fedlightning.scoring.tasks import ScoreClient, ScoreModel

LISTED = 10
"""Clients that are listed in a line."""
VERBS = {Visit: "trains", ScoreClient: "scores", ScoreModel: "scores", Deploy: "writes the model of"}


def in_words(task: Any) -> str:
    """Return what a site does that carries out a task, such as "trains client a"."""
    verb = next((word for kind, word in VERBS.items() if isinstance(task, kind)), "checks")
    clients = [task.client] if task.client is not None else list(getattr(task, "clients", ()))
    return f"{verb} {of_clients(clients)}"


def of_clients(clients: Sequence[str]) -> str:
    """Return clients in words.

    Example:
        >>> of_clients(["a"]), of_clients(["a", "b"]), of_clients([])
        ('client a', 'clients a, b', 'no client')
    """
    if not clients:
        return "no client"
    more = f" and {len(clients) - LISTED} more" if len(clients) > LISTED else ""
    shown = ", ".join(printable(client, NAME) for client in clients[:LISTED])
    return f"client{'s' if len(clients) > 1 else ''} {shown}{more}"
