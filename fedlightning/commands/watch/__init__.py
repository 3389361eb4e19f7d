"""`fedlightning watch`: look at a run, or at the runs of `compare`, `sweep` and `league`, while they go on."""

from __future__ import annotations

import subprocess
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedlightning.commands.study_options import Parser
from fedlightning.commands.terminal import console, say, shown
from fedlightning.commands.watch.pages import PageServer
from fedlightning.config.input_errors import InputError

DESCRIPTION = """\
Show a page, on this machine only, that follows a run by its files: rounds, curves, clients, failures, bytes, epsilon and
the expected end. Of a folder of compare, sweep or league it shows the grid of runs as it fills.

It reads what runs write and writes nothing, so it may begin before a run and end after it."""
EXAMPLES = """\
examples:
  fedlightning watch runs/quickstart                 (the newest run in it)
  fedlightning watch runs/heart --port 8700 --open   (a comparison)
  ssh -L 8700:127.0.0.1:8700 MACHINE                 (then the page of another machine is http://127.0.0.1:8700/ here)
"""


def parser() -> Parser:
    """Return the parser of the command."""
    command = Parser("watch", "FOLDER", DESCRIPTION, EXAMPLES)
    command.add_argument("folder", type=Path, help="folder of a run, of runs, or of an experiment")
    command.add_argument("--port", type=int, default=0, help="port of the page; default: a free one")
    command.add_argument("--open", action="store_true", help="open the page in the browser")
    return command


def watch(words: Sequence[str]) -> int:
    """Carry out the command; it ends by Ctrl-C."""
    options, passed = parser().parse(words)
    if passed:
        raise InputError(f"there is no option '{passed[0]}'. See fedlightning watch --help.")
    with PageServer(options.folder.resolve(), options.port) as server:
        say(console(), f"Watching {shown(options.folder)}: {server.address} (Ctrl-C ends it; runs go on)", markup=False)
        sys.stdout.flush()
        if options.open:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


@contextmanager
def watched(folder: Path, wanted: bool) -> Iterator[None]:
    """Within the block, a process of its own shows the page of a folder, if wanted."""
    if not wanted:
        yield
        return
    page = subprocess.Popen([sys.executable, "-m", "fedlightning", "watch", str(folder)], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        page.terminate()
        page.wait()
