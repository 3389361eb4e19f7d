"""Free text that would leave a site: the message of an exception may quote a patient. By default it stays.

What leaves of an error is its kind and a reference; the text and the traceback stand under that reference in the site's own
file. The sentences of the modules in :data:`FIXED` leave as they are: they hold names of entries, callbacks and clients,
numbers, words of the request and of the configuration, and nothing of the data. So do, before round 1, the checks of the
modules in :data:`CHECKING`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlightning.client.client_errors import in_words
from fedlightning.contract.messages import Update
from fedlightning.deployment.tasks import Deployed
from fedlightning.guards.preflight_task import PreflightTask, StepFinding
from fedlightning.scores.rows import Gap

FIXED = (
    *("fedlightning.sites", "fedlightning.wire", "fedlightning.contract.messages"),
    *("fedlightning.client.visit", "fedlightning.privacy.leaving"),
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
        self._known: list[tuple[BaseException, str]] = []  # of one task: an error that is told twice has one reference

    def of_error(self, error: BaseException) -> str:
        """Return what leaves of an error: its sentence, or its kind and a reference."""
        if self.allowed or _is_fixed(error):
            return " ".join(str(error).split()) or type(error).__name__
        return self._kind(error)

    def of_answer(self, task: Any, answer: Any, errors: Sequence[BaseException] = (), ours: bool = False) -> Any:
        """Return an answer as it may leave."""
        self._known = []
        if isinstance(answer, Deployed):
            answer = replace(answer, path=answer.path and self._below(answer.path))
        if self.allowed:
            return answer
        if isinstance(answer, Update):
            whom = f"client '{answer.client}'"
            if answer.error not in (None, f"{whom} has no training samples"):
                said = self._withheld(answer.error or "", errors if answer.cause is None else [answer.cause])
                answer.error = f"{whom} failed: {said}"
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
            said = self._withheld(answer.refusal, [] if answer.cause is None else [answer.cause])
            where = f"A step of {task.split} data fails for client '{task.client}', tried before round 1"
            answer = replace(answer, refusal=f"{where}: {said}.")
        return answer

    def _below(self, path: str) -> str:
        """Return a path as it is seen from the site's folder: where that lies is the site's own affair."""
        home, found = self.file.parent.resolve(), Path(path).resolve()
        return found.relative_to(home).as_posix() if found.is_relative_to(home) else found.name

    def _withheld(self, text: str, errors: Sequence[BaseException]) -> str:
        """Return what leaves in the place of a text that one of some errors may have given: the last, if it quotes none."""
        found = [one for one in errors if in_words(one) in text] or errors
        if not found:
            return f"a text that stays at its site ({self._kept(text)})"
        return in_words(found[-1]) if _is_fixed(found[-1]) else self._kind(found[-1], text)

    def _kind(self, error: BaseException, text: str = "") -> str:
        reference = next((name for known, name in self._known if known is error), None)
        if reference is None:
            trace = "".join(traceback.format_exception(error))
            reference = self._kept(f"{text}\n{trace}" if text else trace)
            self._known.append((error, reference))
        return f"{_known_kind(error)} ({reference})"

    def _kept(self, text: str) -> str:
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
    """Return the name of the first class of an error that is no user's: code can make a class with any name."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in KNOWN)


def _is_fixed(error: BaseException, modules: Sequence[str] = FIXED) -> bool:
    """Return whether an error was raised by one of some modules whose sentences are fixed, and quotes no other error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    alone = error.__cause__ is None and (error.__context__ is None or (error.__suppress_context__ and modules is FIXED))
    return alone and any(f"{name}.".startswith(f"{own}.") for own in modules)
