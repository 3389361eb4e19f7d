"""What all runs have spent on one data set: a budget belongs to the data, not to a run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedlightning.algorithm import file_name_of, write_secret

Steps = Sequence[Sequence[float]]
"""Noise multiplier, rate and number of steps, for each kind of step."""


class Ledger:
    """A file that runs on the same data share, each with what it spends; one run at a time writes it.

    Args:
        path: Folder of the ledger; `None`: there is none, and every run counts alone.
        name: Whose data, such as a client's id.
        secret: The run's secret, whose hash names the run.
        units: Records, or patients, of the data, where another number of them is other data; 0: whatever they are.

    Attributes:
        releases: By name, the steps of this run's releases, as the file had them when it was last held.

    Example:
        >>> with Ledger(None, "hospital", "a secret").hold([(1.0, 0.1, 5)]) as others:
        ...     others
        []
    """

    def __init__(self, path: str | None, name: str, secret: str, units: int = 0) -> None:
        self.path = None if path is None else Path(path) / f"{file_name_of(name)}.json"
        self.units, self.releases = units, dict[str, list[list[float]]]()
        self.run = hashlib.sha256(f"ledger|{secret}".encode()).hexdigest()[:16]

    @contextmanager
    def hold(self, spent: Steps | None, release: str = "") -> Iterator[list[Sequence[float]]]:
        """Give the steps of all other runs, and write down what this run has spent unless the block raises.

        Args:
            spent: All steps of this run, those that it is about to take too; `None`: only look.
            release: The one release that has taken these steps, where a run writes down each by itself; what it was about to
                take is this then.

        Raises:
            ValueError: If the file is not a ledger, or that of other data.
        """
        if self.path is None:
            yield []
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock")):
            runs, units = self._read()
            if self.units and units not in (0, self.units):
                raise ValueError(
                    f"{self.path} counts what was spent on {units} records or patients, and here are {self.units}. Of data "
                    "divided otherwise no file has all that was spent on a record. Divide them as before, or take another "
                    "ledger for other data. Where they are the same and some more or fewer, write the number into the file."
                )
            names = {run: run.partition(" ") for run in runs}
            self.releases = {name: runs[run] for run, (who, _, name) in names.items() if who == self.run and name}
            yield [steps for run, history in runs.items() if names[run][0] != self.run for steps in history]
            if spent is not None:
                if release:
                    runs.pop(self.run, None)
                saved: dict[str, Any] = {"runs": runs | {f"{self.run} {release}".strip(): [list(row) for row in spent]}}
                saved |= {"units": self.units or units} if self.units or units else {}
                write_secret(self.path, f"{json.dumps(saved, indent=1)}\n".encode())

    def note(self, spent: Steps) -> None:
        """Write down what this run has spent."""
        with self.hold(spent):
            pass

    def _read(self) -> tuple[dict[str, list[list[float]]], int]:
        assert self.path is not None
        if not self.path.exists():
            return {}, 0
        try:
            saved = json.loads(self.path.read_text())
            runs = {str(run): [_steps(row) for row in history] for run, history in saved["runs"].items()}
            return runs, int(saved.get("units", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} is not a ledger of what runs have spent ({error}). Without it nobody knows: restore it, or "
                "take another folder for other data."
            ) from error


UPDATES = "clients"
"""The file that counts whole updates; the others count records or patients of a client each."""


def spent_in(folder: str, of_updates: bool) -> Iterator[list[Sequence[float]]]:
    """Give the steps of all runs, for each file of a ledger that counts updates, or that counts records."""
    for path in sorted(path for path in Path(folder).glob("*.json") if (path.stem == UPDATES) == of_updates):
        file = Ledger(None, "", "")
        file.path = path
        with file.hold(None) as steps:
            yield steps


def forgotten(path: Path) -> ValueError:
    """Return the error of a ledger without what a run has written into it: what others have spent may be gone too."""
    return ValueError(
        f"{path} has lost what this run has spent before: it was removed, or changed by hand. Without it nobody knows what "
        "was spent: restore it, or start a new run on other data."
    )


def _steps(values: Sequence[object]) -> list[float]:
    """Return a ledger's entry, which cannot take away from what others have spent."""
    noise, rate, count = (float(number) for number in values)  # type: ignore[arg-type]
    if not (0 <= noise < math.inf and 0 <= rate <= 1 and count >= 0 and count.is_integer()):
        raise ValueError(f"{values} is not a noise multiplier, rate and number of steps")
    return [noise, rate, count]
