"""What sites may answer: what is wrong with an answer before the server checks what it says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedlightning.client.data_summary import Description
from fedlightning.client.requests import Evaluate
from fedlightning.compat.sheets import is_formula
from fedlightning.contract.messages import Update
from fedlightning.deployment.tasks import Deployed
from fedlightning.engines.base import Task, Visit
from fedlightning.engines.score_tasks import ScoreClient, ScoreModel
from fedlightning.errors import ConfigurationError, warn
from fedlightning.guards.preflight_task import PreflightTask, StepFinding
from fedlightning.guards.step_trials import StepTrial
from fedlightning.scores.rows import Gap, Row
from fedlightning.sites.connections import SENTENCE
from fedlightning.sites.request_checks import is_text
from fedlightning.sites.status import printable

METRICS = 10_000
"""Names of metrics in an answer."""
MOST_SAMPLES = 2**53
"""Samples of a client: sums of more are no whole numbers."""
LARGE = 0.9
"""Share of all training samples from which a site is named."""
NOT_ASKED = "its site answers with scores that were not asked for"
NO_NAME = f"its site names metrics by other than at most {METRICS} short texts that can be printed and are no formulas"


def fault(task: Task[Any], answer: Any) -> str | None:
    """Return what is wrong with an answer before the server checks what it says; `None` if nothing is."""
    if isinstance(task, Visit):
        return _fault_of_update(task.evaluate, answer)
    if isinstance(task, ScoreModel | ScoreClient):
        if not isinstance(answer, list) or not all(isinstance(row, Row) for row in answer):
            return f"its site answers with a {type(answer).__name__}, not with scores"
        of = {task.client} if isinstance(task, ScoreClient) else set(task.clients)
        asked = (task.scored.round, task.scored.stage, task.scored.model, task.scored.checkpoint)
        if any(row.client not in of or (row.round, row.stage, row.model, row.checkpoint) != asked for row in answer):
            return NOT_ASKED
        return _fault_of_places(task.evaluate, [(row.client, row.data, row.split, row.metric) for row in answer])
    if isinstance(task, StepTrial | PreflightTask):
        return None if isinstance(answer, StepFinding) else f"its site answers with a {type(answer).__name__}"
    if not isinstance(answer, Deployed) or answer.client != task.client or answer.module is not None:
        return "its site does not say what became of its model"
    return None


def _fault_of_update(evaluate: Evaluate, answer: Any) -> str | None:
    if not isinstance(answer, Update):
        return f"its site answers with a {type(answer).__name__}"
    if any(stage != "L2" for stage, *_ in (*answer.evaluations, *answer.gaps)):
        return NOT_ASKED
    if not _are_names([*answer.metrics, *(name for log in answer.logs for name in log.values)]):
        return NO_NAME
    gaps = [("", data, split, "") for _, data, split, _ in answer.gaps]
    return _fault_of_places(evaluate, [("", *row[1:4]) for row in answer.evaluations]) or _fault_of_places(
        evaluate, gaps
    )


def _fault_of_places(evaluate: Evaluate, found: Sequence[tuple[str, str, str, str]]) -> str | None:
    """Return what is wrong with scores by client, data, split and metric: each answers what was asked, once."""
    if any(data not in evaluate.data or split not in evaluate.splits for _, data, split, _ in found):
        return NOT_ASKED
    if len(set(found)) != len(found):
        return "its site answers with a score twice"
    return None if _are_names([metric for *_, metric in found]) else NO_NAME


def _are_names(metrics: Collection[str]) -> bool:
    return len(metrics) <= METRICS and all(
        is_text(metric) and metric.isprintable() and not is_formula(metric) for metric in metrics
    )


def check_shares(told: Mapping[str, Description], most: float) -> None:
    """Compare the training samples that sites say they have: means are weighted by them, and nobody can count them.

    Args:
        told: What each site says of its data, by its name.
        most: The largest share that a site may have.
    """
    shares = dict.fromkeys(told, 0)
    for name, one in told.items():
        for client, sizes in one.sizes.items():
            counts = [*sizes, *one.over_rounds.get(client, ())]
            bad = next((count for count in counts if not 0 <= count < MOST_SAMPLES), None)
            if bad is not None:
                raise ConfigurationError(
                    f"Site '{name}' says that client '{client}' has {bad} samples: no such number."
                )
            if client in one.client_ids:
                shares[name] += max(sizes[0], *one.over_rounds.get(client, (0,)))
    total, several = sum(shares.values()), len([count for count in shares.values() if count]) > 1
    for name, count in shares.items() if several else ():
        said = f"Site '{name}' says that it has {count} of all {total} training samples"
        if count > most * total:
            raise ConfigurationError(
                f"{said}, more than max_share={most:g}: the mean would be its model. Ask that site, take uniform weights, or "
                "raise --max_share."
            )
        if count > LARGE * total:
            warn(f"{said}: a mean weighted by samples is its model. Nobody can count them; --max_share refuses such.")


def in_lines(answer: Any) -> Any:
    """Return an answer whose texts for people are lines that can do nothing to a terminal."""
    if isinstance(answer, Update):
        answer.error = answer.error and printable(answer.error, SENTENCE)
        answer.gaps = [(*place, printable(reason, SENTENCE)) for *place, reason in answer.gaps]  # type: ignore[misc]
    elif isinstance(answer, list):
        answer[:] = [
            replace(row, reason=printable(row.reason, SENTENCE)) if isinstance(row, Gap) else row for row in answer
        ]
    elif isinstance(answer, Deployed):
        answer = replace(answer, reason=answer.reason and printable(answer.reason, SENTENCE))
    elif isinstance(answer, StepFinding):
        said = [printable(text, SENTENCE) for text in answer.said]
        answer = replace(answer, refusal=answer.refusal and printable(answer.refusal, SENTENCE), said=said)
    return answer


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
