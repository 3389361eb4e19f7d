"""What the user is told when something cannot work, or should not pass unseen."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Sized
from importlib import import_module
from multiprocessing import get_all_start_methods
from pathlib import Path
from types import ModuleType
from typing import Any

INSIDE = {"fedlightning", "lightning", "torch", "torchmetrics", "jsonargparse", *sys.stdlib_module_names}
"""Packages whose lines do not help to find an error in the user's code."""


EXTRAS = {
    "clinical": ("monai>=1.3", "nibabel>=5", "wfdb>=4.3.1"),
    "flower": ("flwr==1.41.0",),
    "huggingface": ("datasets>=4",),
    "lora": ("peft>=0.18",),
    "privacy": ("cryptography>=44", "opacus>=1.6"),
    "ray": ("ray>=2.55",),
    "report": ("scikit-posthocs>=0.16.1",),
    "sweep": ("optuna>=4",),
    "vision": ("timm>=1.0.11", "torchvision>=0.23"),
}
"""Packages of the extras, as in `pyproject.toml`."""


class ConfigurationError(ValueError):
    """A configuration that cannot work. The message names the thing, the value, the rule and the way out."""


class ControlFlow(BaseException):
    """Raised by FedLightning for its own use, through code of users.

    It is no `Exception`, so that neither `hasattr` nor a user's `except` can swallow it and continue with something else.
    """


class Restart(ControlFlow):
    """A visit has met something by which it has to begin again, otherwise; nothing of it has counted yet."""

    def apply(self, runner: Any) -> None:
        """Let the client side (:class:`~fedlightning.client.runtime.ClientRuntime`) do otherwise from now on."""
        raise NotImplementedError


def warn(text: str) -> None:
    """Warn the user of something that does not stop the run."""
    warnings.warn(text, UserWarning, stacklevel=3)


def missing_package(needs: str, extra: str) -> str:
    """Return the sentence of an optional package that is not there.

    It names the packages themselves: on an index the name of this one may be anybody's.

    Args:
        needs: What needs which package, the beginning of the sentence.
        extra: The extra that the package is in.

    Example:
        >>> missing_package("FedIT needs peft", "lora")
        "FedIT needs peft, which is not installed: pip install 'peft>=0.18' (in a checkout: pip install -e '.[lora]')."
    """
    command = shlex.join(["pip", "install", *EXTRAS[extra]])
    return f"{needs}, which is not installed: {command} (in a checkout: pip install -e '.[{extra}]')."


def import_package(module: str, needs: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: Its name.
        needs: What needs which package, the beginning of the sentence.
        extra: The extra that the package is in.

    Raises:
        ImportError: If the package is not installed; one that is there and lacks another says so itself.

    Example:
        >>> import_package("json", "This needs json", "lora").__name__
        'json'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ImportError(missing_package(needs, extra)) from error


def refuse_without_posix(what: str, way_out: str) -> None:
    """Refuse what shares memory with processes that are forked, or ends groups of them.

    Raises:
        ConfigurationError: On Windows.
    """
    if "forkserver" not in get_all_start_methods() or not hasattr(os, "killpg"):
        raise ConfigurationError(f"{what} needs a POSIX system such as Linux or macOS, which this is not. {way_out}")


def listed(names: Iterable[object], most: int = 5) -> str:
    """Return names in a sentence: the first ones, and how many more there are.

    Example:
        >>> listed("abc"), listed("abc", most=2), listed([])
        ('a, b, c', 'a, b and 1 more', 'none')
    """
    everything = [str(name) for name in names]
    more = f" and {len(everything) - most} more" if len(everything) > most else ""
    return f"{', '.join(everything[:most])}{more}" or "none"


def join_words(words: Iterable[str]) -> str:
    """Return words with commas, and "and" before the last.

    Example:
        >>> join_words("a"), join_words("abc")
        ('a', 'a, b and c')
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def count_of(things: Sized, name: str) -> str:
    """Return how many things there are, in words.

    Example:
        >>> count_of("a", "seed"), count_of("ab", "seed")
        ('1 seed', '2 seeds')
    """
    return f"{len(things)} {name}{'s' if len(things) != 1 else ''}"


def users_line(error: BaseException) -> str:
    """Return the innermost line of the user's own code in a traceback, as "file.py, line 3, in forward"; or nothing."""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in INSIDE and "site-packages" not in code.co_filename:
            line = f"{Path(code.co_filename).name}, line {trace.tb_lineno}, in {code.co_name}"
        trace = trace.tb_next
    return line


class DamagedStateError(ValueError):
    """A saved state whose files are not those that were written."""
