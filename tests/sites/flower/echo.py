"""A site that answers every request with its name and the size, and writes down what people there are told."""

from __future__ import annotations

import sys
from pathlib import Path

from fedlightning.sites.flower import programs
from fedlightning.wire import write


def echo(folder: Path, port: int, name: str) -> None:
    programs.prepare(folder / name / "flower")

    def told(reason: str) -> None:
        with (folder / name / "told").open("a") as file:
            file.write(f"{reason}\n")

    while True:  # a SuperNode ends where the server does
        place = folder / name, f"127.0.0.1:{port}", folder / "certificates" / name, name, told
        with programs.supernode(*place) as answer_all:
            answer_all(lambda request: write({"answer": name, "size": len(request)}), lambda: True)


if __name__ == "__main__":
    echo(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
