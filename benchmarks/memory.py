"""Peak memory with 10, 100 and 1000 clients of a 1.7 million parameter network: `python -m benchmarks.memory`.

    python -m benchmarks.memory [--works clients10,clients100,clients1000] [--contestants "bare loop,fedlightning"]

Each measurement is a process of its own that trains two rounds in which every client takes one step. If a method keeps
nothing for its clients, the peak must not depend on their number.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from benchmarks.run import BARE, measure


def peaks(works: list[str], contestants: list[str]) -> dict[str, dict[str, float]]:
    """Return contestant -> work -> peak megabytes."""
    return {name: {work: measure(name, work, 1)["peak_mb"] for work in works} for name in contestants}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--works", default="clients10,clients100,clients1000")
    parser.add_argument("--contestants", default=f"{BARE},fedlightning")
    options = parser.parse_args()
    works = options.works.split(",")
    found = peaks(works, options.contestants.split(","))
    shown = Table("contestant", *works, title="Peak memory in MB (above the bare loop with as many clients)")
    for name, of_work in found.items():
        bare = found.get(BARE, {})
        cells = [
            f"{peak:.0f}" + (f" (+{peak - bare[work]:.0f})" if name != BARE and work in bare else "")
            for work, peak in of_work.items()
        ]
        shown.add_row(name, *cells)
    Console(width=None if Console().is_terminal else 120).print(shown)


if __name__ == "__main__":
    main()
