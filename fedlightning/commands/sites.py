"""`fedlightning sites`: who takes part in a federation between machines, and what a site does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedlightning.commands.study_options import Parser
from fedlightning.commands.terminal import console, say, shown
from fedlightning.compat.rich_tables import print_whole
from fedlightning.config.input_errors import InputError
from fedlightning.resume.lock import holder_of, only_writer
from fedlightning.sites.run_quotas import DAY, kept_runs, remove_run
from fedlightning.sites.status import (
    FILE,
    NAME,
    OwnStatus,
    ServerStatus,
    SiteStatus,
    as_json,
    of_clients,
    printable,
    read,
)

DESCRIPTION = """\
Show the sites of a federation: who is connected since when, and what each does now.

On the server's machine, beside a `fedlightning serve` that runs or has ended; on the machine of a
site, with --folder site, what that site does."""
EXAMPLES = """\
examples:
  fedlightning sites
  fedlightning sites --folder serve --json
  fedlightning sites --folder site --runs
  fedlightning sites --folder site --prune 90
  watch -n 2 fedlightning sites
"""


def parser() -> Parser:
    """Return the parser of the command."""
    command = Parser("sites", "", DESCRIPTION, EXAMPLES)
    command.add_argument(
        "--folder", type=Path, default=Path("serve"), help="folder of the server or of a site (default: serve)"
    )
    command.add_argument(
        "--runs", action="store_true", help="at a site: the runs whose records and models are kept there"
    )
    command.add_argument(
        "--prune",
        type=float,
        metavar="DAYS",
        help="at a site that is stopped: remove runs not used for so many days, models too",
    )
    command.add_argument(
        "--json", action="store_true", help="for programs: all of it as JSON; times are seconds since 1970"
    )
    return command


def sites(words: Sequence[str]) -> int:
    """Carry out the command and return its exit code."""
    options = parser().parse_args(list(words))
    folder: Path = options.folder.resolve()
    holder = holder_of(folder)
    try:
        status = read(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"There is no {FILE} in {folder}: it is neither the folder of a `fedlightning serve` nor of a `fedlightning "
            "site`. Give the --folder that was given there."
        ) from None
    if holder is None:
        _settle(status)
    if options.runs or options.prune is not None:
        return _runs(folder, status, options.prune, options.json)
    if options.json:
        print(json.dumps({"runs": holder is not None, "process": holder, **as_json(status)}, indent=1))
        return 0
    now = time.time()
    lines = _server(status, holder, now) if isinstance(status, ServerStatus) else _own(status, holder, now)
    screen = console()
    for line in lines:
        if isinstance(line, Table):
            print_whole(screen, line)
        else:
            say(screen, line)
    return 0


def _runs(folder: Path, status: ServerStatus | OwnStatus, days: float | None, as_text: bool) -> int:
    """Show the runs that a site keeps, or remove old ones and show those."""
    if not isinstance(status, OwnStatus):
        raise InputError(
            f"{folder} is a server's: --runs and --prune look at what a site keeps. Give the --folder of one."
        )
    if days is not None and not days >= 0:
        raise InputError(f"prune={days:g} must be a number of days from 0.")
    now, runs = time.time(), kept_runs(folder)
    if days is not None:
        with only_writer(folder):  # a site that runs needs them
            runs = [run for run in runs if now - run.used >= days * DAY]
            for run in runs:
                remove_run(folder, run.name)
    if as_text:
        print(json.dumps([vars(run) for run in runs], indent=1))
        return 0
    say(console(), _line("Runs", f"{len(runs)}{'' if days is None else ' removed'} in {shown(folder)}"))
    for run in runs:
        age, size = duration(now - run.used), run.num_bytes / 1e6
        say(console(), f"{run.name}  {run.models} models, {size:.1f} MB, last used {age} ago")
    return 0


def _settle(status: ServerStatus | OwnStatus) -> None:
    """Take back what the last words of a process that was killed say of the present."""
    status.doing = ""
    for site in status.sites if isinstance(status, ServerStatus) else ():
        site.doing, site.doing_since = "", None
        if site.state == "connected":
            site.state, site.since = "not connected", status.written
    if isinstance(status, OwnStatus) and status.state == "connected":
        status.state, status.since = "not connected", status.written


# -- at the server -----------------------------------------------------------------------------------------------------
def _server(status: ServerStatus, holder: dict[str, Any] | None, now: float) -> Iterator[Text | Table]:
    run = printable(shown(Path(status.run))) if status.run else "not begun"
    yield _line("Run", f"{run}, {status.rounds_done} of {status.max_rounds} rounds finished")
    yield _line("Server", _process(holder, status, now, "fedlightning serve ... --resume auto"))
    if status.doing:
        yield _line("Now", printable(status.doing))
    here = sum(1 for site in status.sites if site.state == "connected")
    yield _line("Sites", f"{here} connected, {status.expected} wanted")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("site", "clients", "state, since", "doing", "heard"):
        table.add_column(name, no_wrap=name != "doing")
    for name in ("round", "failures"):
        table.add_column(name, justify="right", no_wrap=True)
    for site in status.sites:
        table.add_row(*(Text(cell) for cell in _cells(site, now)))
    if status.sites:
        yield table
    for site in status.sites:
        if site.reason:
            yield Text(f"{printable(site.name, NAME)} is refused: {printable(site.reason)}")


def _cells(site: SiteStatus, now: float) -> Iterator[str]:
    yield printable(site.name, NAME)
    yield of_clients(site.clients).partition(" ")[2] if site.clients else "?"
    yield "never here" if site.since is None else f"{site.state} {duration(now - site.since)}\n{moment(site.since)}"
    if site.doing:
        yield printable(site.doing) + ("" if site.doing_since is None else f" ({duration(now - site.doing_since)})")
    else:
        yield "waits" if site.state == "connected" else ""
    yield "" if site.heard is None else f"{duration(now - site.heard)} ago"
    yield "" if site.round is None else str(site.round)
    yield str(site.failures)


def _process(holder: dict[str, Any] | None, status: ServerStatus | OwnStatus, now: float, again: str) -> str:
    """Return whether the process runs that has written a status, and how it has ended."""
    written = f"this was written {duration(now - status.written)} ago"
    if holder is not None:
        where = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
        return f"runs, {printable(where)}, since {moment(status.started)} ({duration(now - status.started)}); {written}"
    ended = status.ended if isinstance(status, ServerStatus) else status.since if status.state == "ended" else None
    if ended is None:
        return f"was killed, or its machine was; {written}. It goes on with `{again}`"
    outcome = f": {printable(status.outcome)}" if isinstance(status, ServerStatus) and status.outcome else ""
    return f"has ended at {moment(ended)} ({duration(now - ended)} ago){outcome}"


# -- at a site ---------------------------------------------------------------------------------------------------------
def _own(status: OwnStatus, holder: dict[str, Any] | None, now: float) -> Iterator[Text]:
    yield _line("Site", f"{printable(status.name, NAME)} with {of_clients(status.clients)}")
    yield _line("Process", _process(holder, status, now, "fedlightning site ... with the same --folder"))
    if holder is not None:
        since = "" if status.since is None else f" since {moment(status.since)} ({duration(now - status.since)})"
        why = f": {printable(status.reason)}" if status.reason else ""
        yield _line("Server", f"{printable(status.server)}, {status.state}{since}{why}")
    if status.run:
        since = "" if status.run_since is None else f", since {moment(status.run_since)}"
        yield _line("Run", f"{printable(status.run, 12)}{since}: {status.tasks} tasks, {status.failures} failures")
    if status.doing:
        yield _line("Now", printable(status.doing))
    if status.last and status.last_at is not None:
        yield _line("Last", f"{printable(status.last)}, round {status.round}, {duration(now - status.last_at)} ago")
    if status.refused and status.refused_at is not None:
        yield _line("Refused", f"{printable(status.refused)} ({moment(status.refused_at)})")


# -- words -------------------------------------------------------------------------------------------------------------
def _line(name: str, text: str) -> Text:
    return Text.assemble((f"{name + ':':<9}", "bold"), text)


def moment(at: float) -> str:
    """Return a time of this machine's clock and zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "?"


def duration(seconds: float) -> str:
    """Return seconds in the units that a person would use.

    Example:
        >>> duration(7.4), duration(90), duration(3 * 3600 + 120), duration(2 * 86400 + 7200)
        ('7 s', '1 min', '3 h 2 min', '2 d 2 h')
    """
    if not 0 <= seconds < 1e10:
        return "0 s" if seconds < 0 else "?"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
