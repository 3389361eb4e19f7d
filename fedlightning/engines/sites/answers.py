"""What sites may answer: what is wrong with an answer before the server's door looks at it."""

from __future__ import annotations

from typing import Any

from fedlightning.federation.checks import CheckThere
from fedlightning.federation.deploy import Deployed
from fedlightning.federation.engine import Task, Visit
from fedlightning.federation.sanity import Tried, TryStep
from fedlightning.messages import Update
from fedlightning.scoring.rows import Row
from fedlightning.scoring.tasks import ScoreClient, ScoreModel


def fault(task: Task[Any], answer: Any) -> str | None:
    """Return what is wrong with an answer before the server's door looks at it; `None` if nothing is."""
    if isinstance(task, Visit):
        return None if isinstance(answer, Update) else f"its site answers with a {type(answer).__name__}"
    if isinstance(task, ScoreModel | ScoreClient):
        if not isinstance(answer, list) or not all(isinstance(row, Row) for row in answer):
            return f"its site answers with a {type(answer).__name__}, not with scores"
        of = {task.client} if isinstance(task, ScoreClient) else set(task.clients)
        asked = (task.scored.round, task.scored.stage, task.scored.model, task.scored.checkpoint)
        if any(row.client not in of or (row.round, row.stage, row.model, row.checkpoint) != asked for row in answer):
            return "its site answers with scores that were not asked for"
        return None
    if isinstance(task, TryStep):
        return None if isinstance(answer, Tried) else f"its site answers with a {type(answer).__name__}"
    if isinstance(task, CheckThere):
        fits = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str | None)
        texts = fits and isinstance(answer[1], list) and all(isinstance(text, str) for text in answer[1])
        return None if texts else f"its site answers with a {type(answer).__name__}"
    if not isinstance(answer, Deployed) or answer.client != task.client or answer.module is not None:
        return "its site does not say what became of its model"
    return None


def is_version(value: Any) -> bool:
    """Return whether a site names a version of a record."""
    return isinstance(value, str) and value.isascii() and value.isalnum() and len(value) <= 64


def is_note(value: Any) -> bool:
    """Return whether a site tells of a record what the server may know of it."""
    if not isinstance(value, dict) or set(value) != {"is_personal", "checkpoints"}:
        return False
    kept = value["checkpoints"]
    return (
        isinstance(value["is_personal"], bool)
        and isinstance(kept, dict)
        and all(
            isinstance(key, str)
            and isinstance(entry, dict)
            and {name: type(part) for name, part in entry.items()} == {"name": str, "stage": str, "round": int}
            for key, entry in kept.items()
        )
    )
