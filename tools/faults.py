"""Plant faults, one at a time, and say whether the fast tests catch them.

`tools/faults.toml` lists them: a file, a text in it, what stands there instead, and the tests of its room. A fault that
survives these tests is a test that is missing::

    python -m tools.faults                    # all of them: some ten minutes
    python -m tools.faults fednova norms      # those whose name contains one of these words
    python -m tools.faults -- tests/scores   # all of them, with other tests

The faults are planted in a copy in a temporary folder, so the working tree stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
LIMIT = 300.0
"""Seconds after which a fault counts as caught: the tests hang."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: Room and what is wrong, in a few words.
        file: Where it is planted, from the root of the repository.
        old: Text that occurs once in the file.
        new: What stands there instead.
        tests: Test modules, the nearest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted_in(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: If the text has changed since the fault was written.
        """
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}. Write it anew.")
        return text.replace(self.old, self.new)


def read(table: Path = TABLE) -> list[Fault]:
    """Return the faults of a table."""
    found = tomllib.loads(table.read_text())["fault"]
    return [Fault(one["name"], one["file"], one["old"], one["new"], tuple(one["tests"])) for one in found]


@contextmanager
def copied(root: Path = ROOT) -> Iterator[Path]:
    """Yield a copy of the checkout: of the files that git knows or would add, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True
    )
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_symlink() or (root / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, Path(folder) / name, follow_symlinks=False)
        yield Path(folder)


def caught_by(fault: Fault, copy: Path, tests: Sequence[str]) -> str:
    """Plant a fault in a copy, run tests, and mend it again. Return the test that fails; empty if none does.

    Raises:
        RuntimeError: If the tests could not be run.
    """
    path = copy / fault.file
    text = path.read_text()
    path.write_text(fault.planted_in(text))
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "its time limit"
    finally:
        path.write_text(text)
    if done.returncode > 2:  # 1: a test failed; 2: a module could not be imported
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return next(iter(failed), "an error") if done.returncode else ""


def main(words: Sequence[str]) -> int:
    """Plant the faults that are asked for; return how many survive."""
    names, _, tests = " ".join(words).partition("--")
    wanted = [one for one in read() if not names.split() or any(name in one.name for name in names.split())]
    left = 0
    with copied() as copy:
        for fault in wanted:
            began = monotonic()
            by = caught_by(fault, copy, tests.split() or fault.tests)
            left += not by
            said = f"caught by {by}" if by else "SURVIVED"
            print(f"{monotonic() - began:4.0f} s  {fault.name} ({fault.file}): {said}", flush=True)
    print(f"{len(wanted) - left} of {len(wanted)} caught")
    return left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
