"""Run tests as other machines would: another processor, clock, place, terminal, home, temporary folder, order of tests.

`make test-anywhere`, or with words of your own::

    python -m tools.anywhere kathmandu -n 2 tests/run

The clock is set in each process of pytest and its forks (`tests/conftest.py`): under libfaketime Python cannot wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PLACES = {
    "kathmandu": {
        "ATEN_CPU_CAPABILITY": "default",
        "TZ": "Asia/Kathmandu",
        "LC_ALL": "C",
        "COLUMNS": "60",
        "PYTHONHASHSEED": "0",
        "FEDLIGHTNING_TEST_CLOCK": "2027-12-31 23:55",
    },
    "newfoundland": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "COMPATIBLE",
        "TZ": "America/St_Johns",
        "LC_ALL": "de_DE.UTF-8",
        "COLUMNS": "200",
        "PYTHONHASHSEED": "1",
        "FEDLIGHTNING_TEST_CLOCK": "2028-02-28 23:55",
    },
}
"""What is set in the environment, by name."""


def environment(place: str, folder: Path) -> dict[str, str]:
    """Return the environment of a place.

    Args:
        place: One of :data:`PLACES`.
        folder: An empty folder. What is in it are a temporary folder with an odd name and a home that cannot be written.
    """
    # As long as torch's workers can bear: the sockets that they make in it have at most 107 bytes of path.
    temporary = folder / "a temporary folder with spaces, an ümlaut"
    temporary.mkdir()
    home = folder / "home"
    home.mkdir()
    home.chmod(0o555)
    return {**os.environ, **PLACES[place], "TMPDIR": str(temporary), "HOME": str(home)}


def main(words: Sequence[str]) -> int:
    """Run pytest at a place, in random order.

    Args:
        words: The place, then arguments for pytest.
    """
    place, *others = words or ["kathmandu"]
    if place not in PLACES:
        print(f"There is no place '{place}'. Places: {', '.join(PLACES)}.")
        return 2
    print(f"{place}: " + " ".join(f"{name}={value}" for name, value in PLACES[place].items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="anywhere-") as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--random-order-bucket=module"]
        return subprocess.run([*command, *others], env=environment(place, Path(folder)), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
