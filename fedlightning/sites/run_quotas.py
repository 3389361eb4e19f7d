"""The runs that a site takes part in: how much each has asked of it, and how many of them lie on its disk.

A server makes up the names of runs and their rounds. So what it asks is counted here, in files that no request resets, and
new runs have an end, too.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedlightning.errors import ConfigurationError
from fedlightning.storage.files import sync_folder, writing

ASKED, MODELS = "asked", "models"
PARTS = (ASKED, "records", MODELS, "configurations")
"""Folders of a site in which a run has a folder or a file of its name."""
MAX_RUNS = 100
"""Runs in a site's folder, unless the site is told otherwise."""
DAY = 86400.0
DAYS = 30
"""Days without a task after which a run that has left no model makes room for a new one."""


def is_run(name: object) -> bool:
    """Return whether that is the name of a run."""
    return isinstance(name, str) and re.fullmatch("[0-9a-f]{32}", name) is not None


class TooMuchError(ConfigurationError):
    """More than a server may ask."""


class RequestCounts:
    """What a run has asked of a site's clients, counted by round in a file that is only appended to.

    Args:
        folder: The site's folder.
        run: Name of the run.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     RequestCounts(Path(folder), "run").count("Visit", 0, ["a"], most=2)
        ...     RequestCounts(Path(folder), "run").count("Visit", 0, ["a"], most=2)
        ...     RequestCounts(Path(folder), "run").count("Visit", 0, ["a"], most=2)
        Traceback (most recent call last):
        fedlightning.sites.run_quotas.TooMuchError: client 'a' was asked for Visit 2 times in round 1, ...
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._path = folder / ASKED / f"{run}.log"
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            sync_folder(self._path.parent)
        text = self._path.read_text(encoding="utf-8", errors="replace")
        self._count = Counter(text.splitlines())
        self._round = max(map(int, re.findall(r"^(\d+) ", text, re.MULTILINE | re.ASCII)), default=0)

    def count(self, what: str, round: int, clients: Collection[str], most: int) -> None:
        """Count a task before it is carried out.

        Args:
            what: Its kind.
            round: From 0; -1: it has none, and counts in the newest.
            clients: Whom it is about; an empty name: all of the site.
            most: How often each client may be asked for that in a round.

        Raises:
            TooMuchError: If it is once too often.
        """
        self._round = max(self._round, round)
        now = self._round if round < 0 else round
        lines = [f"{now} {what} {client!r}" for client in clients]
        for line, client in zip(lines, clients, strict=True):
            if self._count[line] >= most:
                whom = f"client '{client}'" if client else "this site"
                raise TooMuchError(
                    f"{whom} was asked for {what} {most} times in round {now + 1}, the most by the site's configuration, "
                    "failures and new starts included. Begin a new run; who answers for the data may remove "
                    f"{ASKED}/{self._path.name} from the site's folder"
                )
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        self._count.update(lines)


@dataclass(frozen=True, order=True)
class RunOnDisk:
    """A run on a site's disk.

    Attributes:
        used: When it was last used; seconds since 1970.
        name: Its name.
        num_bytes: Bytes of its files.
        models: Number of models of clients.
    """

    used: float
    name: str
    num_bytes: int
    models: int


def kept_runs(folder: Path) -> list[RunOnDisk]:
    """Return the runs in a site's folder, the one that was used last at the end."""
    runs = dict[str, RunOnDisk]()
    for path in (path for part in PARTS for path in (folder / part).glob("*") if is_run(path.stem)):
        for file in (path, *path.rglob("*")):
            with suppress(FileNotFoundError):  # a site at work removes some
                about, run = file.lstat(), runs.get(path.stem, RunOnDisk(0.0, path.stem, 0, 0))
                size, models = run.num_bytes + about.st_size * file.is_file(), run.models + (file.suffix == ".ckpt")
                runs[path.stem] = RunOnDisk(max(run.used, about.st_mtime), path.stem, size, models)
    return sorted(runs.values())


def remove_run(folder: Path, name: str) -> None:
    """Remove all that a run has left in a site's folder."""
    for path in (path for part in PARTS for path in (folder / part).glob(f"{name}*") if path.stem == name):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_room(folder: Path, run: str, most: int) -> None:
    """Refuse a new run where there is no room for one: old ones that have left no model are removed for it.

    Raises:
        TooMuchError: If all that are there are new, or have models.
    """
    runs = kept_runs(folder)
    if run in [kept.name for kept in runs]:
        return
    old = [kept.name for kept in runs if not kept.models and time.time() - kept.used > DAYS * DAY]
    surplus = max(0, len(runs) + 1 - most)
    if surplus > len(old):
        raise TooMuchError(
            f"this site keeps {most} runs at most, and they are there. `fedlightning sites --folder FOLDER --runs` shows "
            f"them at the site, and with `--prune {DAYS}` removes those that were not used for so many days, models too; "
            "`fedlightning site --most_runs` lets it keep more"
        )
    for name in old[:surplus]:
        remove_run(folder, name)
