"""What sites may answer: what is wrong with an answer before the server checks what it says.

What a request to a site may say, tasks apart: a rule for each part, by which the site goes before it looks further.

Free text that would leave a site: the message of an exception may quote a patient. By default it stays.

What leaves of an error is its kind and a reference; the text and the traceback stand under that reference in the site's own
file. The sentences of the modules in :data:`FIXED` leave as they are: they hold names of entries, callbacks and clients,
numbers, words of the request and of the configuration, and nothing of the data. So do, before round 1, the checks of the
modules in :data:`CHECKING`.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from fedlightning.client.client_errors import describe_error
from fedlightning.client.data_summary import DataSummary
from fedlightning.client.requests import Evaluate
from fedlightning.compat.sheets import is_formula
from fedlightning.contract.messages import Update
from fedlightning.deployment.export import Deployed
from fedlightning.engines.contract import Task, Visit
from fedlightning.engines.score_tasks import ScoreClient, ScoreModel
from fedlightning.errors import ConfigurationError, warn
from fedlightning.guards.preflight_task import PreflightTask, StepFinding
from fedlightning.guards.step_trials import StepTrial
from fedlightning.scores.rows import Gap, Row
from fedlightning.sites.connections import SENTENCE
from fedlightning.sites.run_quotas import is_run
from fedlightning.sites.status import printable
from fedlightning.sites.task_window import MAX_TASKS_AHEAD
from fedlightning.wire.objects import check_of

FIXED = (
    *("fedlightning.sites", "fedlightning.wire", "fedlightning.contract.messages"),
    *("fedlightning.client.visit", "fedlightning.privacy.outgoing"),
)
"""Modules and packages whose own sentences hold nothing of the data."""
CHECKING = (
    "fedlightning.callbacks",
    "fedlightning.layers",
    "fedlightning.wrappers",
    "fedlightning.contract.requirements",
    "fedlightning.contract.setup",
)
"""The same of what a callback's check says of a configuration."""
KNOWN = {*sys.stdlib_module_names, "fedlightning", "lightning", "numpy", "torch"}
"""Packages whose classes of errors are named in what leaves."""
FILE = "errors.log"
LARGEST = 2**24
"""Bytes of the file after which it begins anew; the one before is kept beside it."""


class Texts:
    """Decides which texts leave a site, and keeps those that stay.

    Args:
        folder: The site's folder.
        allowed: Whether all texts leave, by the site's own option.
    """

    def __init__(self, folder: Path, allowed: bool = False) -> None:
        self.file = folder / FILE
        self.allowed = allowed
        self._references: list[
            tuple[BaseException, str]
        ] = []  # of one task: an error that is told twice has one reference

    def of_error(self, error: BaseException) -> str:
        """Return what leaves of an error: its sentence, or its kind and a reference."""
        if self.allowed or _is_fixed(error):
            return " ".join(str(error).split()) or type(error).__name__
        return self._kind(error)

    def of_answer(self, task: Any, answer: Any, errors: Sequence[BaseException] = (), ours: bool = False) -> Any:
        """Return an answer as it may leave."""
        self._references = []
        if isinstance(answer, Deployed):
            answer = replace(answer, path=answer.path and self._below(answer.path))
        if self.allowed:
            return answer
        if isinstance(answer, Update):
            whom = f"client '{answer.client}'"
            if answer.error not in (None, f"{whom} has no training samples"):
                reason = self._withheld(answer.error or "", errors if answer.cause is None else [answer.cause])
                answer.error = f"{whom} failed: {reason}"
            answer.gaps = [(*place, self._withheld(reason, errors)) for *place, reason in answer.gaps]  # type: ignore[misc]
            answer.logs = [log for log in answer.logs if log.method == "metrics"]  # others are texts, images, figures
        elif isinstance(answer, list):
            answer = [
                replace(row, reason=self._withheld(row.reason, errors)) if isinstance(row, Gap) else row
                for row in answer
            ]
        elif isinstance(answer, Deployed) and answer.reason is not None:
            answer = replace(answer, reason=self._withheld(answer.reason, errors))
        elif isinstance(task, PreflightTask):
            answer = replace(answer, said=answer.said if ours else [self._withheld(text, ()) for text in answer.said])
            if answer.refusal is not None and not (errors and _is_fixed(errors[-1], CHECKING)):
                where = f"{task.callback} refuses to run at client '{task.client}'"
                answer = replace(answer, refusal=f"{where}: {self._withheld(answer.refusal, errors)}.")
        elif isinstance(answer, StepFinding) and answer.refusal is not None:
            reason = self._withheld(answer.refusal, [] if answer.cause is None else [answer.cause])
            where = f"A step of {task.split} data fails for client '{task.client}', tried before round 1"
            answer = replace(answer, refusal=f"{where}: {reason}.")
        return answer

    def _below(self, path: str) -> str:
        """Return a path as it is seen from the site's folder: where that lies is the site's own affair."""
        home, exported = self.file.parent.resolve(), Path(path).resolve()
        return exported.relative_to(home).as_posix() if exported.is_relative_to(home) else exported.name

    def _withheld(self, text: str, errors: Sequence[BaseException]) -> str:
        """Return what leaves instead of a text that one of some errors may have given: the last, if it quotes none."""
        quoted = [error for error in errors if describe_error(error) in text] or errors
        if not quoted:
            return f"a text that stays at its site ({self._write_aside(text)})"
        return describe_error(quoted[-1]) if _is_fixed(quoted[-1]) else self._kind(quoted[-1], text)

    def _kind(self, error: BaseException, text: str = "") -> str:
        reference = next((name for seen_error, name in self._references if seen_error is error), None)
        if reference is None:
            trace = "".join(traceback.format_exception(error))
            reference = self._write_aside(f"{text}\n{trace}" if text else trace)
            self._references.append((error, reference))
        return f"{_known_kind(error)} ({reference})"

    def _write_aside(self, text: str) -> str:
        """Write a text into the site's own file; return the words that refer to it."""
        reference = uuid.uuid4().hex[:8]
        text = text.encode("utf-8", "backslashreplace").decode()
        entry = f"{time.strftime('%Y-%m-%d %H:%M:%S')} reference {reference}\n{text.rstrip()}\n\n"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self.file.exists() and self.file.stat().st_size > LARGEST:
                self.file.replace(self.file.with_suffix(".old"))
            number = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(number, "a", encoding="utf-8") as file:
                file.write(entry)
        except OSError as error:  # the answer leaves all the same
            print(f"{self.file} cannot be written ({error}): {entry}", flush=True)
        return f"reference {reference} in {FILE} there"


def _known_kind(error: BaseException) -> str:
    """Return the name of the first class of an error that is not a user's: code can make a class with any name."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in KNOWN)


def _is_fixed(error: BaseException, modules: Sequence[str] = FIXED) -> bool:
    """Return whether an error was raised by one of some modules whose sentences are fixed, and quotes no other error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    alone = error.__cause__ is None and (error.__context__ is None or (error.__suppress_context__ and modules is FIXED))
    return alone and any(f"{name}.".startswith(f"{module}.") for module in modules)


TEXT = 256
"""Characters of a name in a request, such as a tag or a model's key."""
NAMES = 2**20
"""Names in a list, such as all clients of a federation."""

Rule = Callable[[Any, Any], str | None]
"""Of what a site knows of itself and a value: why that is not allowed, as the end of a sentence; `None`: it is."""


def when(fits: Callable[[Any, Any], bool], words: str | Callable[[Any], str]) -> Rule:
    """Return the rule that a value fits, and the words for one that does not."""
    return lambda here, value: None if fits(here, value) else words if isinstance(words, str) else words(here)


def count(most: Callable[[Any], int], what: str) -> Rule:
    """Return the rule of a count that is not larger than the site's own configuration gives."""
    return when(
        lambda here, value: type(value) is int and 0 <= value <= most(here),
        lambda here: f"it is {what} from 0 to {most(here)} here",
    )


def one_of(*words: Any) -> Rule:
    """Return the rule of a value that is one of a few."""
    return when(lambda here, value: value in words, f"it is one of {', '.join(map(repr, words))}")


def all_in(words: Callable[[Any], Collection[str]], what: str) -> Rule:
    """Return the rule of names that are known, each once."""
    return when(
        lambda here, value: len(value) <= NAMES and len(set(value)) == len(value) and set(value) <= set(words(here)),
        what,
    )


def is_text(value: Any) -> bool:
    """Return whether a value is a text of ordinary length."""
    return type(value) is str and len(value) <= TEXT


def is_small(value: Any) -> bool:
    """Return whether texts in a value are of ordinary length, and its lists and dicts too."""
    if isinstance(value, dict):
        return len(value) <= NAMES and all(is_small(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return len(value) <= NAMES and all(map(is_small, value))
    return not isinstance(value, str) or len(value) <= TEXT


def small(kind: Any, what: str) -> Rule:
    """Return the rule of a value that is what an annotation says, and small."""
    check = check_of(kind)
    return when(lambda here, value: check(value) and is_small(value), what)


A_TEXT = small(str, f"it is a text of at most {TEXT} characters")
TEXTS = small(Sequence[str], f"it is a list of at most {NAMES} names of at most {TEXT} characters")
YES_OR_NO = small(bool, "it is yes or no")


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isalnum() and len(value) <= TEXT


ENVELOPES: dict[str, dict[str, Rule]] = {
    "hello": {
        "run": when(lambda here, value: is_run(value), "the name of a run is 32 of the digits 0-9 and a-f"),
        "agreement": when(lambda here, value: isinstance(value, dict), "it says how the server is configured"),
        "assigned": small(dict[str, str], "it says who has which model"),
        "stage": one_of("fit", "test"),
        "left_out": TEXTS,
        "public": when(
            lambda here, value: (
                value is None or (isinstance(value, dict) and set(value) == {"samples", "batch_size", "content"})
            ),
            "it says which public data the server has",
        ),
        "export": YES_OR_NO,
        "template": when(lambda here, value: isinstance(value, dict), "it holds the weights that the run begins with"),
        "statistics": small(
            dict[str, dict[str, float] | list[float]] | None, "it says what the data have agreed on before round 1"
        ),
        "code": small(dict[str, dict[str, str]], "it says which files the code of the server has"),
    },
    "turned away": {"why": when(lambda here, value: type(value) is str, "it is a sentence")},
    "tasks": {
        "tasks": when(
            lambda here, value: isinstance(value, list) and len(value) <= MAX_TASKS_AHEAD,
            f"it is a list of at most {MAX_TASKS_AHEAD}",
        ),
        "budget": when(
            lambda here, value: isinstance(value, int | float) and 0 <= value < math.inf, "it is a number of seconds"
        ),
    },
    "describe": {"leave_out": TEXTS},
    "measure": {},
    "ping": {},
    "task": {
        "task": lambda here, value: None,  # the site looks at its kind, and RULES at the rest
        "number": when(lambda here, value: _is_word(value), "it is a name of letters and digits"),
        "version": when(
            lambda here, value: value == "" or _is_word(value), "such are not names of a run or of a version"
        ),
        "keep": when(
            lambda here, value: (
                value is None
                or (isinstance(value, list) and len(value) <= MAX_TASKS_AHEAD and all(map(_is_word, value)))
            ),
            "it names the versions of a record that stay",
        ),
    },
}
"""By what is asked for, what a request holds beside `do` and `session`, all of it; `"task"`: a part of `"tasks"`."""


def fault_of_request(do: str, asked: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a request, tasks apart, as a sentence; `None` if nothing is."""
    rules = ENVELOPES[do]
    unknown = next((name for name in asked if name not in (*rules, "do", "session")), None)
    if unknown is not None:
        return f"'{unknown!s:.40}' is not part of it"
    return first_fault({name: (rule, asked.get(name)) for name, rule in rules.items()}, None, do)


def first_fault(rule_by_name: Mapping[str, tuple[Rule, Any]], here: Any, what: str) -> str | None:
    """Return the sentence of the first of some values, by name and with their rules, that is not allowed."""
    for name, (rule, value) in rule_by_name.items():
        try:
            reason = rule(here, value)
        except (TypeError, ValueError, AttributeError):  # of a kind that the rule does not foresee
            reason = "it is of another kind"
        if reason is not None:
            if is_dataclass(value):
                return reason  # of a part of it
            quoted = f" is {value!r:.60}" if isinstance(value, int | float | str) else ""
            return f"{name} of its {what}{quoted}: {reason}"
    return None


METRICS = 10_000
"""Names of metrics in an answer."""
MOST_SAMPLES = 2**53
"""Samples of a client: sums of more are not whole numbers."""
LARGE = 0.9
"""Share of all training samples from which a site is named."""
NOT_ASKED = "its site answers with scores that were not asked for"
NO_NAME = f"its site names metrics by other than at most {METRICS} short texts that can be printed and are not formulas"


def fault(task: Task[Any], answer: Any) -> str | None:
    """Return what is wrong with an answer before the server checks what it says; `None` if nothing is."""
    if isinstance(task, Visit):
        return _fault_of_update(task.evaluate, answer)
    if isinstance(task, ScoreModel | ScoreClient):
        if not isinstance(answer, list) or not all(isinstance(row, Row) for row in answer):
            return f"its site answers with a {type(answer).__name__}, not with scores"
        clients = {task.client} if isinstance(task, ScoreClient) else set(task.clients)
        asked = (task.scored.round, task.scored.stage, task.scored.model, task.scored.checkpoint)
        if any(
            row.client not in clients or (row.round, row.stage, row.model, row.checkpoint) != asked for row in answer
        ):
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


def _fault_of_places(evaluate: Evaluate, places: Sequence[tuple[str, str, str, str]]) -> str | None:
    """Return what is wrong with scores by client, data, split and metric: each answers what was asked, once."""
    if any(data not in evaluate.data or split not in evaluate.splits for _, data, split, _ in places):
        return NOT_ASKED
    if len(set(places)) != len(places):
        return "its site answers with a score twice"
    return None if _are_names([metric for *_, metric in places]) else NO_NAME


def _are_names(metrics: Collection[str]) -> bool:
    return len(metrics) <= METRICS and all(
        is_text(metric) and metric.isprintable() and not is_formula(metric) for metric in metrics
    )


def check_shares(summary_by_site: Mapping[str, DataSummary], most: float) -> None:
    """Compare the training samples that sites say they have: means are weighted by them, and nobody can count them.

    Args:
        summary_by_site: What each site says of its data, by its name.
        most: The largest share that a site may have.
    """
    shares = dict.fromkeys(summary_by_site, 0)
    for name, summary in summary_by_site.items():
        for client, sizes in summary.sizes.items():
            counts = [*sizes, *summary.over_rounds.get(client, ())]
            bad = next((count for count in counts if not 0 <= count < MOST_SAMPLES), None)
            if bad is not None:
                raise ConfigurationError(
                    f"Site '{name}' says that client '{client}' has {bad} samples: no such number."
                )
            if client in summary.client_ids:
                shares[name] += max(sizes[0], *summary.over_rounds.get(client, (0,)))
    total, several = sum(shares.values()), len([count for count in shares.values() if count]) > 1
    for name, count in shares.items() if several else ():
        claim = f"Site '{name}' says that it has {count} of all {total} training samples"
        if count > most * total:
            raise ConfigurationError(
                f"{claim}, more than max_share={most:g}: the mean would be its model. Ask that site, take uniform weights, "
                "or raise --max_share."
            )
        if count > LARGE * total:
            warn(f"{claim}: a mean weighted by samples is its model. Nobody can count them; --max_share refuses such.")


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
        messages = [printable(text, SENTENCE) for text in answer.said]
        answer = replace(answer, refusal=answer.refusal and printable(answer.refusal, SENTENCE), said=messages)
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
