"""What a task is, in words for people."""

from __future__ import annotations

from typing import Any

from fedlightning.engines.sites.status import of_clients
from fedlightning.federation.deploy import Deploy
from fedlightning.federation.engine import Visit
from fedlightning.scoring.tasks import ScoreClient, ScoreModel

VERBS = {Visit: "trains", ScoreClient: "scores", ScoreModel: "scores", Deploy: "writes the model of"}


def in_words(task: Any) -> str:
    """Return what a site does that carries out a task, such as "trains client a"."""
    verb = next((word for kind, word in VERBS.items() if isinstance(task, kind)), "checks")
    clients = [task.client] if task.client is not None else list(getattr(task, "clients", ()))
    return f"{verb} {of_clients(clients)}"
