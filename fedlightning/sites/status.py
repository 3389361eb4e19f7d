"""What a server and a site tell of themselves in a small file, for `fedlightning sites`: written often, never waited for.

The file is replaced as a whole, at most once a second at the server, and not forced to the disk. A file that cannot be
written ends no run. What other machines say (names, reasons) is cut and made printable before it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from fedlightning.errors import warn
from fedlightning.storage.files import UnreadableError, UnwritableError, read_json, readable_json, write_text_atomically
from fedlightning.wire.objects import check_of

FILE = "status.json"
EVERY = 1.0
"""Seconds from one writing to the next, at least."""
NAME = 80
"""Characters of a name from another machine that are shown."""
REASON = 500
"""Characters of a reason from another machine that are kept."""
LISTED = 10
"""Clients that are listed in a line."""
FORMAT = 1


def printable(text: object, limit: int = REASON) -> str:
    r"""Return a text from another machine as one line that can do nothing to a terminal.

    Example:
        >>> printable("cleve\x1b[31mland\n"), printable("abcdef", 4)
        ('cleve\\x1b[31mland', 'abc…')
    """
    line = " ".join(str(text)[: 4 * limit].split())
    line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def stamped(text: str) -> str:
    """Return a line for the terminal with the time of this machine in front."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"


def of_clients(clients: Sequence[str]) -> str:
    """Return clients in words.

    Example:
        >>> of_clients(["a"]), of_clients(["a", "b"]), of_clients([])
        ('client a', 'clients a, b', 'no client')
    """
    if not clients:
        return "no client"
    more = f" and {len(clients) - LISTED} more" if len(clients) > LISTED else ""
    shown = ", ".join(printable(client, NAME) for client in clients[:LISTED])
    return f"client{'s' if len(clients) > 1 else ''} {shown}{more}"


@dataclass
class SiteStatus:
    """A site, as the server sees it. Times are seconds since 1970.

    Attributes:
        name: Its name.
        clients: Its clients, as far as they are known.
        state: `"connected"`, `"not connected"` or `"refused"`.
        since: When that began; `None`: it was never here.
        reason: Why it is refused.
        doing: What it does now.
        doing_since: When that began.
        round: The round of what it does, or did last.
        heard: When it last answered.
        failures: Failures of its clients so far.
    """

    name: str
    clients: list[str] = field(default_factory=list)
    state: str = "not connected"
    since: float | None = None
    reason: str = ""
    doing: str = ""
    doing_since: float | None = None
    round: int | None = None
    heard: float | None = None
    failures: int = 0


@dataclass
class ServerStatus:
    """What a server tells.

    Attributes:
        started: When it was started.
        written: When this was written.
        expected: Sites without which the run does not begin.
        run: The run's folder.
        rounds_done: Finished rounds.
        max_rounds: Rounds in all.
        doing: What it waits for, where that is not a site's work.
        ended: When it has ended; `None`: it has not, or was killed.
        outcome: How it has ended.
        sites: Its sites.
    """

    kind: ClassVar[str] = "server"
    started: float
    written: float = 0.0
    expected: int = 0
    run: str = ""
    rounds_done: int = 0
    max_rounds: int = 0
    doing: str = ""
    ended: float | None = None
    outcome: str = ""
    sites: list[SiteStatus] = field(default_factory=list)


@dataclass
class OwnStatus:
    """What a site tells of itself.

    Attributes:
        name: Its name.
        server: Address of its server.
        started: When it was started.
        written: When this was written.
        clients: Its clients.
        state: `"connected"`, `"not connected"`, `"refused"` by its server, or `"ended"`.
        since: When that began.
        reason: Why it is not connected, or refused.
        run: Name of the run that it takes part in.
        run_since: When it joined that.
        doing: What it does now.
        last: What it did last.
        last_at: When that ended.
        round: The round of that.
        tasks: Number of tasks that it has carried out in this run.
        failures: Tasks in which a client failed.
        refused: What it has refused last.
        refused_at: When.
    """

    kind: ClassVar[str] = "site"
    name: str
    server: str
    started: float
    written: float = 0.0
    clients: list[str] = field(default_factory=list)
    state: str = "not connected"
    since: float | None = None
    reason: str = ""
    run: str = ""
    run_since: float | None = None
    doing: str = ""
    last: str = ""
    last_at: float | None = None
    round: int | None = None
    tasks: int = 0
    failures: int = 0
    refused: str = ""
    refused_at: float | None = None


Status = ServerStatus | OwnStatus
Made = TypeVar("Made")


def as_json(status: Status) -> dict[str, Any]:
    """Return a status as plain values, as the file holds it."""
    return {"format": FORMAT, "kind": status.kind, **asdict(status)}


def read(folder: Path) -> Status:
    """Read the status that lies in a folder of `fedlightning serve` or `fedlightning site`."""
    path = folder / FILE
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise UnreadableError("it holds no entries")
        if content.get("format") != FORMAT:
            raise UnreadableError(f"its format is {printable(repr(content.get('format')), 20)}, and {FORMAT} is known")
        kinds: dict[Any, type[Status]] = {"server": ServerStatus, "site": OwnStatus}
        kind = content.get("kind")
        if not isinstance(kind, str) or kind not in kinds:
            raise UnreadableError("it is neither a server's nor a site's")
        return _make(kinds[kind], content)
    except UnreadableError as error:
        raise UnreadableError(
            f"{path} is damaged: {error}. It is written anew when the server or the site goes on; no run needs it."
        ) from None


def _make(kind: type[Made], content: Mapping[str, Any]) -> Made:
    """Return an object of one of the classes above from plain values, each of which must be what it should be."""
    hints, values = (get_type_hints(kind), {part.name: content.get(part.name, MISSING) for part in fields(kind)})  # type: ignore[arg-type]
    for name, value in values.items():
        if value is MISSING:
            raise UnreadableError(f"it has no '{name}'")
        if name == "sites" and isinstance(value, list) and all(isinstance(site, dict) for site in value):
            values[name] = [_make(SiteStatus, site) for site in value]
        elif not check_of(hints[name])(value) or value != value:
            raise UnreadableError(f"its '{name}' is {printable(repr(value), 40)}")
    return kind(**values)


class StatusFile:
    """The file, written when it has changed.

    Args:
        folder: Folder of the server or the site; `None`: there is no file.
        every: Seconds from one writing to the next, at least.
        clock: Seconds.
    """

    def __init__(self, folder: Path | None, every: float = EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = None if folder is None else folder / FILE
        self._every, self._clock = every, clock
        self._next = -float("inf")
        self._last: dict[str, Any] = {}

    @property
    def is_due(self) -> bool:
        """Whether it may be written now."""
        return self._path is not None and self._clock() >= self._next

    def write(self, status: Status, lasting: bool = False) -> None:
        """Write a status, if it is another than the last one."""
        content = as_json(status)
        content.pop("written")
        if self._path is None or (content == self._last and not lasting):
            return
        status.written = time.time()
        try:
            write_text_atomically(self._path, readable_json(as_json(status), levels=3), lasting)
        except UnwritableError as error:
            warn(f"`fedlightning sites` shows nothing new: {error}")
            self._path = None
            return
        self._last, self._next = content, self._clock() + self._every
