"""Which exceptions are a client's failure, and which end the run."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType

from lightning.pytorch.utilities.exceptions import SIGTERMException

from fedlightning.errors import ControlFlow


def ends_run(error: BaseException) -> bool:
    """Return True if an exception from a client's code is not the client's failure.

    That is Ctrl-C (also in the form of the `SystemExit` that Lightning's Trainer makes of it), SIGTERM, what a signal's
    handler raises to leave the program, and what FedLightning raises for its own use. Anything else is the client's:
    `sys.exit` in its code, too, must not end the training of the others.
    """
    if isinstance(error, Exception):
        return False
    if isinstance(error, ControlFlow | KeyboardInterrupt | GeneratorExit | SIGTERMException):
        return True
    return _interrupted(error) or _from_handler(error)


def client_failure(error: BaseException) -> BaseException:
    """Return an exception that is the client's failure."""
    if ends_run(error):
        raise error
    noted = _noted.get()
    if noted is not None:
        noted.append(error)
    return error


@contextmanager
def noting() -> Iterator[list[BaseException]]:
    """Give the list of the clients' failures inside the block: those that became a part of an answer."""
    errors: list[BaseException] = []
    token = _noted.set(errors)
    try:
        yield errors
    finally:
        _noted.reset(token)


_noted: ContextVar[list[BaseException] | None] = ContextVar("noted", default=None)


def describe_error(error: BaseException) -> str:
    """Return a failure in words: class and message.

    Example:
        >>> describe_error(SystemExit(3)), describe_error(MemoryError())
        ('SystemExit: 3', 'MemoryError')
    """
    if isinstance(error.__cause__, StopIteration) and str(error) == "generator raised StopIteration":
        return describe_error(error.__cause__)  # Python's words for it where the client's code ran below a generator
    try:
        text = str(error)
    except Exception:  # of a user's class
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _interrupted(error: BaseException) -> bool:
    seen: set[int] = set()
    before: BaseException | None = error
    while before is not None and id(before) not in seen:
        if isinstance(before, KeyboardInterrupt):
            return True
        seen.add(id(before))
        before = before.__cause__ or before.__context__
    return False


def _from_handler(error: BaseException) -> bool:
    """Return True if a handler of a signal raised it, such as one that answers SIGTERM by `sys.exit`."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {code for handler in handlers if isinstance(code := getattr(handler, "__code__", None), CodeType)}
    frames: list[FrameType] = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_code in codes for frame in frames)
