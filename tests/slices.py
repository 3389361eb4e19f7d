"""The slow tests in slices, or as many as fit into some minutes: `make test-slow`, a plugin of pytest.

::

    python -m pytest -p tests.slices -m slow --slice 2/4
    python -m pytest -p tests.slices -m slow --minutes 30

Tests of what has changed since the main branch come first. The others come in an order that differs from commit to
commit, so that over several runs that are cut short each has its turn.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
BASES = ("origin/main", "main", "HEAD~1")
"""What the checkout is compared with: the first of these that is there and is not the checkout itself."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", default="1/1", help="the share of the tests to run: 2/4 is the second of four")
    parser.addoption("--minutes", type=float, default=None, help="skip what has not begun after so many minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()
    slice_of(config.getoption("slice"), [])  # a word that is not a slice is refused before anything is collected


STARTED = pytest.StashKey[float]()


@pytest.hookimpl(trylast=True)  # of those that were not deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = {*slice_of(config.getoption("slice"), [item.nodeid for item in items])}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    commit, changed = git("rev-parse", "HEAD")[:1], changed_files()
    items[:] = sorted(
        (item for item in items if item.nodeid in chosen),
        key=lambda item: (distance(item.nodeid, changed), turn(item.nodeid.partition("[")[0], commit)),
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - item.config.stash[STARTED] > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes are over")


def slice_of(share: str, tests: Iterable[str]) -> list[str]:
    """Return one of so many equal shares of some tests, which do not depend on their order.

    Example:
        >>> slice_of("2/3", ["d", "b", "a", "c", "e"])
        ['b', 'e']
    """
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", share)
    if not found or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--slice {share} is not a share. Write 2/4 for the second of four.")
    return sorted(tests)[int(found[1]) - 1 :: int(found[2])]


def distance(nodeid: str, changed: Sequence[str]) -> int:
    """Return how near a test is to changed files: 0 its own or the one it is named after, 1 its room, 2 none.

    Example:
        >>> changed = ["callbacks/fedbuff.py", "fedlightning/wire/objects.py"]
        >>> [distance(f"tests/{file}.py::test_it", changed) for file in ("callbacks/test_fedbuff", "wire/test_wire")]
        [0, 1]
        >>> distance("tests/resume/test_kills.py::test_it", changed)
        2
    """
    path = PurePosixPath(nodeid.partition("::")[0])
    for file in map(PurePosixPath, changed):
        if file == path or (file.suffix == ".py" and path.stem == f"test_{file.stem}"):
            return 0
    folders = [file.parts[:-1] for file in map(PurePosixPath, changed)]
    rooms = {folder[0] if folder[0] in ("callbacks", "datamodules") else folder[-1] for folder in folders if folder}
    rooms |= {folder[1] for folder in folders if len(folder) > 1}
    return 1 if {*path.parts[1:2]} & rooms else 2


def turn(test: str, commit: Sequence[str]) -> str:
    """Return a key that orders tests differently for each commit."""
    return hashlib.sha256("".join([*commit, test]).encode()).hexdigest()


def changed_files() -> list[str]:
    """Return the files that differ from the main branch; none where there is no other commit to compare with."""
    for base in BASES:
        fork = git("merge-base", "HEAD", base)
        if fork and fork != git("rev-parse", "HEAD"):
            return git("diff", "--name-only", fork[0])
    return []


def git(*words: str) -> list[str]:
    """Return the lines that a command of git prints; none if it cannot be run."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
