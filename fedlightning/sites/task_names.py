"""What a task is, in words for people."""

from __future__ import annotations

from typing import Any

from fedlightning.deployment.export import Deploy
from fedlightning.engines.base import Visit
from fedlightning.engines.score_tasks import ScoreClient, ScoreModel
from fedlightning.sites.status import of_clients

VERBS = {Visit: "trains", ScoreClient: "scores", ScoreModel: "scores", Deploy: "writes the model of"}


def in_words(task: Any) -> str:
    """Return what a site does that carries out a task, such as "trains client a"."""
    verb = next((word for kind, word in VERBS.items() if isinstance(task, kind)), "checks")
    clients = [task.client] if task.client is not None else list(getattr(task, "clients", ()))
    return f"{verb} {of_clients(clients)}"
